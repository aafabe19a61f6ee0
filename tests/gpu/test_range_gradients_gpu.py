"""Gradients where queries see ranges besides, on the GPU of this machine."""

import random as python_random

import pytest
import torch
from helpers.gradient_cases import KERNEL_TOLERANCE, Case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(16))
def test_random_case(seed):
    draw = python_random.Random(seed)
    images, begin = [], 0
    while begin < 700:
        begin += draw.choice((0, draw.randint(1, 150)))
        images.append((begin, begin + draw.choice((0, 20, 63, 255))))
        begin = images[-1][1] + 1
    sizes = [draw.choice((draw.randint(1, 64), draw.randint(65, 600))) for _ in range(3)]
    packed = draw.random() < 0.5
    lengths = {
        "lengths_q": tuple(draw.randint(0, n) for n in sizes) if packed else None,
        "lengths_k": tuple(sizes) if packed else None,
    }
    heads = draw.choice((1, 2))
    case = Case(
        f"random-{seed}",
        batch=2,
        seq_q=max(sizes) - draw.choice((0, 0, min(sizes))) or 1,
        seq_k=max(sizes),
        heads_q=heads * draw.choice((1, 2, 4)),
        heads_kv=heads,
        head_dim=draw.choice((64, 128, 128, 256)),
        dtype=draw.choice((torch.bfloat16, torch.float16)),
        causal=True,
        window=draw.choice((None, (draw.randint(0, 200), 0))),
        softcap=draw.choice((None, None, 5.0)),
        sink=draw.random() < 0.3,
        through=draw.choice(("o", "o+lse")),
        deterministic=draw.random() < 0.4,
        images=tuple(images),
        **lengths,
    )
    tensors = case.tensors("cuda")
    case.check(case.gradients(tensors), tensors, KERNEL_TOLERANCE[case.dtype])
