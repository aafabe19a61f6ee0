"""The tensors of an attention kernel in global memory, and the views of them that TMA loads from."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from warpspec.common.compile import fake_rows
from warpspec.fmha.features import BLOCK, KernelFeatures
from warpspec.fmha.problem import ROW_ALIGNMENT
from warpspec.fmha.row_bias import TYPES


class Operands(NamedTuple):
    """Global tensors, absent ones None. q, o [B, Sq, Hq, D]; k, v [B, Sk, Hkv, D], with a
    page_table [B, max_pages] int32 [pages, page_size, Hkv, D]; sink [Hq]; kv_lengths, q_start [B] int32; lse,
    row_max, row_sum [B, Hq, Sq] fp32; bias [B or 1, Hq or 1, Sq, Sk]. Partial results: o, row_max and row_sum
    have one more dimension in front, the splits."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    sink: cute.Tensor | None
    kv_lengths: cute.Tensor | None
    q_start: cute.Tensor | None
    lse: cute.Tensor | None
    row_max: cute.Tensor | None
    row_sum: cute.Tensor | None
    page_table: cute.Tensor | None
    bias: cute.Tensor | None


def fake_operands(config: KernelFeatures, bias_alignment: int | None = None) -> Operands:
    """What a kernel of a configuration is compiled for: rows of D are aligned for TMA, of a bias to ``bias_alignment``
    bytes."""
    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
    fp32, int32 = cutlass.Float32, cutlass.Int32

    def rows(dtype, rank):
        return fake_rows(dtype, rank, config.head_dim, alignment=ROW_ALIGNMENT)

    partial = 1 if config.splits else 0
    return Operands(
        *(rows(dtype, 4) for _ in "qkv"),
        rows(dtype if config.normalize else fp32, 4 + partial),
        fake_rows(fp32, 1) if config.has_sink else None,
        fake_rows(int32, 1) if config.has_kv_lengths else None,
        fake_rows(int32, 1) if config.has_q_start else None,
        fake_rows(fp32, 3) if config.has_lse else None,
        *(None if config.normalize else fake_rows(fp32, 3 + partial) for _ in range(2)),
        fake_rows(int32, 2) if config.page_size else None,
        fake_rows(TYPES[config.bias], 4, alignment=bias_alignment) if config.bias else None,
    )


def q_view(config, q: cute.Tensor) -> cute.Tensor:
    """(D, HEAD, QUERY, BLOCK, BATCH) of q, D cut into blocks. Host side."""
    batch, seq_q, heads, _ = q.shape
    layout = cute.make_layout(
        (BLOCK, heads, seq_q, config.blocks, batch), stride=(1, q.stride[2], q.stride[1], BLOCK, q.stride[0])
    )
    return cute.make_tensor(q.iterator, layout)


def kv_view(config, t: cute.Tensor) -> cute.Tensor:
    """(D, KEY, BLOCK, KV_HEAD, BATCH) of k or v; paged, (D, KEY of the page, BLOCK, KV_HEAD, PAGE). Host side."""
    layout = cute.make_layout(
        (BLOCK, t.shape[1], config.blocks, t.shape[2], t.shape[0]),
        stride=(1, t.stride[1], BLOCK, t.stride[2], t.stride[0]),
    )
    return cute.make_tensor(t.iterator, layout)
