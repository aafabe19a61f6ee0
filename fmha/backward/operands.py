"""The tensors of backward kernels, as records that travel whole."""

from __future__ import annotations

from typing import Any, NamedTuple


class BackwardOperands(NamedTuple):
    """Operands of the main kernel; absent ones are None. q, k, v, do, kv_lengths, q_start, bias, cu_seqlens_q,
    cu_seqlens_k: as in ``fmha.operands``. statistics, dq_sums: ``features``; turns [Hq, slots, warps of all parts]
    int32. dk, dv: like k; of a kernel that cuts key tiles, sums [Hkv, slots of keys, pieces, tile_n * D] fp32
    (``features``). dbias: like bias, fp32 where it is a sum.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    statistics: Any
    dq_sums: Any = None
    turns: Any = None
    dk: Any = None
    dv: Any = None
    kv_lengths: Any = None
    q_start: Any = None
    bias: Any = None
    dbias: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None

    page_table = None  # not a field: gradients of paged keys are not implemented


class RowOperands(NamedTuple):
    """Operands of the kernel before the main one: o, do [B, Sq, Hq, D], lse, dlse [B, Hq, Sq], sink [Hq], cu_seqlens_q;
    written are statistics, dq_sums and turns (zeros), dsink [Hq, slots] fp32, a tile's part.
    """

    o: Any
    do: Any
    lse: Any
    dlse: Any
    sink: Any
    cu_seqlens_q: Any
    statistics: Any
    dq_sums: Any
    turns: Any
    dsink: Any


class QueryOperands(NamedTuple):
    """Operands of the kernel after the main one: dq [B, Sq, Hq, D] is written."""

    dq_sums: Any
    dq: Any
    cu_seqlens_q: Any
