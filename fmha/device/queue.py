"""A queue of tiles: which tile a persistent CTA does next is asked for while it does one.

A CTA's first tile has its own number. A warp of its own takes every further number from a counter in global memory and
passes it to the other roles through shared memory, so that CTAs with short tiles do more of them. Tiles begin in the
order of their numbers, whichever CTA does them, and a tile's result does not depend on that.

Every CTA takes numbers until one is past the last tile: as many in all as there are tiles. Who takes the last one
leaves the counter as it was found (``common.workspace``).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from warpspec.common.workspace import EMPTY


@cute.jit
def take(counter: cute.Tensor, tiles) -> Int32:
    """The next tile of this CTA, ``tiles`` or more where none is left. By one thread. counter: (1) Int64."""
    ctas, _, _ = cute.arch.grid_dim()
    before = cute.arch.atomic_add(counter.iterator, Int64(1), sem="relaxed", scope="gpu")
    number = Int32(before - EMPTY)
    if number == tiles - 1:
        counter[0] = Int64(EMPTY)
    return number + ctas


@cute.jit
def hand_out(channels: cutlass.Constexpr, counter: cute.Tensor, slot: cute.Tensor, tiles):
    """The queue's warp: one number after another, to ``slot`` (1) in shared memory; the last is past all tiles.

    Produces: tile_full. Consumes: tile_empty, before it writes the next number, which it has by then.
    """
    tile, _, _ = cute.arch.block_idx()
    use = Int32(0)
    while tile < tiles:
        found = Int32(0)
        if cute.arch.lane_idx() == 0:
            found = take(counter, tiles)
        tile = cute.arch.shuffle_sync(found, 0)
        channels["tile_empty"].wait_previous(use)
        if cute.arch.lane_idx() == 0:
            slot[0] = tile
        channels["tile_full"].arrive_warp(use)
        use += 1


def next_tile(channels: dict, slot: cute.Tensor, use) -> Int32:
    """The number of the use-th further tile, by a whole warp that every time asks for it.

    Consumes: tile_full. Produces: tile_empty.
    """
    channels["tile_full"].wait(use)
    tile = slot[0]
    channels["tile_empty"].arrive_warp(use)
    return tile
