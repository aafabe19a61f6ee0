"""The tile that a CTA works on: which queries, heads and batch row, which keys its rows see, and where its rows belong.

Every role works its tile out for itself. ptxas gives a value that lives across the split into roles one register,
or a stack slot, for all of them, although they have different register budgets.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32

from warpspec.fmha.device.grid import extent
from warpspec.fmha.features import KernelFeatures
from warpspec.fmha.mask import key_range
from warpspec.fmha.schedule import KeySpan, key_span

INTEGERS = {"minimum": cutlass.min, "maximum": cutlass.max}


@dataclass(frozen=True)
class Row:
    """A query row, as one of the threads that work on it knows it.

    index: the row's number in its row group, of ``config.row_group_size`` rows. member: which of the threads that share
    the row this one is; number 0 writes what is written once a row. first, end: the row sees the keys [first, end).
    """

    index: Int32
    member: Int32
    first: Int32
    end: Int32


@dataclass(frozen=True)
class Place:
    """Where a row belongs: batch row, KV head, query head, query. in_range: the problem has such a row."""

    batch: Int32
    kv_head: Int32
    head: Int32
    query: Int32
    in_range: Boolean


@dataclass(frozen=True)
class Tile:
    """An M tile and the KV tiles that its rows meet.

    query_tile, head_tile, kv_head, batch, split: its place in the grid. first_query: of the tile. start: position of
    query 0. length: KV length of the batch row. group: query heads of a KV head. seq_q: queries of the batch row.
    bounds: arguments of ``key_range``. span: the KV tiles.
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

    @property
    def first_head(self):
        """First query head of the tile."""
        return self.kv_head * self.group + self.head_tile * self.config.pack

    def first_query_of(self, row_group):
        """First query of a row group."""
        return self.first_query + row_group * self.config.row_group_queries

    def row(self, index, member, row_group=0) -> Row:
        """A row and the keys it sees; an idle row gets the keys of the query it would be."""
        position = self.start + self.first_query_of(row_group) + index // self.config.pack
        first, end = key_range(position, self.length, **self.bounds, **INTEGERS)
        if cutlass.const_expr(self.config.splits):  # of the row's keys, those of this split
            begin = self.span.begin * self.config.tile_n
            first = cutlass.max(first, begin)
            end = cutlass.min(end, begin + self.span.count * self.config.tile_n)
        return Row(index, member, first, end)

    def place(self, index, row_group=0) -> Place:
        """Where a row belongs. index: in its row group."""
        config = self.config
        head = self.head_tile * config.pack + index % config.pack
        query = self.first_query_of(row_group) + index // config.pack
        inside = Boolean(head < self.group) & Boolean(query < self.seq_q)
        busy = Boolean(index < config.pack * config.row_group_queries)
        return Place(self.batch, self.kv_head, self.kv_head * self.group + head, query, inside & busy)


def tile_at(config: KernelFeatures, operands, grid, window, index, section=None) -> Tile:
    """The index-th tile of the launch.

    operands: ``Operands``. grid: ``grid.Grid`` or ``grid.DivisorGrid``. window: (left, right), not read where
    unbounded. section: of ``TileGrid.decode``.
    """
    seq_q, length = operands.q.shape[1], operands.k.shape[1]
    if cutlass.const_expr(config.page_size > 0):
        length = operands.page_table.shape[1] * config.page_size
    split = Int32(0)
    if cutlass.const_expr(config.splits):
        index, split = index // grid.splits, index % grid.splits
    query_tile, head_tile, kv_head, batch = grid.tiles(operands).decode(
        index, longest_first=config.causal, section=section, minimum=cutlass.min
    )
    if operands.kv_lengths is not None:
        length = cutlass.max(cutlass.min(operands.kv_lengths[batch], length), 0)
    # Where the last query stands at the last position by default; keys may each stand for several positions.
    start = length - seq_q if operands.q_start is None else operands.q_start[batch]
    bounds = {
        "causal": config.causal,
        "left": window[0] if config.has_left else None,
        "right": window[1] if config.has_right else None,
        "key_stride": config.key_stride,
    }
    first_query = query_tile * config.queries
    last_query = cutlass.min(first_query + config.queries, seq_q) - 1
    span = key_span(start + first_query, start + last_query, length, config.tile_n, bounds, **INTEGERS)
    if cutlass.const_expr(config.splits):
        span = span.part(split, extent(grid.splits))
    group = grid.heads_of_kv(operands)
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
        group,
        seq_q,
        bounds,
        span,
    )
