"""Packed batches on the GPU of this machine: results, graphs whose lengths change, torch.compile, a peer."""

import pytest
import torch
from helpers.gpu_tensors import random
from helpers.varlen_cases import Packed, random_batch

from warpspec.fmha import attention_varlen

pytestmark = pytest.mark.gpu

DECODE = Packed(
    "decode", seq_q=(1,) * 70, seq_k=tuple(37 * i % 900 for i in range(70)), heads_q=16, heads_kv=4, head_dim=128,
    page_size=16,
)  # fmt: skip
MIXED = Packed(
    "mixed", seq_q=(1, 300, 0, 1, 64, 1, 700), seq_k=(900, 300, 20, 0, 500, 1, 1500), heads_q=8, head_dim=64,
    page_size=64, causal=True, sink=True,
)  # fmt: skip


def run(batch: Packed):
    result = attention_varlen(
        **batch.arguments("cuda"), out=batch.poisoned_out("cuda"), return_lse=batch.normalize
    )
    batch.check(result)
    return result


@pytest.mark.parametrize("batch", [DECODE, MIXED], ids=lambda batch: batch.id)
def test_cases(batch):
    """Twice the same, to the bit, in the rows that belong to a request."""
    used = sum(batch.seq_q)
    o, lse = run(batch)
    for _ in range(5):
        again, again_lse = run(batch)
        assert torch.equal(again[:used], o[:used]) and torch.equal(again_lse[:, :used], lse[:, :used])


@pytest.mark.parametrize("seed", range(200, 260))
def test_random_batches(seed):
    run(random_batch(seed))


def test_a_graph_serves_other_lengths():
    """Captured with some lengths, replayed with others in the same tensors."""
    arguments = DECODE.arguments("cuda")
    out = torch.full_like(arguments["q"], torch.nan)
    attention_varlen(**arguments, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_varlen(**arguments, out=out)
    lengths = arguments["kv_lengths"]
    for lengths_now in (lengths.clone(), (lengths // 2), torch.minimum(lengths, lengths.new_tensor(1))):
        lengths.copy_(lengths_now)
        out.fill_(torch.nan)
        graph.replay()
        expected = attention_varlen(**arguments, backend="reference")
        used = slice(0, int(arguments["cu_seqlens_q"][-1]))
        torch.testing.assert_close(out[used].float(), expected[used].float(), rtol=2e-2, atol=2e-2)


def test_queries_may_be_fewer_at_a_replay():
    arguments = MIXED.arguments("cuda")
    out = torch.full_like(arguments["q"], torch.nan)
    attention_varlen(**arguments, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_varlen(**arguments, out=out)
    arguments["cu_seqlens_q"].copy_(torch.tensor([0, 1, 2, 2, 3, 60, 61, 200], dtype=torch.int32))
    out.fill_(torch.nan)
    graph.replay()
    expected = attention_varlen(**arguments, backend="reference")
    torch.testing.assert_close(out[:200].float(), expected[:200].float(), rtol=2e-2, atol=2e-2)
    assert out[200:].isnan().all()


def test_compiled():
    arguments = MIXED.arguments("cuda")
    expected = attention_varlen(**arguments)
    got = torch.compile(attention_varlen, fullgraph=True)(**arguments)
    used = slice(0, sum(MIXED.seq_q))
    assert torch.equal(got[used], expected[used])


def test_flash_attention_4_agrees():
    flash = pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    lengths = [1, 700, 33, 2000, 128, 5]
    starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    q, k, v = (random(sum(lengths), heads, 128) for heads in (32, 8, 8))
    seqlens = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=2000, max_seqlen_k=2000)
    ours = attention_varlen(q, k, v, **seqlens, causal=True)
    theirs = flash.flash_attn_varlen_func(q, k, v, **seqlens, causal=True)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    assert (ours.float() - theirs.float()).norm() <= 4e-3 * theirs.float().norm()
