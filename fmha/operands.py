"""The tensors and the options of an attention call, as records.

A new operand is one field of ``Operands``, from which the kernel's host function and torch's operator get their
arguments, and its use; a new option is one field of ``Options``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from warpspec.common.hardware import TMA_ALIGNMENT, VECTOR_BYTES, WORD_BYTES
from warpspec.common.operands import (
    CONTIGUOUS,
    FLOAT32,
    INT32,
    INT64,
    OUTPUT,
    UINT8,
    WORKSPACE,
    Operand,
    inputs_of,
    names_of,
)
from warpspec.fmha.line import JOIN_WORDS, KEPT_WORDS
from warpspec.fmha.lists import ORDER_WORDS
from warpspec.fmha.logits import LogitOptions
from warpspec.fmha.quantized import block_alignment


def block_scales(size: Callable) -> Operand:
    """NVFP4's block scales of rows of so many numbers. size: a function of the configuration, 0 if there are none."""

    def count(config) -> int:
        return size(config) // config.format.kv_block

    return Operand(
        UINT8, 4, count, lambda c: block_alignment(count(c)), lambda c: c.format.kv_block > 0 and size(c) > 0
    )


def keys(size: Callable) -> Operand:
    """K or V, of rows of so many numbers, a function of the configuration."""
    return Operand(
        lambda c: c.format.kv_dtype,
        lambda c: 4 - c.requests.packed_k,
        lambda c: c.format.kv_row(size(c)),
        TMA_ALIGNMENT,
    )


# o, with a dimension for splits in front where there are any, and the statistics of an un-normalised state.
RESULT = Operand(
    lambda c: c.output.dtype,
    lambda c: 5 if c.output.splits else 4 - c.requests.packed_q,
    lambda c: c.output.size,
    TMA_ALIGNMENT,
)
STATE = Operand(
    FLOAT32, lambda c: 4 if c.output.splits else 3 - c.requests.packed_q, when="output.writes_state"
)

# Workspace of work that is cut by length (``line``).
PIECES = Operand(FLOAT32, 3, lambda c: c.heads.piece_columns, TMA_ALIGNMENT, "scheduler.cuts_tiles")
CUTS = Operand(INT32, 3, KEPT_WORDS, VECTOR_BYTES, "scheduler.reads_cuts")
JOINS = Operand(INT32, 2, JOIN_WORDS, when="scheduler.leaves_joins")
COUNTERS = Operand(INT64, 1, when="scheduler.counts")

# Lists of blocks (``block_mask.BlockMask``).
KV_VISITS, Q_VISITS = (Operand(INT32, 5, numbers, when="mask.has_blocks") for numbers in (2, 3))
KV_COUNTS, Q_COUNTS = (Operand(INT32, 4, numbers, when="mask.has_blocks") for numbers in (2, 4))
KV_ORDER = Operand(INT32, 4, ORDER_WORDS, when="mask.has_order")
PATTERNS, Q_PATTERNS = (
    Operand(
        INT32,
        3,
        lambda c, side=side: c.mask.pattern_words(side),
        lambda c, side=side: WORD_BYTES * math.gcd(c.mask.pattern_words(side), VECTOR_BYTES // WORD_BYTES),
        "mask.has_patterns",
    )
    for side in (1, 0)
)


class Operands(NamedTuple):
    """Tensors of a call; absent ones are None. torch tensors on the host, ``cute.Tensor`` in kernels.

    q [B, Sq, Hq, D]; k, v [B, Sk, Hkv, D], with a page_table [pages, page_size, Hkv, D]; o [B, Sq, Hq, D]; sink [Hq];
    kv_lengths, q_start [B] int32; lse, row_max, row_sum [B, Hq, Sq] fp32; page_table [B, max_pages] int32; bias
    [B or 1, Hq or 1, Sq, Sk]. Packed queries, T in all: q, o [1, T, Hq, D]; lse, row_max, row_sum [1, Hq, T];
    cu_seqlens_q [B + 1] int32, where each request's begin. Packed keys: k, v [1, Tk, Hkv, D]; cu_seqlens_k [B + 1].
    Host functions of attention and of its gradients take packed q, k, v, o and statistics without the 1, as callers
    have them: a view of each would take a microsecond (``device.host.with_batch``).
    k, v in FP8 or NVFP4 (bytes in kernels; NVFP4's rows have D/2): k_scale, v_scale fp32, in kernels [B, Hkv, 1]; of
    NVFP4 k_block_scales, v_block_scales with a row of D/16 bytes for each row of k and v.
    If queries are drafts: tree [B, Sq] int64, packed [1, T] (``tree``). If they also see ranges: ranges [B, Sq, 2]
    int32, packed [1, T, 2]. If they visit blocks of keys: kv_visits, kv_counts, kv_order, q_visits, q_counts,
    patterns, q_patterns (``block_mask.BlockMask``). If another launch has cut their line: cuts [CTAs, rounds, 16] int32
    (``cuts``).

    Kernels write o, lse, row_max and row_sum, and read the others. If keys are split, o, row_max and row_sum of the
    attention kernel have a leading dimension, the splits. If work is cut by length (``line``), pieces [2 CTAs, rows, D
    + 8] fp32 and joins [CTAs, 8] int32 are a workspace. If CTAs add up pieces themselves (``sm90.add_up``), it is
    pieces [2 CTAs, rows, D + 8] and counters [2 CTAs] int64. If CTAs take tiles from a queue (``device.queue``), it is
    counters [1].
    """

    q: Annotated[
        Any,
        Operand(
            lambda c: c.format.dtype, lambda c: 4 - c.requests.packed_q, lambda c: c.heads.qk, TMA_ALIGNMENT
        ),
    ]
    k: Annotated[Any, keys(lambda c: c.heads.qk)]
    v: Annotated[Any, keys(lambda c: c.heads.v)] = None
    o: Annotated[Any, RESULT, OUTPUT] = None
    sink: Annotated[Any, Operand(lambda c: c.output.sink_dtype, 1, when="output.has_sink"), CONTIGUOUS] = None
    kv_lengths: Annotated[Any, Operand(INT32, 1, when="requests.has_kv_lengths"), CONTIGUOUS] = None
    q_start: Annotated[Any, Operand(INT32, 1, when="requests.has_q_start"), CONTIGUOUS] = None
    lse: Annotated[
        Any, Operand(FLOAT32, lambda c: 3 - c.requests.packed_q, when="output.has_lse"), OUTPUT
    ] = None
    row_max: Annotated[Any, STATE, OUTPUT] = None
    row_sum: Annotated[Any, STATE, OUTPUT] = None
    page_table: Annotated[Any, Operand(INT32, 2, when="requests.page_size"), CONTIGUOUS] = None
    bias: Annotated[
        Any,
        Operand(lambda c: c.logits.bias.dtype, 4, alignment=lambda c: c.bias_alignment, when="logits.bias"),
    ] = None
    cu_seqlens_q: Annotated[Any, Operand(INT32, 1, when="requests.packed_q"), CONTIGUOUS] = None
    cu_seqlens_k: Annotated[Any, Operand(INT32, 1, when="requests.packed_k"), CONTIGUOUS] = None
    k_scale: Annotated[Any, Operand(FLOAT32, 3, 1, when="format.has_k_scale")] = None
    v_scale: Annotated[Any, Operand(FLOAT32, 3, 1, when="format.has_v_scale")] = None
    k_block_scales: Annotated[Any, block_scales(lambda c: c.heads.qk)] = None
    v_block_scales: Annotated[Any, block_scales(lambda c: 0 if c.format.shared_kv else c.heads.v)] = None
    tree: Annotated[Any, Operand(INT64, 2, when="mask.has_tree"), CONTIGUOUS] = None
    ranges: Annotated[Any, Operand(INT32, 3, 2, when="mask.has_ranges"), CONTIGUOUS] = None
    kv_visits: Annotated[Any, KV_VISITS, CONTIGUOUS] = None
    kv_counts: Annotated[Any, KV_COUNTS, CONTIGUOUS] = None
    kv_order: Annotated[Any, KV_ORDER, CONTIGUOUS] = None
    q_visits: Annotated[Any, Q_VISITS, CONTIGUOUS] = None
    q_counts: Annotated[Any, Q_COUNTS, CONTIGUOUS] = None
    patterns: Annotated[Any, PATTERNS, CONTIGUOUS] = None
    q_patterns: Annotated[Any, Q_PATTERNS, CONTIGUOUS] = None
    cuts: Annotated[Any, CUTS] = None
    pieces: Annotated[Any, PIECES, WORKSPACE] = None
    joins: Annotated[Any, JOINS, WORKSPACE] = None
    counters: Annotated[Any, COUNTERS, WORKSPACE] = None

    @property
    def inputs(self) -> dict[str, Any]:
        """The tensors that a call reads, by name."""
        return {name: getattr(self, name) for name in INPUTS}


INPUTS = inputs_of(Operands)
PLACES = Operands(*range(len(Operands._fields)))  # index of each field in the record
# The fields q, k, v and o, and those from lse to row_sum.
ROWS, STATISTICS = slice(PLACES.q, PLACES.o + 1), slice(PLACES.lse, PLACES.row_sum + 1)
GAPLESS = names_of(Operands, CONTIGUOUS)
# The number of fields in front, which are not workspace.
ARGUMENTS = len(Operands._fields) - len(names_of(Operands, WORKSPACE))


class Options(NamedTuple):
    """Non-tensor arguments of ``attention`` and ``attention_varlen``, whose docstrings define them."""

    logits: LogitOptions = LogitOptions()
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    key_stride: int = 1
    normalize: bool = True
    return_lse: bool = False
    num_splits: int | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    deterministic: bool = False
    v_dim: int | None = None
    swizzled: bool = False
    block_queries: int | None = None  # queries of a block of block_mask
    block_keys: int | None = None
    # What is known of its lists' lengths (``block_mask.Visits``).
    block_visits: float | None = None
    block_masked: float | None = None
    block_most: float | None = None
    block_visitors: float | None = None
    cut_for: str | None = None  # what the operand cuts was made for (``cuts``)

    @classmethod
    def of(cls, **arguments) -> Options:
        """The options among the arguments of ``attention``, by its names."""
        logits = {name: arguments.pop(name) for name in LogitOptions._fields if name in arguments}
        return cls(LogitOptions(**logits), **arguments)
