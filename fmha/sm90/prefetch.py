"""What a load warp brings into L2 while shared memory has no room for it: KV tiles after those under way, Q of the next
tile at the end of one. Their loads then wait for L2 and not for memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean

from warpspec.fmha.pages import kv_places
from warpspec.fmha.scheduler import extent
from warpspec.fmha.sm90.rings import kv_ring, q_ring


@cute.jit
def prefetch_q(
    config: cutlass.Constexpr,
    tile,
    atoms,
    coordinates,
    shared: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    part,
):
    """A part of the columns of a tile's Q."""
    if tile.span.count > 0:
        blocks = config.blocks // config.parts
        for group in cutlass.range_constexpr(config.row_groups):
            ring = q_ring(config, atoms[0], coordinates[0], shared.q, tile, group, dtype)
            for block in cutlass.range_constexpr(blocks):
                ring.prefetch(part * blocks + block)


@cute.jit
def prefetch_kv(
    config: cutlass.Constexpr,
    where,
    tile,
    step,
    atoms,
    coordinates,
    shared: cutlass.Constexpr,
    operands,
    dtype: cutlass.Constexpr,
    part,
):
    """A part of the columns of a tile's step-th KV tile, K and V in one, if there is one and this CTA is to do it."""
    if (step < tile.span.count) & leads(tile, where):
        places = kv_places(config, operands, tile, tile.span.tile(step))
        ring = kv_ring(config, atoms[1], coordinates[1], shared.k, tile, dtype)
        blocks, pages = config.kv_boxes
        blocks //= config.parts
        for block in cutlass.range(part * blocks, (part + 1) * blocks, unroll=1):
            for page in cutlass.range_constexpr(pages):
                row, source = places[page]
                ring.prefetch((row, block, source))


def leads(tile, where) -> Boolean:
    """Of the M tiles that read the same K and V, which other CTAs do at the same time, this one prefetches.

    None does where there is one M tile only: then memory is what binds, and asking twice costs (64 heads, B128 L640:
    12% more time on an H200).
    """
    several = Boolean(extent(where.grid.query_tiles) * extent(where.grid.head_tiles) > 1)
    return several & Boolean(tile.query_tile == 0) & Boolean(tile.head_tile == 0)
