"""The extents of a launch in a kernel, and the tiles of a persistent CTA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.fmha.config import AttentionKernel
from warpspec.fmha.device import packed
from warpspec.fmha.features import RequestLayout
from warpspec.fmha.schedule import TileGrid, extent, place_in_round


def grid_of(config: AttentionKernel, operands) -> tuple:
    """(``TileGrid`` of the M tiles, splits of each one's keys). Host side."""
    batch, seq_q, _, _ = operands.q.shape
    heads_kv = heads_of_tiles(config, operands)
    if config.requests.packed_q:
        query_tiles = packed.query_tiles(config.rows.queries, seq_q, requests_of(config.requests, operands))
    else:
        query_tiles = cute.ceil_div(seq_q, config.rows.queries)
    head_tiles = cute.ceil_div(heads_of_kv(operands), config.rows.pack)
    return TileGrid(query_tiles, head_tiles, heads_kv, batch), operands.o.shape[
        0
    ] if config.output.splits else 1


def heads_of_tiles(config: AttentionKernel, operands):
    """KV heads that have M tiles of their own: every ``rows.kv_heads``-th, whose tiles have those up to the next, too.
    Such kernels are for numbers of heads without a rest."""
    heads = operands.k.shape[2]
    return heads // config.rows.kv_heads if config.rows.kv_heads > 1 else heads


def heads_of_kv(operands):
    """Query heads of a KV head. Host side."""
    return operands.q.shape[2] // operands.k.shape[2]


def requests_of(requests: RequestLayout, operands):
    """Requests of a launch, or batch rows."""
    return cute.size(operands.cu_seqlens_q) - 1 if requests.packed_q else operands.q.shape[0]


class Grid(NamedTuple):
    """Extents of a launch that do not follow from the operands, and the query heads of a KV head, ``group``, which
    would take a division."""

    query_tiles: Int32
    head_tiles: Int32
    splits: Int32 | int
    group: Int32

    def rounds(self, tiles, ctas) -> tuple:
        """(rounds in which each of ``ctas`` persistent CTAs has a tile, tiles of the last round)."""
        return tiles // ctas, tiles % ctas

    def tiles(self, config: AttentionKernel, operands) -> TileGrid:
        """The grid of M tiles."""
        heads = heads_of_tiles(config, operands)
        return TileGrid(self.query_tiles, self.head_tiles, heads, operands.q.shape[0])


class DivisorGrid(NamedTuple):
    """A grid's extents as divisors prepared by the host, so that a division becomes a multiplication.

    query_tiles, head_tiles, heads_kv, splits: divisors. group: query heads of a KV head. whole_rounds, last_tiles: what
    ``rounds`` returns. Kernels with paired consumers use it; docs/notebook/attention_sm90.md records its gain there and
    its cost elsewhere.
    """

    query_tiles: cute.FastDivmodDivisorV2
    head_tiles: cute.FastDivmodDivisorV2
    heads_kv: cute.FastDivmodDivisorV2
    splits: cute.FastDivmodDivisorV2
    batch: Int32
    group: Int32
    whole_rounds: Int32
    last_tiles: Int32

    @classmethod
    def of(cls, tiles: TileGrid, splits, group, total, ctas) -> DivisorGrid:
        """total: tiles of the launch, splits included. ctas: CTAs of the launch. Host side."""
        divisors = (tiles.query_tiles, tiles.head_tiles, tiles.heads_kv, splits)
        divisors = (cute.FastDivmodDivisorV2(Int32(divisor)) for divisor in divisors)
        return cls(*divisors, tiles.batch, group, total // ctas, total % ctas)

    def rounds(self, tiles, ctas) -> tuple:
        """Like ``Grid.rounds``."""
        return self.whole_rounds, self.last_tiles

    def tiles(self, config: AttentionKernel, operands) -> TileGrid:
        """The grid of M tiles."""
        return DivisorTileGrid(self.query_tiles, self.head_tiles, self.heads_kv, self.batch)


@dataclass(frozen=True)
class DivisorTileGrid(TileGrid):
    """``TileGrid`` whose query_tiles, head_tiles and heads_kv, and whose sections, are divisors."""

    def section_of(self, index, section):
        return index // self.query_tiles // section * extent(section)

    def heads_of(self, rest, heads):
        rest, head_tile = rest // self.head_tiles, rest % self.head_tiles
        return head_tile, rest % self.heads_kv, rest // self.heads_kv


class Where(NamedTuple):
    """The sizes by which a persistent CTA finds its tiles: the grid, the number of tiles of the launch, the size of a
    section (``TileGrid.decode``), the window."""

    grid: Grid | DivisorGrid
    tiles: Int32
    section: Int32 | cute.FastDivmodDivisorV2
    window_left: Int32
    window_right: Int32

    @property
    def window(self) -> tuple:
        return self.window_left, self.window_right


def rounds(where: Where) -> Int32:
    """Number of tiles of this CTA."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    whole, rest = where.grid.rounds(where.tiles, ctas)
    return whole + Int32(cutlass.select_(place_in_round(whole, cta, ctas) < rest, Int32(1), Int32(0)))


def index_of(round_) -> Int32:
    """Index of this CTA's tile in a round."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return round_ * ctas + place_in_round(round_, cta, ctas)
