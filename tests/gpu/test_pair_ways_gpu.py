"""K and V two tensors at D 512, in every way to hand out work, on the GPU of this machine."""

import random

import pytest
import torch
from helpers.simulate import choosing
from helpers.varlen_cases import Packed

from warpspec.fmha import attention_varlen
from warpspec.fmha.plan.cost import Way

pytestmark = pytest.mark.gpu
WAYS = {Way.QUEUE: 1, Way.PARTITIONS: 5, Way.SINGLE: 1, Way.SPLIT: 3, Way.PERSISTENT: 1}


def drawn(seed: int, way: Way) -> Packed:
    """A batch with requests of all lengths, some without queries; few queries where keys are cut into partitions."""
    draw = random.Random(seed)
    heads_q, heads_kv = draw.choice(((8, 1), (16, 2), (32, 4), (4, 2)))
    requests, most = draw.choice((1, 6, 40)), 2 if way is Way.PARTITIONS else draw.choice((4, 200))
    queries = [most, *(draw.randint(0, most) for _ in range(requests - 1))]
    keys = [draw.randint(600, 4000), *(draw.randint(0, 1500) for _ in range(requests - 1))]
    return Packed(
        f"{seed}", seq_q=tuple(queries), seq_k=tuple(keys), heads_q=heads_q, heads_kv=heads_kv, head_dim=512,
        page_size=draw.choice((None, 16, 64, 256)), causal=draw.random() < 0.7, sink=draw.random() < 0.3,
        window=draw.choice((None, None, (200, 0))), softcap=draw.choice((None, None, 20.0)), seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_random_batches(seed):
    """In each way by turns, twice the same, to the bit, whichever CTA takes a tile from a queue."""
    way, splits = list(WAYS.items())[seed % len(WAYS)]
    batch, results, chosen = drawn(seed, way), [], []
    used = sum(batch.seq_q)
    with choosing(way, lambda found: not chosen.append(found), splits=splits):
        for _ in range(2):
            result = attention_varlen(
                **batch.arguments("cuda"), out=batch.poisoned_out("cuda"), return_lse=True
            )
            batch.check(result)
            results.append((result[0][:used].nan_to_num(), result[1][:, :used]))
    assert {found.way for found in chosen} == {way} and all(map(torch.equal, *results))
