"""The order checker's score on mutants: a sample of a kernel, held against what is recorded for all of them."""

import json
from collections import Counter
from pathlib import Path

import mutate
import pytest

RECORDED = json.loads((Path(__file__).resolve().parent.parent.parent / "docs" / "mutants.json").read_text())
SAMPLE = "topk-cluster"


@pytest.mark.timeout(240)
def test_the_score_of_a_sample_is_as_recorded():
    verdicts = mutate.score(SAMPLE, seeds=1)
    found, every = Counter(), Counter()
    for verdict in verdicts:
        every[verdict.mutant.group] += 1
        found[verdict.mutant.group] += verdict.found
    recorded = {group: cells[SAMPLE] for group, cells in RECORDED.items() if SAMPLE in cells}
    assert {group: [found[group], every[group]] for group in every} == recorded


def test_most_mutants_of_all_kernels_are_found():
    cells = [cell for kernels in RECORDED.values() for cell in kernels.values()]
    assert sum(cell[1] for cell in cells) > 200
    assert sum(cell[0] for cell in cells) > 0.8 * sum(cell[1] for cell in cells)
