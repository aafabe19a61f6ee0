"""Ranges of keys that queries see besides, on the GPU of this machine: the simulator's cases, random ones, a graph."""

import random as python_random

import pytest
import torch
from helpers.gpu_tensors import moved
from helpers.judged_calls import check, run
from helpers.range_cases import CASES, Case, inputs_of

from warpspec.fmha import attention_varlen

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case):
    inputs = inputs_of(case)
    check(case, run(case, moved(inputs)), inputs)


@pytest.mark.parametrize("seed", range(24))
def test_random_case(seed):
    """Every feature with every other, as the draw has it."""
    draw = python_random.Random(seed)
    packed, kv = draw.random() < 0.5, draw.choice((1, 2))
    requests = draw.randint(1, 4)
    keys = tuple(draw.choice((1, 100, draw.randint(1, 1500))) for _ in range(requests))
    if packed:
        queries = tuple(draw.randint(1, n) for n in keys)
    else:
        queries = (draw.randint(1, min(keys)),) * requests
    images, begin = [], 0
    while begin < max(keys):
        begin += draw.randint(0, 200)
        images.append((begin, begin + draw.choice((0, 15, 63, 255))))
        begin = images[-1][1] + 1
    window = draw.choice((None, (draw.randint(0, 300), 0)))
    options = {
        "window": window,
        "softcap": draw.choice((None, None, 8.0)),
        "sink": draw.choice((None, torch.randn(2 * kv))),
        "num_splits": draw.choice((None, None, 1, 4)),
    }
    case = Case(
        f"random-{seed}",
        queries,
        keys,
        tuple(images),
        (2 * kv, kv),
        draw.choice((64, 72, 128, 128, 256)),
        draw.choice((torch.bfloat16, torch.float16)),
        None if packed else draw.choice((None, 16, 64, 128)),
        packed,
        cut=window is not None and draw.random() < 0.5,
        options=tuple(options.items()),
    )
    inputs = inputs_of(case, seed)
    check(case, run(case, moved(inputs)), inputs)


def test_a_graph_serves_other_images():
    case = CASES[0]
    inputs = inputs_of(case)
    inputs["k"], inputs["v"] = (torch.randn(t.shape).to(t.dtype) for t in (inputs["k"], inputs["v"]))
    on_device = moved(inputs)
    run(case, on_device)
    out = torch.full_like(on_device["q"], torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_varlen(**on_device, out=out)
    inputs["ranges"][40:60] = torch.tensor([35, 150], dtype=torch.int32)
    inputs["ranges"][70:90] = -1
    on_device["ranges"].copy_(inputs["ranges"])
    out.fill_(torch.nan)
    graph.replay()
    expected = attention_varlen(**inputs, backend="reference")
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=2e-2)
