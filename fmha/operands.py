"""The tensors of an attention kernel in global memory, and the views of them that TMA loads from."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute

from warpspec.fmha.features import BLOCK


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
