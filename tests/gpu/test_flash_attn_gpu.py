"""flash-attn's functions on the GPU of this machine, against those of flash-attn 4 where it is installed."""

from dataclasses import replace

import pytest
import torch
from helpers.gpu_tensors import random
from helpers.varlen_cases import Packed

from warpspec.fmha import flash_attn

pytestmark = pytest.mark.gpu
MIXED = Packed(
    "mixed",
    seq_q=(300, 1, 1, 0, 17),
    seq_k=(300, 1000, 77, 30, 200),
    heads_q=16,
    heads_kv=2,
    head_dim=128,
    causal=True,
)
TOLERANCE = {"rtol": 2e-2, "atol": 4e-3}  # two roundings of bf16
LSE_TOLERANCE = {"rtol": 0, "atol": 1e-3}


@pytest.fixture(scope="module")
def peer():
    """flash-attn 4's module."""
    return pytest.importorskip("flash_attn.cute", reason="flash-attn 4 is not installed")


def sinks(heads):
    return {"learnable_sink": torch.randn(heads, device="cuda").bfloat16()}


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("causal", "window"), [
    (False, (None, None)), (True, (None, None)), (True, (64, 0)), (False, (100, 30)),
])  # fmt: skip
def test_rectangles(peer, causal, window, sink):
    q, k, v = random(2, 300, 16, 128), random(2, 500, 2, 128), random(2, 500, 2, 128)
    options = {"causal": causal, "window_size": window, "return_lse": True, **(sinks(16) if sink else {})}
    got, lse = flash_attn.flash_attn_func(q, k, v, **options)
    expected, expected_lse = peer.flash_attn_func(q, k, v, **options)
    torch.testing.assert_close(got, expected, **TOLERANCE)
    torch.testing.assert_close(lse, expected_lse, **LSE_TOLERANCE)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("page_size", [None, 128])
def test_packed_requests(peer, page_size, sink):
    """Rows that belong to a request; keys past a request's end are zeros, which flash-attn multiplies by 0."""
    batch = replace(MIXED, page_size=page_size, spare_slots=0)
    arguments = batch.arguments("cuda")
    tensors = {name: arguments[name].nan_to_num(0.0).contiguous() for name in "qkv"}
    tensors |= {"cu_seqlens_q": arguments["cu_seqlens_q"], "max_seqlen_q": 300, "max_seqlen_k": 1000}
    if page_size is None:
        tensors["cu_seqlens_k"] = arguments["cu_seqlens_k"]
    else:
        pages = len(tensors["k"])
        tensors |= {
            "page_table": arguments["page_table"].clamp(0, pages - 1),
            "seqused_k": arguments["kv_lengths"],
        }
    options = {"causal": True, "return_lse": True, **(sinks(16) if sink else {})}
    got, lse = flash_attn.flash_attn_varlen_func(**tensors, **options)
    expected, expected_lse = peer.flash_attn_varlen_func(**tensors, **options)
    rows = sum(batch.seq_q)
    torch.testing.assert_close(got[:rows], expected[:rows], **TOLERANCE)
    torch.testing.assert_close(lse[:, :rows], expected_lse[:, :rows], **LSE_TOLERANCE)


def test_a_cache_that_grows_in_a_cuda_graph():
    """One key is appended and seen at every replay."""
    heads, heads_kv, dim, batch = 16, 2, 128, 3
    cache = torch.zeros(2, 8, 64, heads_kv, dim, device="cuda").bfloat16()
    table = torch.arange(6, device="cuda").view(batch, 2).int()
    lengths = torch.tensor([3, 63, 100], dtype=torch.int32, device="cuda")
    q, k, v = random(batch, 1, heads, dim), random(batch, 1, heads_kv, dim), random(batch, 1, heads_kv, dim)

    def step():
        return flash_attn.flash_attn_with_kvcache(
            q, *cache, k, v, cache_seqlens=lengths, block_table=table, causal=True
        )

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        for t in (q, k, v):
            t.normal_()
        graph.replay()
        assert torch.equal(out, step())
        lengths += 1
