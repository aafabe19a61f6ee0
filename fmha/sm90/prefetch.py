"""A load warp's prefetches into L2 while shared memory is full: KV tiles after those in flight, and Q of the next tile
at the end of one. The loads then wait for L2 and not for memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean

from warpspec.fmha.device.pages import kv_places
from warpspec.fmha.schedule import extent


@cute.jit
def prefetch_q(source, tile):
    """Prefetch a column group of a tile's Q."""
    if tile.span.count > 0:
        for row_group in cutlass.range_constexpr(source.config.rows.groups):
            ring = source.q(tile, row_group)
            for block in cutlass.range_constexpr(source.config.group_blocks):
                ring.prefetch(source.column_group * source.config.group_blocks + block)
            if cutlass.const_expr(source.config.odd_blocks > 0):
                first, end = source.blocks
                for block in cutlass.range(first + source.config.group_blocks, end, unroll=1):
                    ring.prefetch(block)


@cute.jit
def prefetch_kv(source, where, tile, step):
    """Prefetch a column group of the KV tile of visit ``step``, K and V in one tensor, if there is one and this
    CTA leads."""
    if (step < tile.span.count) & leads(source.config, tile, where):
        config = source.config
        places = kv_places(config, source.operands, tile, tile.span.tile(step))
        ring = source.kv(tile)
        _, pages = config.kv.boxes()
        first, end = source.blocks
        for block in cutlass.range(first, end, unroll=1):
            for page in cutlass.range_constexpr(pages):
                row, origin = places[page]
                ring.prefetch((row, block, origin))


def leads(config, tile, where) -> Boolean:
    """Whether this M tile prefetches, among those that read the same K and V on other CTAs at about the same time: the
    one with the last queries, which see the most keys.

    No tile does if there is only one M tile: then memory is the bottleneck, and requesting data twice costs time (64
    heads, B128 L640: 12% more time on an H200). Work that is cut by length has one query tile a request, and the first
    head tile leads: the others are in step with it.
    """
    if config.scheduler.has_warp:
        return Boolean(tile.group > config.rows.pack) & Boolean(tile.head_tile == 0)
    query_tiles, head_tiles = extent(where.grid.query_tiles), extent(where.grid.head_tiles)
    several = Boolean(query_tiles * head_tiles > 1)
    return several & Boolean(tile.query_tile == query_tiles - 1) & Boolean(tile.head_tile == 0)
