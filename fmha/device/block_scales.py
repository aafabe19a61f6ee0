"""Block scales of NVFP4 keys and values in shared memory: loading them, and reading single ones.

TMA moves no less than 16 bytes, and a row has 4, 8 or 16 block scales, so lanes of the load warp copy them. A tile's
scales keep their row layout of global memory; swizzled scales keep their places, because groups of four keys lie in one
tile.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.device.words import copy_async
from warpspec.common.hardware import WARP_THREADS
from warpspec.common.kv_formats import swizzled_place


def tile_scales(config, base: cute.Pointer, ring: int, stage):
    """Address of a tile's block scales. base: address of the rings; ring: number in ``config.format.rings``."""
    return base.toint() + ring * config.codes.scale_ring_bytes + stage * config.codes.scale_tile_bytes


@cute.jit
def load_scales(
    config: cutlass.Constexpr,
    operands,
    base,
    tile,
    ring: cutlass.Constexpr,
    full: cutlass.Constexpr,
    use,
    places,
):
    """Copy the block scales of a KV tile; each lane copies those of some keys, and zeros for keys that do not exist.
    Called by a whole warp. base, ring: as for ``tile_scales``. places: from ``pages.kv_places``.

    Produces: ``full``, one arrival per lane when its copies are done.
    """
    blocks = operands.k_block_scales if ring == 0 else operands.v_block_scales
    target, keys = tile_scales(config, base, ring, full.stage(use)), config.kv.page_keys
    for first in cutlass.range_constexpr(0, config.tile_n, WARP_THREADS):
        key = first + cute.arch.lane_idx()
        box, page = places[key // keys if config.kv.pages > 1 else 0]
        row = box * keys + key % keys
        if cutlass.const_expr(config.requests.packed_k):
            row = row + tile.first_key
        exists = Boolean(row < blocks.shape[1]) & Boolean(page >= 0) & Boolean(page < blocks.shape[0])
        row, page = (Int32(cutlass.select_(exists, number, Int32(0))) for number in (row, page))
        origin = blocks[page, row, tile.kv_head, None].iterator.toint()
        wanted = Int32(cutlass.select_(exists, Int32(config.codes.row_blocks), Int32(0)))
        if cutlass.const_expr(first + WARP_THREADS <= config.tile_n):  # noqa: SIM114
            copy_async(target + key * config.codes.row_blocks, origin, config.codes.row_blocks, wanted)
        elif key < config.tile_n:
            copy_async(target + key * config.codes.row_blocks, origin, config.codes.row_blocks, wanted)
    full.arrive_behind_copies(use)


def scale_address(config, tile, ring: str, row, block):
    """Address of the scale of a block of a row. tile: from ``tile_scales``. ring: "k" or "v"."""
    at = (row, block)
    if config.format.swizzled and ring == "v":
        at = swizzled_place(row, block, config.codes.row_blocks)
    return tile + at[0] * config.codes.row_blocks + at[1]
