"""Lists of blocks on the GPU of this machine: the simulator's cases, random ones, a graph."""

import random as python_random

import pytest
import torch
from helpers.block_cases import CASES, Case, inputs_of, moved_inputs
from helpers.judged_calls import check, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case):
    inputs, _ = inputs_of(case)
    check(case, run(case, moved_inputs(inputs)), inputs)


@pytest.mark.parametrize("seed", range(24))
def test_random_case(seed):
    draw = python_random.Random(seed)
    kv, flex, batch = draw.choice((1, 2)), draw.random() < 0.5, draw.choice((1, 2))
    group = draw.choice((1, 2, 3, 4))
    causal = not flex and draw.random() < 0.6
    options = {
        "causal": causal,
        "window": draw.choice((None, (draw.randint(0, 300), 0))) if causal else None,
        "softcap": draw.choice((None, None, 8.0)),
        "sink": draw.choice((None, torch.randn(group * kv))),
        "num_splits": draw.choice((None, None, 1, 4)),
    }
    case = Case(
        f"random-{seed}",
        draw.choice((1, 100, draw.randint(1, 1500))),
        draw.choice((130, draw.randint(1, 1500))),
        (group * kv, kv),
        draw.choice((64, 72, 128, 128, 256)),
        batch,
        (draw.choice((1, batch)), draw.choice((1, group * kv))),
        flex,
        draw.choice(((0.4, 0.3, 0.3), (0.9, 0.05, 0.05), (0.0, 0.5, 0.5), (0.2, 0.8, 0.0))),
        dtype=draw.choice((torch.bfloat16, torch.float16)),
        options=tuple(options.items()),
    )
    inputs, _ = inputs_of(case, seed)
    check(case, run(case, moved_inputs(inputs)), inputs)
