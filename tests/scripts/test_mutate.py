"""The order checker's score on mutants: a sample of a kernel, held against what is recorded for all of them; and the
reasons for what is not found."""

import json
from pathlib import Path

import mutate
import pytest
from shared import mutant_launches
from shared.mutant_cases import KERNELS
from shared.mutants import Mutant, Score, Verdict
from shared.mutants_explained import EXPLAINED
from shared.source_places import Pattern, operations_of, place_of

RECORDED = json.loads((Path(__file__).resolve().parent.parent.parent / "docs" / "mutants.json").read_text())
SCORES, REASONS = RECORDED["scores"], RECORDED["reasons"]
SAMPLE = "topk-cluster"


@pytest.mark.timeout(240)
def test_the_score_of_a_sample_is_as_recorded():
    results = {SAMPLE: mutate.score(SAMPLE, seeds=1)}
    recorded = {group: {SAMPLE: cells[SAMPLE]} for group, cells in SCORES.items() if SAMPLE in cells}
    assert mutate.table(results) == recorded
    assert mutate.reasons(results).keys() == {reason for reason, names in REASONS.items() if SAMPLE in names}


def test_a_kernel_launched_again_counts_each_mutant_once():
    found = Score(seeds=1, only="barrier.cluster")
    with mutant_launches.recorded(lambda launch: [found.visit(launch) for _ in range(2)]):
        KERNELS[SAMPLE]()
    texts = [verdict.text for verdict in found.verdicts]
    assert texts and len(set(texts)) == len(texts)


def test_most_mutants_of_all_kernels_are_found():
    cells = [cell for kernels in SCORES.values() for cell in kernels.values()]
    found, explained, every, _ = (sum(cell[i] for cell in cells) for i in range(4))
    assert every > 2000
    assert found > 0.92 * every
    assert found + explained == every  # the explained ones change nothing


def test_every_reason_explains_a_recorded_mutant():
    """One that was never needed, or was edited since its kernels were scored, is no evidence: score them again."""
    assert [str(reason) for reason in EXPLAINED if str(reason) not in REASONS] == []
    assert REASONS.keys() - {str(reason) for reason in EXPLAINED} == set()
    explained = {name for cells in SCORES.values() for name, cell in cells.items() if cell[1]}
    assert {name for names in REASONS.values() for name in names} == explained
    assert explained <= KERNELS.keys()


def test_a_record_keeps_other_cases(tmp_path):
    """Cases that are scored again replace what the file had of them, and nothing else."""
    mutant = Mutant("warp barrier", 0, "deleted", "", ())
    first, second = EXPLAINED[:2]
    file = tmp_path / "scores.json"
    mutate.record(file, {name: [Verdict(mutant, "", "explained", first)] for name in ("a", "b")})
    mutate.record(file, {"a": [Verdict(mutant, "", "order"), Verdict(mutant, "", "explained", second)]})
    assert json.loads(file.read_text()) == {
        "scores": {"warp barrier": {"a": [1, 1, 2, 0], "b": [0, 1, 1, 0]}},
        "reasons": {str(first): ["b"], str(second): ["a"]},
    }


@pytest.mark.parametrize("reason", EXPLAINED, ids=str)
def test_reasons_name_what_is_there(reason):
    assert [pattern.missing() for pattern in reason.patterns() if pattern.missing()] == []
    assert reason.at or reason.after or reason.before


def test_places_outlive_edits_elsewhere(tmp_path, monkeypatch):
    """A line is named by its function and operation, which stay when lines are put in front of them; renamed and
    removed ones are missed."""
    source = """
class Ring:
    def fill(self, use):
        self.empty.wait(use)
        for i in range(2):
            self.full.wait(
                use + i,
            )
        self.empty.wait(use)
"""
    (tmp_path / "ring.py").write_text(source)
    monkeypatch.setattr("shared.source_places.PACKAGE", tmp_path)
    lines = {4: "self.empty.wait 1", 5: "range", 7: "self.full.wait", 9: "self.empty.wait 2"}
    for line, operation in lines.items():
        assert str(place_of("/src/warpspec/ring.py", line)) == f"ring.py:Ring.fill, {operation}"
    pattern = Pattern.parse("ring.py:Ring.fill, self.empty.wait 2")
    assert pattern.matches(place_of("/src/warpspec/ring.py", 9)) and pattern.missing() == ""
    assert not pattern.matches(place_of("/src/warpspec/ring.py", 4))
    (tmp_path / "ring.py").write_text("# above\n" + source)
    operations_of.cache_clear()
    assert pattern.matches(place_of("/src/warpspec/ring.py", 10)) and pattern.missing() == ""
    for old, new in (("def fill", "def load"), ("        self.empty.wait(use)\n        for", "        for")):
        (tmp_path / "ring.py").write_text(source.replace(old, new))
        operations_of.cache_clear()
        assert "Ring" in pattern.missing()
    (tmp_path / "ring.py").unlink()
    assert pattern.missing() == "there is no file ring.py"
    operations_of.cache_clear()
