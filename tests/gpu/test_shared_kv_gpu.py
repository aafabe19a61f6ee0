"""D 512 with K and V one tensor on the GPU of this machine: consumers that exchange P."""

from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import CASES, Case, arguments, check
from helpers.gpu_tensors import moved, random

from warpspec.fmha import attention

pytestmark = pytest.mark.gpu


def latent(batch, queries, heads, keys):
    return random(batch, queries, heads, 512), random(batch, keys, 1, 512)


@pytest.mark.parametrize("case", [case for case in CASES if not case.long], ids=lambda case: case.id)
def test_every_case(case):
    case = replace(case, head_dim=512, shared_kv=True)
    inputs = arguments(case, 0)
    result = attention(**moved(inputs), return_lse=case.normalize)
    if case.normalize:
        result = tuple(t.cpu() for t in result)
    else:
        result = type(result)(result.o.cpu(), result.row_max.cpu(), result.row_sum.cpu())
    check(case, result, inputs)


def latent_pages(batch, slots, page_size):
    """(pages, page table, the keys of every batch row in order): pages in random order, some of them nobody's."""
    pages = random(batch * slots + 2, page_size, 1, 512)
    table = torch.randperm(len(pages), device="cuda")[: batch * slots].view(batch, slots)
    return pages, table.int(), pages[table].view(batch, -1, 1, 512)


@pytest.mark.parametrize("heads", [64, 128])
def test_rows_of_every_length(heads):
    """More tiles than CTAs, of 0 to 12 KV tiles; twice the same, to the bit."""
    q = random(160, 1, heads, 512)
    pages, table, kv = latent_pages(160, -(-750 // 16), 16)
    kv = kv[:, :750]
    lengths = torch.randint(0, 751, (160,), device="cuda", dtype=torch.int32)
    lengths[:3] = torch.tensor([0, 1, 750])
    options = {"kv_lengths": lengths, "return_lse": True, "num_splits": 1}
    o, lse = attention(q, kv, kv, **options)
    expected, expected_lse = attention(q, kv, kv, **options, backend="reference")
    torch.testing.assert_close(o.float(), expected.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    no_key = torch.arange(table.shape[1], device="cuda") * 16 >= lengths[:, None]
    paged, paged_lse = attention(q, pages, pages, page_table=table.masked_fill(no_key, -1), **options)
    torch.testing.assert_close(paged.float(), expected.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(paged_lse, expected_lse, rtol=0, atol=1e-3)
    for _ in range(10):
        again = attention(q, kv, kv, **options)
        assert torch.equal(again[0], o) and torch.equal(again[1], lse)


@pytest.mark.parametrize("splits", [2, 7, 64, None])
def test_splits(splits):
    case = Case("splits", seq_k=4000, heads_q=128, heads_kv=1, head_dim=512, shared_kv=True, sink=True)
    inputs = arguments(case, 0)
    result = attention(**moved(inputs), return_lse=True, num_splits=splits)
    check(case, tuple(t.cpu() for t in result), inputs)


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_pages(page_size):
    batch, slots = 3, 512 // page_size
    q = random(batch, 2, 128, 512)
    pages, table, dense = latent_pages(batch, slots, page_size)
    lengths = torch.tensor([512, 0, 391], device="cuda", dtype=torch.int32)
    got = attention(q, pages, pages, kv_lengths=lengths, page_table=table, causal=True)
    expected = attention(q, dense, dense, kv_lengths=lengths, causal=True, backend="reference")
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_prefill_with_a_window():
    q, kv = latent(1, 700, 128, 700)
    options = {"causal": True, "window": (300, None), "sink": torch.randn(128, device="cuda")}
    got = attention(q, kv, kv, **options)
    expected = attention(q, kv, kv, **options, backend="reference")
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2)
