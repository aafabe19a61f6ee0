"""The tiles of a CTA, one after another: ``sm100.tile`` with the index as an argument."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.fmha import tile as one_tile
from warpspec.fmha.scheduler import place_in_round


class Where(NamedTuple):
    """What places a tile: extents of the grid (query tiles, head tiles, splits), tiles in all, the size of a section
    (``TileGrid.decode``), the window. A cluster's CTAs have neighbouring head tiles: there, all of these count one for
    each cluster."""

    grid: tuple
    tiles: Int32
    section: Int32
    window_left: Int32
    window_right: Int32


def locate(config, operands, where: Where, index) -> one_tile.Tile:
    """The index-th tile of the problem; of a cluster's tiles this CTA's."""
    window = (where.window_left, where.window_right)
    tile = one_tile.locate(config, operands, where.grid, *window, index, where.section)
    if config.cluster > 1:
        tile = replace(tile, head_tile=tile.head_tile * config.cluster + cute.arch.block_idx_in_cluster())
    return tile


def clusters(config) -> tuple:
    """(which cluster, of how many); of CTAs where there are no clusters."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return (cta, ctas) if config.cluster == 1 else (cta // config.cluster, ctas // config.cluster)


def rounds(config, where: Where) -> Int32:
    """Tiles that this CTA does."""
    cta, ctas = clusters(config)
    whole, rest = where.tiles // ctas, where.tiles % ctas
    return whole + Int32(cutlass.select_(place_in_round(whole, cta, ctas) < rest, Int32(1), Int32(0)))


def index_of(config, round_) -> Int32:
    """Which tile this CTA does in a round."""
    cta, ctas = clusters(config)
    return round_ * ctas + place_in_round(round_, cta, ctas)
