"""Gathered attention on a GPU, against the reference, and the same bits twice."""

import pytest
import torch
from helpers.gathered_cases import O_TOLERANCE, judge, judge_lse, random_case

from warpspec.fmha import merge
from warpspec.latent.gathered import gathered_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("tokens", "heads", "slots", "options"),
    [
        (5, 8, (130, 70), {"num_splits": 1}),
        (140, 128, (128, 512), {}),
        (40, 96, (64, 65, 1), {"num_splits": 1}),
        (2, 128, (128, 900), {"num_splits": 3}),
        (
            30,
            64,
            (200, 30),
            {"lengths": False, "sink": False, "rotate": False, "lse": False, "num_splits": 1},
        ),
        (1, 64, (128, 3000), {}),
        (7, 17, (128, 600), {"num_splits": 5}),
        (33, 128, (100, 300), {"format": "bf16", "num_splits": 1}),
    ],
)
def test_against_reference(tokens, heads, slots, options):
    case = random_case(tokens, heads, slots, **options).to("cuda")
    runs = [gathered_attention(case.q, case.key_sets, **case.options) for _ in range(2)]
    wanted = gathered_attention(case.q, case.key_sets, backend="reference", **case.options)
    if case.options.get("return_lse"):
        judge_lse(runs[0][1], wanted[1])
        runs, wanted = [o for o, _ in runs], wanted[0]
    assert judge(runs[0], wanted) < O_TOLERANCE
    assert torch.equal(runs[0].nan_to_num(7.0), runs[1].nan_to_num(7.0))


def test_states_merge():
    case = random_case(6, 16, (70, 70), sink=False, rotate=False, lse=False).to("cuda")
    states = [gathered_attention(case.q, [k], normalize=False) for k in case.key_sets]
    wanted = gathered_attention(case.q, case.key_sets, backend="reference")
    assert judge(merge(states)[0], wanted) < O_TOLERANCE


def test_graph_reads_new_slots():
    """A captured launch follows what slots, lengths and rows become."""
    first, second = (random_case(20, 64, (100, 50), seed=seed).to("cuda") for seed in (1, 2))
    options = first.options
    gathered_attention(first.q, first.key_sets, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = gathered_attention(first.q, first.key_sets, **options)
    for a, b in zip(first.key_sets, second.key_sets, strict=True):
        a.slots.copy_(b.slots), a.lengths.copy_(b.lengths), a.pool.data.copy_(b.pool.data)
    first.q.copy_(second.q)
    graph.replay()
    wanted, wanted_lse = gathered_attention(second.q, second.key_sets, backend="reference", **options)
    assert judge(o, wanted) < O_TOLERANCE
    judge_lse(lse, wanted_lse)
