"""A queue of tiles: a persistent CTA takes its next tile when it is nearly done with one.

A CTA's first tile has the CTA's number. Its scheduler (``device.record``) takes every further number from a counter in
global memory, so that CTAs with short tiles do more of them. Tiles begin in the order of their numbers; a tile's result
does not depend on which CTA computes it.

It takes a number as late as hides the way to it: when the last load of its tile has been issued. Taken at the tile's
start, the second tile of every CTA would be fixed before anybody knows which CTA ends first.

Every CTA takes numbers until one is past the last tile: as many numbers in all as there are tiles. The CTA that takes
the last number resets the counter to its initial value (``common.workspace``).
"""

from __future__ import annotations

from cutlass import Int32, Int64, cute

from warpspec.common.workspace import EMPTY


@cute.jit
def take(counter: cute.Tensor, tiles) -> Int32:
    """The next tile of this CTA; ``tiles`` or more if none is left. Called by a whole warp. counter: (1) Int64."""
    ctas, _, _ = cute.arch.grid_dim()
    found = Int32(0)
    if cute.arch.lane_idx() == 0:
        before = cute.arch.atomic_add(counter.iterator, Int64(1), sem="relaxed", scope="gpu")
        found = Int32(before - EMPTY)
        if found == tiles - 1:
            counter[0] = Int64(EMPTY)
    return cute.arch.shuffle_sync(found, 0) + ctas
