"""The tiles of a CTA, one after another: ``fmha.tile`` with the index as an argument."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.fmha import tile as one_tile
from warpspec.fmha.scheduler import place_in_round
from warpspec.fmha.sm90.divisors import DivisorGrid


class Where(NamedTuple):
    """What places a tile: the grid, tiles in all, the size of a section (``TileGrid.decode``), the window."""

    grid: one_tile.Grid | DivisorGrid
    tiles: Int32
    section: Int32 | cute.FastDivmodDivisorV2
    window_left: Int32
    window_right: Int32


def where_of(config, q, k, o, ctas, section, window_left, window_right) -> Where:
    """For these tensors and at most so many CTAs. Host side."""
    tiles, splits = one_tile.launch_of(config, q, k, o)
    total = Int32(tiles.size * splits)
    if config.exchanges:
        group = q.shape[2] // k.shape[2]
        grid = DivisorGrid.of(tiles, splits, group, total, cutlass.min(total, ctas))
        section = cute.FastDivmodDivisorV2(section)
    else:
        grid = one_tile.Grid(tiles.query_tiles, tiles.head_tiles, splits)
    return Where(grid, total, section, window_left, window_right)


def locate(config, operands, where: Where, index) -> one_tile.Tile:
    """The index-th tile of the problem."""
    window = (where.window_left, where.window_right)
    return one_tile.locate(config, operands, where.grid, *window, index, where.section)


def rounds(where: Where) -> Int32:
    """Tiles that this CTA does."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    whole, rest = where.grid.rounds(where.tiles, ctas)
    return whole + Int32(cutlass.select_(place_in_round(whole, cta, ctas) < rest, Int32(1), Int32(0)))


def index_of(round_) -> Int32:
    """Which tile this CTA does in a round."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return round_ * ctas + place_in_round(round_, cta, ctas)
