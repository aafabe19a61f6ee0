"""This CTA's tile: which queries, heads and batch row, and which keys its rows see.

Every role works it out for itself. ptxas gives a value that lives across the split into roles one register,
or a stack slot, for all of them, although they have different register budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.features import KernelFeatures
from warpspec.fmha.mask import key_range
from warpspec.fmha.scheduler import KeySpan, TileGrid, key_span

INTEGERS = {"minimum": cutlass.min, "maximum": cutlass.max}


@dataclass(frozen=True)
class Row:
    """What one softmax thread knows of its row.

    thread: 0..127, the lane of tensor memory. index: row of the M tile. half: which part of the row's O the
    thread has. first, end: keys it sees, [first, end).
    """

    thread: Int32
    index: Int32
    half: Int32
    first: Int32
    end: Int32


@dataclass(frozen=True)
class Place:
    """Where a row belongs: batch, KV head, query head, query; in_range: the problem has such a row."""

    batch: Int32
    kv_head: Int32
    head: Int32
    query: Int32
    in_range: Boolean


@dataclass(frozen=True)
class Tile:
    """query_tile, head_tile, kv_head, batch, split: from the grid. first_query: of the tile. start: position of
    query 0. length: KV length. group: query heads of a KV head. bounds: arguments of ``key_range``. span: KV
    tiles.
    """

    config: KernelFeatures
    query_tile: Int32
    head_tile: Int32
    kv_head: Int32
    batch: Int32
    first_query: Int32
    start: Int32
    length: Int32
    split: Int32
    group: Int32
    seq_q: Int32
    bounds: dict
    span: KeySpan

    def row(self, thread) -> Row:
        """The thread's row; idle rows get the keys of the query they would be."""
        index = self.config.row_of(thread)
        position = self.start + self.first_query + index // self.config.pack
        first, end = key_range(position, self.length, **self.bounds, **INTEGERS)
        if cutlass.const_expr(self.config.splits):  # of the row's keys, those of this part
            begin = self.span.begin * self.config.tile_n
            first = cutlass.max(first, begin)
            end = cutlass.min(end, begin + self.span.count * self.config.tile_n)
        return Row(thread, index, self.config.half_of(thread), first, end)

    def place(self, row: Row) -> Place:
        """Where a row belongs."""
        pack = self.config.pack
        head = self.head_tile * pack + row.index % pack
        query = self.first_query + row.index // pack
        inside = Boolean(head < self.group) & Boolean(query < self.seq_q)
        busy = Boolean(row.index < pack * self.config.queries)
        return Place(self.batch, self.kv_head, self.kv_head * self.group + head, query, inside & busy)


def extent(divisor):
    """The number that a divisor (``sm90.divisors``) stands for; of a plain number, itself."""
    return getattr(divisor, "divisor", divisor)


class Grid(NamedTuple):
    """Extents of a launch, as far as the operands do not have them."""

    query_tiles: Int32
    head_tiles: Int32
    splits: Int32 | int

    def rounds(self, tiles, ctas) -> tuple:
        """(rounds in which every one of ``ctas`` persistent CTAs has a tile, tiles of the last one)."""
        return tiles // ctas, tiles % ctas

    def heads_of_kv(self, operands) -> Int32:
        """Query heads of a KV head."""
        return operands.q.shape[2] // operands.k.shape[2]

    def decode(self, operands, index, **order) -> tuple:
        """``TileGrid.decode``."""
        batch, heads_kv = operands.q.shape[0], operands.k.shape[2]
        return TileGrid(self.query_tiles, self.head_tiles, heads_kv, batch).decode(index, **order)


def launch_of(config: KernelFeatures, q: cute.Tensor, k: cute.Tensor, o: cute.Tensor) -> tuple:
    """(``TileGrid`` of the M tiles, parts into which each one's keys are cut). Host side."""
    batch, seq_q, heads_q, _ = q.shape
    heads_kv = k.shape[2]
    query_tiles = cute.ceil_div(seq_q, config.queries)
    head_tiles = cute.ceil_div(heads_q // heads_kv, config.pack)
    return TileGrid(query_tiles, head_tiles, heads_kv, batch), o.shape[0] if config.splits else 1


def locate(
    config: KernelFeatures, operands, grid, window_left, window_right, index=None, section=None
) -> Tile:
    """The tile of this CTA, or the index-th. operands: ``operands.Operands``. grid: ``Grid``, or what stands for it.
    section: of ``TileGrid.decode``."""
    seq_q, length = operands.q.shape[1], operands.k.shape[1]
    if cutlass.const_expr(config.page_size > 0):
        length = operands.page_table.shape[1] * config.page_size
    if index is None:
        index, _, _ = cute.arch.block_idx()
    split = Int32(0)
    if cutlass.const_expr(config.splits):
        index, split = index // grid.splits, index % grid.splits
    query_tile, head_tile, kv_head, batch = grid.decode(
        operands, index, longest_first=config.causal, section=section, minimum=cutlass.min
    )
    if operands.kv_lengths is not None:
        length = cutlass.max(cutlass.min(operands.kv_lengths[batch], length), 0)
    # Where the last query stands at the last position by default; keys may each stand for several positions.
    start = length - seq_q if operands.q_start is None else operands.q_start[batch]
    bounds = {
        "causal": config.causal,
        "left": window_left if config.has_left else None,
        "right": window_right if config.has_right else None,
        "key_stride": config.key_stride,
    }
    first_query = query_tile * config.queries
    last_query = cutlass.min(first_query + config.queries, seq_q) - 1
    span = key_span(start + first_query, start + last_query, length, config.tile_n, bounds, **INTEGERS)
    if cutlass.const_expr(config.splits):
        span = span.part(split, extent(grid.splits))
    return Tile(
        config,
        query_tile,
        head_tile,
        kv_head,
        batch,
        first_query,
        start,
        length,
        split,
        grid.heads_of_kv(operands),
        seq_q,
        bounds,
        span,
    )
