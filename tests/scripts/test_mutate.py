"""The order checker's score on mutants: a sample of a kernel, held against what is recorded for all of them."""

import json
from pathlib import Path

import mutate
import pytest

RECORDED = json.loads((Path(__file__).resolve().parent.parent.parent / "docs" / "mutants.json").read_text())
SAMPLE = "topk-cluster"


@pytest.mark.timeout(240)
def test_the_score_of_a_sample_is_as_recorded():
    counts = mutate.table({SAMPLE: mutate.score(SAMPLE, seeds=1)})
    recorded = {group: cells[SAMPLE] for group, cells in RECORDED.items() if SAMPLE in cells}
    assert {group: cells[SAMPLE] for group, cells in counts.items()} == recorded


def test_most_mutants_of_all_kernels_are_found():
    cells = [cell for kernels in RECORDED.values() for cell in kernels.values()]
    found, explained, every, _ = (sum(cell[i] for cell in cells) for i in range(4))
    assert every > 2000
    assert found > 0.92 * every
    assert found + explained == every  # the explained ones change nothing
