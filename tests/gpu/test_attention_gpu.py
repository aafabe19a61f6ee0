"""Attention on the GPU of this machine: the shared cases, CUDA graphs, torch.compile."""

from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import CASES, Case, arguments, check, poisoned_out, relative_error
from helpers.gpu_tensors import moved, on_gpu, random

from warpspec.fmha import attention
from warpspec.fmha.values import DEBUG_VARIABLE

pytestmark = pytest.mark.gpu
HEAD_DIMS = (64, 128, 256, 512)


@pytest.mark.parametrize(("case", "head_dim"), [
    pytest.param(case, dim, id=f"{case.id}-{dim}") for case in CASES for dim in HEAD_DIMS if dim < 512 or not case.long
])  # fmt: skip
def test_every_case(case, head_dim):
    case = replace(case, head_dim=head_dim)
    inputs = arguments(case, 0)
    out = poisoned_out(case)
    out = None if out is None else on_gpu(out)
    result = attention(**moved(inputs), out=out, return_lse=case.normalize)
    if case.normalize:
        result = tuple(t.cpu() for t in result)
    else:
        result = type(result)(result.o.cpu(), result.row_max.cpu(), result.row_sum.cpu())
    check(case, result, inputs)


@pytest.mark.parametrize("splits", [1, 3, 7, None])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_splits(head_dim, splits):
    case = Case(
        "splits", seq_q=2, seq_k=3000, heads_q=16, heads_kv=2, head_dim=head_dim, causal=True, sink=True
    )
    inputs = arguments(case, 0)
    result = attention(**moved(inputs), return_lse=True, num_splits=splits)
    check(case, tuple(t.cpu() for t in result), inputs)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_pages(head_dim, page_size):
    batch, slots = 3, 512 // page_size
    pages = batch * slots + 2
    q = random(batch, 2, 16, head_dim)
    k, v = (random(pages, page_size, 2, head_dim) for _ in "kv")
    table = torch.randperm(pages, device="cuda")[: batch * slots].view(batch, slots).int()
    lengths = torch.tensor([512, 0, 391], device="cuda", dtype=torch.int32)
    got = attention(q, k, v, kv_lengths=lengths, page_table=table, causal=True)
    dense = [t[table.long()].view(batch, -1, 2, head_dim) for t in (k, v)]
    expected = attention(q, *dense, kv_lengths=lengths, causal=True, backend="reference")
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("head_dim", "dtype", "heads", "batches"), [
    (64, torch.bfloat16, 4, 1), (128, torch.float32, 1, 2), (256, torch.bfloat16, 1, 1),
])  # fmt: skip
def test_bias(head_dim, dtype, heads, batches):
    q, k, v = random(2, 170, 4, head_dim), random(2, 261, 2, head_dim), random(2, 261, 2, head_dim)
    bias = 2 * torch.randn(batches, heads, 170, 261, device="cuda")
    bias[torch.rand_like(bias) < 0.3] = -torch.inf
    bias[:, :, 5] = -torch.inf  # a row that sees no key
    options = {"bias": bias.to(dtype), "window": (200, 30), "return_lse": True}
    o, lse = attention(q, k, v, **options)
    expected, expected_lse = attention(q, k, v, **options, backend="reference")
    assert relative_error(o.float(), expected.float()) <= 4e-3
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    assert (o[:, 5] == 0).all() and (lse[:, :, 5] == -torch.inf).all()


def test_results_repeat_bitwise():
    q, k, v = (random(2, 1000, 8, 128) for _ in "qkv")
    first = attention(q, k, v, causal=True)
    for _ in range(20):
        assert torch.equal(attention(q, k, v, causal=True), first)


@pytest.mark.parametrize("splits", [1, 4])
def test_cuda_graph(splits):
    q, k, v = random(1, 1, 16, 128), random(1, 900, 2, 128), random(1, 900, 2, 128)
    out = torch.empty_like(q)
    attention(q, k, v, num_splits=splits, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(q, k, v, num_splits=splits, out=out)
    for t in (q, k, v):
        t.normal_()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, attention(q, k, v, num_splits=splits))


def test_torch_compile():
    def layer(q, k, v):
        return attention(q * 2, k, v, causal=True, return_lse=True)

    q, k, v = (random(1, 300, 4, 64) for _ in "qkv")
    for got, expected in zip(torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_an_overlapping_out_is_seen_in_repeated_calls():
    q, k = random(1, 64, 4, 64), random(1, 64, 4, 64)
    attention(q, k, k, out=torch.empty_like(q))
    with pytest.raises(ValueError, match="out: must not overlap"):
        attention(q, k, k, out=q)


def test_repeated_calls_are_told_apart():
    q, k = random(1, 64, 4, 64), random(1, 64, 4, 64)
    causal, full = attention(q, k, k, causal=True), attention(q, k, k)
    assert not torch.equal(causal, full)
    assert torch.equal(attention(q, k, k, causal=True), causal) and torch.equal(attention(q, k, k), full)
    for wrong, name in (({"causal": 1}, "causal"), ({"causal": True, "key_stride": True}, "key_stride")):
        with pytest.raises(TypeError, match=f"^{name}"):
            attention(q, k, k, **wrong)
    with torch.device("meta"), pytest.raises((TypeError, ValueError)):
        attention(q, k.to("meta"), k)
    assert torch.equal(attention(q, k.clone(), k.clone(), causal=True), causal)


@pytest.mark.parametrize("wrong", [4, -1, 2**30])
def test_a_page_that_does_not_exist_reads_as_zeros(wrong):
    q, k = random(1, 1, 8, 64), random(4, 64, 1, 64)
    lengths = torch.tensor([128], device="cuda", dtype=torch.int32)
    table = torch.tensor([[1, wrong]], device="cuda", dtype=torch.int32)
    page = torch.cat([k[1], torch.zeros_like(k[1])])[None]
    got = attention(q, k, k, kv_lengths=lengths, page_table=table)
    expected = attention(q, page, page, backend="reference")
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_wrong_values_are_named_in_debug_mode(monkeypatch):
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    q, pages = (torch.zeros(2, n, 1, 64, dtype=torch.bfloat16, device="cuda") for n in (3, 16))
    values = dict(kv_lengths=torch.tensor([20, 5]), page_table=torch.tensor([[0, 2], [1, 0]]))
    values = {name: value.int().cuda() for name, value in values.items()}
    with pytest.raises(ValueError, match=r"^page_table: .*got 2 at index \[0, 1\]"):
        attention(q, pages, **values, causal=True)
