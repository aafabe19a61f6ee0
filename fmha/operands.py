"""What an attention call is made of: its tensors and its options, as records that travel whole.

A new operand is one field of ``Operands``, one argument of ``device.host.AttentionHost`` and its use; a new option is
one field of ``Options``. ``ops`` makes torch's operator schema of both.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Operands(NamedTuple):
    """Tensors of a call; absent ones are None. torch tensors on the host, ``cute.Tensor`` in kernels.

    q [B, Sq, Hq, D]; k, v [B, Sk, Hkv, D], with a page_table [pages, page_size, Hkv, D]; o [B, Sq, Hq, D]; sink [Hq];
    kv_lengths, q_start [B] int32; lse, row_max, row_sum [B, Hq, Sq] fp32; page_table [B, max_pages] int32; bias
    [B or 1, Hq or 1, Sq, Sk]. Packed queries, T in all: q, o [1, T, Hq, D]; lse, row_max, row_sum [1, Hq, T];
    cu_seqlens_q [B + 1] int32, where each request's begin. Packed keys: k, v [1, Tk, Hkv, D]; cu_seqlens_k [B + 1].
    k, v in FP8 (bytes in kernels): k_scale, v_scale fp32, in kernels [B, Hkv, 1].

    o, lse, row_max and row_sum are written, the others are read. Where keys are split, o, row_max and row_sum of the
    attention kernel have one more dimension in front, the splits. Where work is cut by length (``line``), pieces
    [2 CTAs, rows, D + 4] fp32 and joins [CTAs, 9] int32 are a workspace; where CTAs take tiles from a queue
    (``device.queue``), queue [1] int64.
    """

    q: Any
    k: Any
    v: Any = None
    o: Any = None
    sink: Any = None
    kv_lengths: Any = None
    q_start: Any = None
    lse: Any = None
    row_max: Any = None
    row_sum: Any = None
    page_table: Any = None
    bias: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    k_scale: Any = None
    v_scale: Any = None
    pieces: Any = None
    joins: Any = None
    queue: Any = None

    @property
    def inputs(self) -> dict[str, Any]:
        """What is read, by name."""
        return {name: getattr(self, name) for name in INPUTS}


OUTPUTS = ("o", "lse", "row_max", "row_sum")
WORKSPACE = ("pieces", "joins", "queue")
ARGUMENTS = len(Operands._fields) - len(WORKSPACE)  # fields in front, which are not workspace
INPUTS = tuple(name for name in Operands._fields if name not in (*OUTPUTS, *WORKSPACE))


class Options(NamedTuple):
    """Arguments of ``attention`` and ``attention_varlen`` that are no tensors; their docstrings say what they mean."""

    scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    key_stride: int = 1
    normalize: bool = True
    return_lse: bool = False
    num_splits: int | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    deterministic: bool = False
    softcap: float | None = None
