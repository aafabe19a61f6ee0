"""bench_train.py on the CPU: candidates are the same attention, and a model learns alike with each."""

import bench_train
import pytest
import torch
from shared.attention_peers import SDPA
from shared.sweep_calls import OURS


def test_document_lengths_sum_up():
    for tokens in (1, 48, 8192):
        lengths = bench_train.document_lengths(tokens)
        assert sum(lengths) == tokens and min(lengths) > 0


def test_candidates_compute_the_same():
    """Against each document alone: a neighbour's key would change the result."""
    lengths, generator = [5, 1, 9], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(15, heads, 64, generator=generator).bfloat16() for heads in (4, 2, 2))
    functions = bench_train.attention_functions(lengths, "cpu")
    assert set(functions) == {OURS, SDPA}
    for first, count in ((0, 5), (5, 1), (6, 9)):
        rows = slice(first, first + count)
        alone = bench_train.attention_functions([count], "cpu")[SDPA](q[rows], k[rows], v[rows])
        for name, call in functions.items():
            torch.testing.assert_close(call(q, k, v)[rows], alone, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("mode", bench_train.MODES[:2])
def test_curves_agree(mode, monkeypatch):
    monkeypatch.setattr(bench_train, "MODES", (mode,))
    lengths = bench_train.document_lengths(bench_train.TINY.tokens)
    calls = bench_train.attention_functions(lengths, "cpu")
    steps = list(bench_train.batches(bench_train.TINY, 4, "cpu"))
    curves = {
        name: bench_train.curve(bench_train.TINY, bench_train.register(name, call), lengths, steps, "cpu")
        for name, call in calls.items()
    }
    assert (curves[OURS] - curves[SDPA]).abs().max() < 5e-3 and curves[OURS][-1] != curves[OURS][0]
