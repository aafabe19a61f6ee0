"""The arguments of backward kernels, as records."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.common.operands import FLOAT32, INT32, Number, Operand
from warpspec.fmha.logits import LogitNumbers
from warpspec.fmha.operands import Q_COUNTS, Q_PATTERNS, Q_VISITS

# Rows [B, S, H, D], packed [T, H, D]: with the head size of Q and K, or that of V and O.
QK_ROWS, V_ROWS = (
    Operand(
        lambda c: c.format.dtype, lambda c: 4 - c.packed, operator.attrgetter(f"sizes.{size}"), TMA_ALIGNMENT
    )
    for size in ("qk", "v")
)
LSE = Operand(FLOAT32, lambda c: 3 - c.packed)  # [B, Hq, Sq], packed [Hq, T]
PACKED = ("q", "k", "v", "o", "do", "lse", "dlse", "dq", "dk", "dv")  # operands that callers pack


def tile_elements(config) -> int:
    """Elements of a query tile in dQ's sums."""
    return config.tile_m * config.heads.qk


def key_elements(config) -> int:
    """Elements of a key tile in the sums of cut tiles."""
    return config.tile_n * config.heads.qk


SUMS = Operand(FLOAT32, 4, key_elements, TMA_ALIGNMENT)  # sums of cut key tiles' pieces
PIECE_NUMBERS = 2  # of a key tile, in tile_pieces
# Numbers of a place in tile_order, and which is which: the key tile, its request and number there, the piece, pieces of
# the tile, most steps of a piece. Where packed requests come one after another, the rows are ``runs.Run``.
PLACE_NUMBERS = 6
TILE, REQUEST, NUMBER, PIECE, PIECES, MOST = range(PLACE_NUMBERS)


class BackwardOperands(NamedTuple):
    """Operands of the main kernel; absent ones are None. q, k, v, do, kv_lengths, q_start, bias, cu_seqlens_q,
    cu_seqlens_k: as in ``fmha.operands``. statistics, dq_sums: ``features``; turns [Hq, tiles, turn_counts]
    int32. done [batch rows * Hkv + 1] int32, dq: where this kernel makes dQ (``device.finish``). dk, dv: like k.
    dk_sums, dv_sums [Hkv, key tiles, pieces, tile_n * D] fp32 (``features``): what pieces leave. dbias: like bias, fp32
    where it is a sum. tile_order [places + 1, PLACE_NUMBERS] int32: for packed requests, the key tile, or piece of one,
    of each place, and in the last row how many places are used. Where the first rows' tiles may be whole, their order
    comes before that of pieces, [key tiles + places + 1], and the last row also says how many rows they are. Where
    requests come one after another, all ``runs``, and in the last row how many CTAs they have and how many there are.
    tile_pieces [key tiles, PIECE_NUMBERS] int32: the place of a tile's first piece, and how many it has; where requests
    come one after another, each request's first run, and how many it has; 0 if its tiles are whole. ranges, q_visits,
    q_counts, q_patterns: as in ``fmha.operands``; seen_by: ``ranges.seen_by``.
    """

    q: Annotated[Any, QK_ROWS]
    k: Annotated[Any, QK_ROWS]
    v: Annotated[Any, V_ROWS]
    do: Annotated[Any, V_ROWS]
    statistics: Annotated[Any, Operand(FLOAT32, 4, 4, TMA_ALIGNMENT)]
    dq_sums: Annotated[Any, Operand(FLOAT32, 3, tile_elements, TMA_ALIGNMENT, "wanted.q")] = None
    turns: Annotated[Any, Operand(INT32, 3, when="deterministic")] = None
    done: Annotated[Any, Operand(INT32, 1, when="finishes")] = None
    dq: Annotated[Any, replace(QK_ROWS, when="finishes")] = None
    dk: Annotated[Any, replace(QK_ROWS, when="writes_k")] = None
    dv: Annotated[Any, replace(V_ROWS, when="writes_v")] = None
    dk_sums: Annotated[Any, replace(SUMS, when="leaves_k")] = None
    dv_sums: Annotated[Any, replace(SUMS, when="leaves_v")] = None
    kv_lengths: Annotated[Any, Operand(INT32, 1, when="requests.has_kv_lengths")] = None
    q_start: Annotated[Any, Operand(INT32, 1, when="requests.has_q_start")] = None
    bias: Annotated[
        Any, Operand(lambda c: c.logits.bias.dtype, 4, None, lambda c: c.bias_alignment, "logits.bias")
    ] = None
    dbias: Annotated[
        Any, Operand(lambda c: c.wanted.bias_dtype, 4, None, lambda c: c.dbias_alignment, "wanted.bias")
    ] = None
    cu_seqlens_q: Annotated[Any, Operand(INT32, 1, when="requests.packed_q")] = None
    cu_seqlens_k: Annotated[Any, Operand(INT32, 1, when="requests.packed_k")] = None
    tile_order: Annotated[Any, Operand(INT32, 2, PLACE_NUMBERS, when="requests.packed_k")] = None
    tile_pieces: Annotated[Any, Operand(INT32, 2, PIECE_NUMBERS, when="cuts_by_length")] = None
    ranges: Annotated[Any, Operand(INT32, 3, 2, when="mask.has_ranges")] = None
    seen_by: Annotated[Any, Operand(INT32, 3, 2, when="mask.has_ranges")] = None
    q_visits: Annotated[Any, Q_VISITS] = None
    q_counts: Annotated[Any, Q_COUNTS] = None
    q_patterns: Annotated[Any, Q_PATTERNS] = None

    page_table = None  # not a field: gradients of paged keys are not implemented


def of_main(name: str):
    """Whether requests are packed and the main kernel's configuration has this attribute set."""
    return lambda config: config.main is not None and operator.attrgetter(name)(config.main)


class RowOperands(NamedTuple):
    """Arguments of the kernel before the main one: o, do [B, Sq, Hq, D], lse, dlse [B, Hq, Sq], sink [Hq],
    cu_seqlens_q; written are statistics, dq_sums, turns and done (zeros), dsink [Hq, tiles] fp32, a tile's part; where
    heads are sliced, dk_sums and dv_sums (zeros).

    Packed requests also need k, cu_seqlens_k, q_start, ranges and seen_by; the kernel then also writes tile_order,
    tile_pieces, and zeros in rows of dq, dk and dv that belong to no request. window_left, window_right: not read where
    unbounded. piece_start to piece_further: see ``pieces.PieceLength``. slices: of heads.
    inverse_factor: 1 over the factor of scores, where products subtract the statistics.
    """

    o: Annotated[Any, V_ROWS]
    do: Annotated[Any, replace(V_ROWS, when="has_do")]
    lse: Annotated[Any, LSE]
    dlse: Annotated[Any, replace(LSE, when="has_dlse")]
    sink: Annotated[Any, Operand(lambda c: c.sink, 1, when="sink")]
    cu_seqlens_q: Annotated[Any, Operand(INT32, 1, when="packed")]
    statistics: Annotated[Any, Operand(FLOAT32, 4, 4, TMA_ALIGNMENT)]
    dq_sums: Annotated[Any, Operand(FLOAT32, 3, tile_elements, TMA_ALIGNMENT, "wants_q")]
    turns: Annotated[Any, Operand(INT32, 3, when="deterministic")]
    done: Annotated[Any, Operand(INT32, 1, when="clears_done")]
    dsink: Annotated[Any, Operand(FLOAT32, 2, when="wants_sink")]
    dk_sums: Annotated[Any, replace(SUMS, when="clears_k")]
    dv_sums: Annotated[Any, replace(SUMS, when="clears_v")]
    k: Annotated[Any, replace(QK_ROWS, when="main")]
    cu_seqlens_k: Annotated[Any, Operand(INT32, 1, when="main")]
    q_start: Annotated[Any, Operand(INT32, 1, when=of_main("requests.has_q_start"))]
    ranges: Annotated[Any, Operand(INT32, 3, 2, when=of_main("mask.has_ranges"))]
    seen_by: Annotated[Any, Operand(INT32, 3, 2, when=of_main("mask.has_ranges"))]
    tile_order: Annotated[Any, Operand(INT32, 2, PLACE_NUMBERS, when="main")]
    tile_pieces: Annotated[Any, Operand(INT32, 2, PIECE_NUMBERS, when=of_main("cuts_on_device"))]
    dq: Annotated[Any, replace(QK_ROWS, when=of_main("wanted.q"))]
    dk: Annotated[Any, replace(QK_ROWS, when=of_main("wanted.k"))]
    dv: Annotated[Any, replace(V_ROWS, when=of_main("wanted.dv"))]
    window_left: Annotated[Any, Number(INT32)]
    window_right: Annotated[Any, Number(INT32)]
    piece_start: Annotated[Any, Number(FLOAT32)]
    piece_share: Annotated[Any, Number(FLOAT32)]
    piece_cost: Annotated[Any, Number(FLOAT32)]
    piece_last: Annotated[Any, Number(FLOAT32)]
    piece_further: Annotated[Any, Number(INT32)]
    slices: Annotated[Any, Number(INT32)]
    inverse_factor: Annotated[Any, Number(FLOAT32)]


class ResultOperands(NamedTuple):
    """Arguments of the kernel after the main one. dq_sums: ``features``; dk_sums, dv_sums: [Hkv, key tiles, pieces,
    tile_n * D] fp32 (``features``). dq [B, Sq, Hq, D], dk, dv [B, Sk, Hkv, D] are written; where V is K, dk alone, the
    sum of both. tile_order, tile_pieces: as in ``BackwardOperands``; tiles in one piece are not written. scale: the
    factor of dq and dk. whole: as in ``BackwardNumbers``; not read if the device leaves rows whole.
    """

    dq_sums: Annotated[Any, Operand(FLOAT32, 3, tile_elements, TMA_ALIGNMENT, "q")]
    dk_sums: Annotated[Any, replace(SUMS, when="k")]
    dv_sums: Annotated[Any, replace(SUMS, when="has_v")]
    dq: Annotated[Any, replace(QK_ROWS, when="q")]
    dk: Annotated[Any, replace(QK_ROWS, when="k")]
    dv: Annotated[Any, replace(V_ROWS, when="v")]
    cu_seqlens_q: Annotated[Any, Operand(INT32, 1, when="packed")]
    cu_seqlens_k: Annotated[Any, Operand(INT32, 1, when="packed")]
    tile_order: Annotated[Any, Operand(INT32, 2, PLACE_NUMBERS, when="reads_order")]
    tile_pieces: Annotated[Any, Operand(INT32, 2, PIECE_NUMBERS, when="by_length")]
    scale: Annotated[Any, Number(FLOAT32)]
    whole: Annotated[Any, Number(INT32)]


class QueryOperands(NamedTuple):
    """Arguments of the kernel that makes dQ by query tiles. Tensors: as in ``BackwardOperands``; o and lse, as in
    ``RowOperands``, where it makes the statistics. scale: the factor of dQ. window_left, window_right: not read where
    unbounded. section: rows, heads of batch rows, of a section. ctas: the most CTAs."""

    q: Annotated[Any, QK_ROWS]
    k: Annotated[Any, QK_ROWS]
    v: Annotated[Any, V_ROWS]
    do: Annotated[Any, V_ROWS]
    statistics: Annotated[Any, Operand(FLOAT32, 4, 4, TMA_ALIGNMENT)]
    dq: Annotated[Any, QK_ROWS]
    o: Annotated[Any, replace(V_ROWS, when="makes_statistics")]
    lse: Annotated[Any, replace(LSE, when="makes_statistics")]
    kv_lengths: Annotated[Any, Operand(INT32, 1, when="requests.has_kv_lengths")]
    q_start: Annotated[Any, Operand(INT32, 1, when="requests.has_q_start")]
    cu_seqlens_q: Annotated[Any, Operand(INT32, 1, when="requests.packed_q")]
    cu_seqlens_k: Annotated[Any, Operand(INT32, 1, when="requests.packed_k")]
    logits: LogitNumbers
    scale: Annotated[Any, Number(FLOAT32)]
    window_left: Annotated[Any, Number(INT32)]
    window_right: Annotated[Any, Number(INT32)]
    section: Annotated[Any, Number(INT32)]
    ctas: Annotated[Any, Number(INT32)]

    page_table = None  # not a field, as in ``BackwardOperands``


class BackwardNumbers(NamedTuple):
    """The numbers among the main kernel's arguments.

    logits: their factor has the sign of the scale. scale: the factor of dK. window_left, window_right: not read where
    unbounded. pieces, section: see ``schedule.Order``; if the host cuts by length, pieces counts those of all key tiles
    of a row; where packed requests come one after another, the CTAs beside one for each key tile of each row.
    most_steps: the most steps of a piece, if the host cuts by length; ``Order.most``, with lists of blocks. slices: of
    a KV head's query heads. whole: rows that come first and are not cut, if the host cuts by length. finishers: CTAs
    that make dQ from its sums. most_ctas: CTAs of a launch of persistent ones, at most.
    """

    logits: LogitNumbers
    scale: Annotated[Any, Number(FLOAT32)]
    window_left: Annotated[Any, Number(INT32)]
    window_right: Annotated[Any, Number(INT32)]
    pieces: Annotated[Any, Number(INT32)]
    section: Annotated[Any, Number(INT32)]
    most_steps: Annotated[Any, Number(INT32)]
    slices: Annotated[Any, Number(INT32)]
    whole: Annotated[Any, Number(INT32)]
    finishers: Annotated[Any, Number(INT32)]
    most_ctas: Annotated[Any, Number(INT32)]
