"""The indexer on a GPU: selection exact on any rows; queries as the reference has them."""

import pytest
import torch
from helpers.index_cases import KINDS, rows

from warpspec.latent.cache import IndexPool, rope_table
from warpspec.latent.indexer import IndexQueries, index_queries, index_scores, index_topk, select_entries

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


@pytest.mark.parametrize("format", ["mxfp4", "fp8"])
def test_scores(format):
    """Against the reference, on many pages; selection from these scores in one launch and in two."""
    generator = torch.Generator().manual_seed(4)
    tokens, pages, size = 9, 40, 64
    q = torch.randn(tokens, 64, 128, generator=generator).bfloat16()
    weights, table = (
        torch.randn(tokens, 64, generator=generator),
        rope_table(1e4 ** (-torch.arange(32) / 32), 256),
    )
    positions = torch.randint(0, 256, (tokens,), generator=generator).to(torch.int32)
    pool = IndexPool.empty(2 * pages, size, format)
    pool.write(torch.arange(pool.capacity), torch.randn(pool.capacity, 128, generator=generator).bfloat16())
    numbers = torch.randperm(2 * pages, generator=generator).view(2, pages).to(torch.int32)
    requests = torch.randint(0, 2, (tokens,), generator=generator).to(torch.int32)
    lengths = torch.randint(0, pages * size + 1, (tokens,), generator=generator).to(torch.int32)
    asked = index_queries(q, weights, table, positions, format=format, backend="reference")
    wanted = index_scores(asked, pool, numbers, requests, lengths, backend="reference")
    moved = IndexQueries(IndexPool(asked.pool.data.cuda(), 64, format), weights.cuda())
    on_gpu = IndexPool(pool.data.cuda(), size, format)
    places = [tensor.cuda() for tensor in (numbers, requests, lengths)]
    got = index_scores(moved, on_gpu, *places).cpu()
    assert torch.equal(got.isfinite(), wanted.isfinite())
    x, y = (t[wanted.isfinite()].double() for t in (got, wanted))
    assert 1 - 2 * (x * y).sum() / (x.square() + y.square()).sum() < 1e-5
    for k in (40, 512):
        fused, plain = (
            select_entries(moved, on_gpu, *places, k, **size) for size in ({"workspace_bytes": 0}, {})
        )
        assert torch.equal(fused[0], plain[0]) and torch.equal(fused[1], plain[1])
