"""The tiles of a CTA, one after another: ``fmha.tile`` with the index as an argument."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.fmha import tile as one_tile
from warpspec.fmha.scheduler import place_in_round


class Where(NamedTuple):
    """What places a tile: extents of the grid (query tiles, head tiles, splits), tiles in all, the size of a section
    (``TileGrid.decode``), the window."""

    grid: tuple
    tiles: Int32
    section: Int32
    window_left: Int32
    window_right: Int32


def locate(config, operands, where: Where, index) -> one_tile.Tile:
    """The index-th tile of the problem."""
    window = (where.window_left, where.window_right)
    return one_tile.locate(config, operands, where.grid, *window, index, where.section)


def rounds(where: Where) -> Int32:
    """Tiles that this CTA does."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    whole, rest = where.tiles // ctas, where.tiles % ctas
    return whole + Int32(cutlass.select_(place_in_round(whole, cta, ctas) < rest, Int32(1), Int32(0)))


def index_of(round_) -> Int32:
    """Which tile this CTA does in a round."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return round_ * ctas + place_in_round(round_, cta, ctas)
