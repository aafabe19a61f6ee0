"""Tiles of two KV heads, for rows of keys that fill no lines of L2, on the GPU of this machine."""

import random

import pytest
import torch
from helpers.simulate import choosing
from helpers.varlen_cases import Packed

from warpspec.fmha import attention_varlen
from warpspec.fmha.plan.cost import Way

pytestmark = pytest.mark.gpu
WAYS = {Way.PARTITIONS: 5, Way.SPLIT: 3, Way.QUEUE: 1, Way.SINGLE: 1, Way.PERSISTENT: 1}


def drawn(seed: int) -> Packed:
    """A batch with requests of all lengths, the longest of at least 600 keys, some without queries."""
    draw = random.Random(seed)
    requests, most = draw.choice((1, 6, 40, 128)), draw.choice((1, 1, 4, 8))
    queries = [draw.randint(0, most) for _ in range(requests)]
    keys = [draw.randint(600, 4000), *(draw.randint(0, 2000) for _ in range(requests - 1))]
    heads_q, heads_kv = draw.choice(((2, 2), (8, 8), (16, 4), (32, 2)))
    return Packed(
        f"{seed}", seq_q=(most, *queries[1:]), seq_k=tuple(keys), heads_q=heads_q, heads_kv=heads_kv,
        head_dim=draw.choice((72, 80, 96, 96, 112, 160, 248)), page_size=draw.choice((None, 16, 64, 256)),
        causal=draw.random() < 0.5, sink=draw.random() < 0.3, window=draw.choice((None, None, (200, 0))), seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed):
    """In each way by turns, twice the same, to the bit."""
    batch, (way, splits) = drawn(seed), list(WAYS.items())[seed % len(WAYS)]
    used, results, chosen = sum(batch.seq_q), [], []
    with choosing(way, lambda found: found.shape.heads_apart and not chosen.append(found), splits=splits):
        for _ in range(2):
            result = attention_varlen(
                **batch.arguments("cuda"), out=batch.poisoned_out("cuda"), return_lse=True
            )
            batch.check(result)
            results.append((result[0][:used].nan_to_num(), result[1][:, :used]))
    assert chosen and all(map(torch.equal, *results))
