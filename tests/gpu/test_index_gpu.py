"""The indexer on a GPU: selection exact on any rows; queries as the reference has them."""

import pytest
import torch
from index_cases import KINDS, rows

from warpspec.cache import rope_table
from warpspec.indexer import index_queries, index_topk

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
def test_topk(kind):
    for seed, (count, length, k) in enumerate(
        [(40, 5000, 512), (3, 100_000, 2048), (9, 32768, 1024), (17, 333, 1)]
    ):
        logits = rows(kind, count, length, seed=seed)
        lengths = torch.randint(0, length + 1, (count,), generator=torch.Generator().manual_seed(seed)).to(
            torch.int32
        )
        lengths[0] = length
        got = index_topk(logits.cuda(), k, lengths=lengths.cuda())
        wanted = index_topk(logits, k, lengths=lengths, backend="reference")
        assert torch.equal(got[0].cpu(), wanted[0]) and torch.equal(got[1].cpu(), wanted[1])


def test_queries():
    q = torch.randn(100, 64, 128).bfloat16()
    weights, table = torch.randn(100, 64), rope_table(1e4 ** (-torch.arange(32) / 32), 256)
    positions = torch.randint(0, 256, (100,)).to(torch.int32)
    got = index_queries(q.cuda(), weights.cuda(), table.cuda(), positions.cuda())
    wanted = index_queries(q, weights, table, positions, backend="reference")
    assert (got.pool.data.cpu() != wanted.pool.data).float().mean() < 0.01
