"""The tiles of a CTA, one after another: ``sm100.tile`` with the index as an argument."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32

from warpspec.fmha.sm100 import tile as one_tile


class Where(NamedTuple):
    """What places a tile: extents of the grid (query tiles, head tiles, splits), tiles in all, the window."""

    grid: tuple
    tiles: Int32
    window_left: Int32
    window_right: Int32


def locate(config, operands, where: Where, index) -> one_tile.Tile:
    """The index-th tile of the problem."""
    return one_tile.locate(config, operands, where.grid, where.window_left, where.window_right, index)
