"""Trees of drafts on the GPU of this machine: the cases of the simulator, random ones, CUDA graphs."""

import random as python_random

import pytest
import torch
from helpers.gpu_tensors import moved
from helpers.judged_calls import check, run
from helpers.tree_cases import CASES, Case, inputs_of, random_tree

from warpspec.fmha import attention_varlen, tree_words

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case):
    inputs = inputs_of(case)
    check(case, run(case, moved(inputs)), inputs)


@pytest.mark.parametrize("seed", range(24))
def test_random_case(seed):
    """Every feature with every other, as the draw has it."""
    draw = python_random.Random(seed)
    packed, kv = draw.random() < 0.4, draw.choice((1, 2))
    drafts = draw.choice((1, 2, 5, 16, 40, 64))
    page_size = None if packed else draw.choice((None, 16, 64, 128))
    options = {
        "window": draw.choice((None, (draw.randint(0, 300), 0), (draw.randint(0, 8), None))),
        "softcap": draw.choice((None, None, 8.0)),
        "sink": draw.choice((None, torch.randn(kv * 4))),
        "num_splits": draw.choice((None, None, 1, 4)),
    }
    case = Case(
        f"random-{seed}",
        drafts,
        tuple(draw.choice((0, 1, 63, 64, 500, draw.randint(0, 3000))) for _ in range(draw.randint(1, 5))),
        (4 * kv, kv),
        draw.choice((64, 72, 128, 128, 256)),
        draw.choice((torch.bfloat16, torch.float16)),
        page_size,
        packed,
        options=tuple(options.items()),
    )
    inputs = inputs_of(case, seed)
    check(case, run(case, moved(inputs)), inputs)


def test_a_graph_serves_other_trees():
    """Words, lengths and page tables change between replays."""
    case = next(case for case in CASES if case.id == "packed-window")
    inputs = inputs_of(case)
    on_device = moved(inputs)
    run(case, on_device)
    out = torch.full_like(on_device["q"], torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_varlen(**on_device, out=out)
    generator = torch.Generator().manual_seed(9)
    other = torch.stack([random_tree(case.drafts, generator, 0.9) for _ in case.prefixes])
    inputs["tree"] = tree_words(other).flatten()
    inputs["k"], inputs["v"] = (
        torch.randn(t.shape, generator=generator).to(t.dtype) for t in (inputs["k"], inputs["v"])
    )
    for name in ("tree", "k", "v"):
        on_device[name].copy_(inputs[name])
    out.fill_(torch.nan)
    graph.replay()
    expected = attention_varlen(**inputs, backend="reference")
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=2e-2)
