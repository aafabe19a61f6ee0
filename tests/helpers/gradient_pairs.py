"""Calls whose gradients are asked for and that together have every feature of these with every other one."""

from __future__ import annotations

import random

import torch

from helpers import block_cases
from helpers.feature_pairs import SIZES, Rules
from helpers.gradient_cases import Case

RULES = Rules(
    features=(
        "causal", "window", "sink", "bias", "packed", "lengths", "q_start", "stride", "softcap", "fp16", "shared",
        "ranges", "blocks", "odd group", "negative scale", "deterministic", "lse", "sliced", "many queries", *SIZES,
    ),
    needs={"stride": "causal", "ranges": "causal"},
    apart=[
        tuple(SIZES), ("stride", "ranges"), ("stride", "window"), ("packed", "lengths"), ("packed", "bias"),
        ("packed", "blocks"), ("ranges", "lengths"), ("ranges", "q_start"), ("ranges", "blocks"),
        ("d192/128", "shared"), ("stride", "blocks"), ("lengths", "blocks"), ("q_start", "blocks"),
    ],
)  # fmt: skip


def case_of(features: frozenset, seed: int) -> Case:
    """A case with these features and random sizes."""
    has, draw = features.__contains__, random.Random(seed)
    size, size_v = next((SIZES[one] for one in sorted(features) if one in SIZES), (64, 64))
    heads_kv = draw.choice((1, 2))
    most = 70 if size == 512 else 150
    queries = draw.randint(66, most) if has("many queries") else draw.randint(1, 20)
    keys = draw.randint(queries, most + 40)
    batch, packed = draw.choice((1, 2)), has("packed")
    lengths_q = (queries, draw.randint(0, queries)) if packed else None
    fields = {
        "lengths_q": lengths_q,
        "lengths_k": tuple(draw.randint(n, keys) for n in lengths_q) if packed else None,
        "kv_lengths": tuple(draw.choice((keys, draw.randint(0, keys))) for _ in range(batch))
        if has("lengths")
        else None,
        "window": draw.choice(((40, None), (15, 3), (60, 0))) if has("window") else None,
        "softcap": 4.0 if has("softcap") else None,
        "scale": -(size**-0.5) if has("negative scale") else None,
        "bias": (draw.random() < 0.5, draw.random() < 0.5) if has("bias") else None,
        "bias_dtype": torch.float32 if has("fp16") else draw.choice((torch.float32, torch.bfloat16)),
        "key_stride": 4 if has("stride") else 1,
        "images": tuple((begin, begin + draw.choice((3, 20))) for begin in range(draw.randint(0, 9), keys, 30))
        if has("ranges")
        else None,
        "blocks": (False, (draw.choice((1, batch)), 1), draw.choice((block_cases.EVEN, block_cases.SPARSE)))
        if has("blocks")
        else None,
        "dtype": torch.float16 if has("fp16") else torch.bfloat16,
    }  # fmt: skip
    if has("q_start"):
        farthest = keys * fields["key_stride"]
        fields["q_start"] = tuple(draw.randint(-3, farthest) for _ in range(2 if packed else batch))
    group = draw.choice((3, 5) if has("odd group") else (1, 2))
    return Case(
        "+".join(sorted(features)) or "plain", batch, queries, keys, heads_kv * group, heads_kv, size, size_v,
        causal=has("causal"), sink=has("sink"), shared_kv=has("shared"), deterministic=has("deterministic"),
        through="o+lse" if has("lse") else "o", sliced=has("sliced"), **fields,
    )  # fmt: skip
