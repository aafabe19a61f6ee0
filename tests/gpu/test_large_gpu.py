"""Tensors of more than 2**31 elements, or of 4 GiB of codes: rows near their ends, against the same in small ones."""

import pytest
import torch
from helpers.gpu_tensors import random

from warpspec.cache import insert
from warpspec.fmha import attention
from warpspec.latent import KeySet, LatentPool, gathered_attention, mla_decode
from warpspec.softmax import softmax, softmax_topk

pytestmark = pytest.mark.gpu

PAGE, HEADS, DIM = 64, 8, 128
ERROR = 4e-3  # of other tiles and other splits
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def free_memory():
    yield
    torch.cuda.empty_cache()


def int32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = ERROR) -> None:
    got, expected = got.float(), expected.float()
    assert got.isfinite().all()
    assert (got - expected).norm() <= tolerance * expected.norm()


def spread(rows: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """[count, ...] of uninitialised memory with rows at ``places``."""
    found = torch.empty(count, *rows.shape[1:], dtype=rows.dtype, device="cuda")
    kind = torch.uint8 if rows.element_size() == 1 else torch.int16
    found.view(kind)[places] = rows.view(kind)
    return found


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize(("kind", "count"), [("bf16", 40_000), ("e4m3", 70_000), ("nvfp4", 140_000)])
def test_pages(kind, count, queries):
    places = torch.tensor([count - 1, 5, count // 2, count - 2, count - 3, 17], device="cuda")
    few = {"k": random(6, PAGE, HEADS, DIM)}
    if kind == "e4m3":
        few["k"] = few["k"].to(E4M3)
    if kind == "nvfp4":
        few["k"] = torch.randint(0, 256, (6, PAGE, HEADS, DIM // 2), dtype=torch.uint8, device="cuda")
        few["k_block_scales"] = torch.randint(52, 57, (6, PAGE, HEADS, 8), dtype=torch.uint8, device="cuda")
    many = {name: spread(rows, places, count) for name, rows in few.items()}
    assert many["k"].numel() > 2**31
    for tensors in (few, many):
        tensors |= {name.replace("k", "v", 1): t for name, t in tensors.items()}
    options = {"kv_lengths": int32(190, 129), "causal": True}
    q = random(2, queries, 64, DIM)
    got = attention(q, **many, page_table=places.view(2, 3).int(), **options)
    table = torch.arange(6, device="cuda").view(2, 3).int()
    close(got, attention(q, **few, page_table=table, **options))


def test_many_queries_and_their_gradients():
    """Results and gradients of the last queries, which see few keys."""
    length, last, window = 270_000, 256, (100, 0)
    q = random(1, length, 64, DIM).requires_grad_()
    k, v = (random(1, length, 1, DIM).requires_grad_() for _ in "kv")
    assert q.numel() > 2**31
    few = [t[:, -2 * last :].detach().clone().requires_grad_() for t in (q, k, v)]
    o = attention(q, k, v, causal=True, window=window)
    expected = attention(*few, causal=True, window=window)
    close(o[:, -last:], expected[:, -last:])
    do = torch.randn_like(o)
    found = torch.autograd.grad(o, (q, k, v), do)
    wanted = torch.autograd.grad(expected, few, do[:, -2 * last :].clone())
    for got, exact in zip(found, wanted, strict=True):
        close(got[:, -last:], exact[:, -last:], 6e-3)


@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.bfloat16, 60_000), (E4M3, 120_000)], ids=["bf16", "e4m3"]
)
@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (128, 2)])
def test_mla(dtype, count, heads, queries):
    places, few = torch.tensor([count - 1, 5, count - 2, 9], device="cuda"), random(4, PAGE, 576).to(dtype)
    q, lengths = random(2, queries, heads, 576), int32(120, 100)
    many = spread(few, places, count)
    got = mla_decode(q, many, places.view(2, 2).int(), lengths, scale=0.07)
    close(got, mla_decode(q, few, int32([0, 1], [2, 3]), lengths, scale=0.07))


@pytest.mark.parametrize(("name", "count"), [("v4-fp8", 140_000), ("v3.2-fp8", 110_000)])
def test_rows_by_slot(name, count):
    small, large = (LatentPool.empty(pages, PAGE, name, device="cuda") for pages in (4, count))
    assert large.data.nbytes > 2**32
    small.write(torch.arange(4 * PAGE, device="cuda"), random(4 * PAGE, small.row_format.dim))
    large.data[-4:] = small.data
    slots = torch.randint(0, 4 * PAGE, (4, 256), device="cuda").int()
    q = random(4, 64, small.row_format.dim)
    got = gathered_attention(q, [KeySet(large, slots + (count - 4) * PAGE)])
    close(got, gathered_attention(q, [KeySet(small, slots)]))


def test_insert():
    count = 40_000
    caches = [torch.zeros(count, PAGE, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    slots = torch.tensor([count * PAGE - 1, 3, count * PAGE // 2], device="cuda")
    new = [random(3, HEADS, DIM) for _ in "kv"]
    insert(*new, *caches, slots)
    for cache, rows in zip(caches, new, strict=True):
        assert torch.equal(cache.view(-1, HEADS, DIM)[slots], rows)
        assert int(cache.view(-1, HEADS * DIM).any(dim=1).sum()) == 3


@pytest.mark.parametrize("shape", [(15_000, 151_936), (9_000_000, 256)], ids=str)
def test_softmax(shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    assert x.numel() > 2**31
    close(softmax(x)[-3:], torch.softmax(x[-3:].float(), -1))
    for got, expected in zip(softmax_topk(x, 8), softmax_topk(x[-3:].clone(), 8), strict=True):
        assert torch.equal(got[-3:], expected)
