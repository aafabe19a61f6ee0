"""The tiles of a CTA, one after another: ``sm100.tile`` with the index as an argument."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha import tile as one_tile
from warpspec.fmha.scheduler import place_in_round


class Where(NamedTuple):
    """What places a tile: the grid; rounds in which every CTA has a tile, and tiles of the last, in which some do; the
    size of a section (``TileGrid.decode``), a divisor; the window."""

    grid: one_tile.Grid
    whole_rounds: Int32
    rest: Int32
    section: cute.FastDivmodDivisorV2
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
    last = Boolean(place_in_round(where.whole_rounds, cta, ctas) < where.rest)
    return where.whole_rounds + Int32(cutlass.select_(last, Int32(1), Int32(0)))


def index_of(round_) -> Int32:
    """Which tile this CTA does in a round."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return round_ * ctas + place_in_round(round_, cta, ctas)
