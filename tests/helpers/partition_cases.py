"""Packed batches of few queries a request, whose keys are cut into partitions of one length."""

import random

from helpers.varlen_cases import Packed
from warpspec.fmha.plan.candidates import Candidate
from warpspec.fmha.plan.cost import Way


def in_partitions(candidate: Candidate) -> bool:
    """Whether a candidate cuts keys into partitions."""
    return candidate.way is Way.PARTITIONS


def random_partitions(seed: int) -> tuple[Packed, int]:
    """(A batch with requests of all lengths, some without queries or keys; into how many partitions the longest is
    cut)."""
    draw = random.Random(seed)
    requests, most = draw.choice((1, 5, 33, 128)), draw.choice((1, 1, 4))
    queries = [draw.randint(0, most) for _ in range(requests)]
    queries[0] = queries[0] if any(queries) else 1
    keys = [
        draw.randint(0, draw.choice((1, 40, 400))) if i % 9 else draw.randint(0, 1500)
        for i in range(requests)
    ]
    heads_q, heads_kv = draw.choice(((2, 1), (4, 2), (8, 1)))
    batch = Packed(
        "random", seq_q=tuple(queries), seq_k=tuple(keys), heads_q=heads_q, heads_kv=heads_kv,
        head_dim=draw.choice((64, 128)), page_size=draw.choice((None, 16, 64)), causal=draw.random() < 0.5,
        sink=draw.random() < 0.5, seed=seed,
    )  # fmt: skip
    return batch, draw.randint(2, 20)
