"""The rings that TMA fills with K and V tiles, on every architecture."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from warpspec.common.device import tma


def kv_ring(
    config, atom, coordinates, base: cute.Pointer, ring: str, tile, dtype, row_group: int = 0
) -> tma.TileRing:
    """A ring of ``config.format.rings`` for the KV head of a tile's row group, and its request.

    atom, coordinates: from ``tma.make_load``. base: Uint8 pointer to shared memory that TMA fills. dtype: dtype of K
    and V if they are not in FP8.
    """
    # (D, KEY, BLOCK, (TILE, BLOCK TILE, BATCH or PAGE))
    tiles = coordinates[None, None, None, tile.kv_head_of(row_group), None]
    if config.requests.packed_k:  # from the request's first key on
        tiles = cute.domain_offset((0, tile.first_key, 0, 0), tiles)
    box, boxes = config.kv.box(ring), cute.size(config.kv.boxes(ring))
    tiles = cute.local_tile(
        tiles, box, (0, None, None, None) if config.heads.whole else (None, None, 0, None)
    )
    tiles = cute.group_modes(tiles, 3, 6)
    # A stage holds its boxes one after another, by block of D, then by page.
    dtype = cutlass.Uint8 if config.format.kv_format else dtype
    shared = tma.shared_tiles if config.kv.swizzled else tma.plain_tiles
    return tma.TileRing.make(atom, tiles, shared(base, dtype, box, config.load_stages * boxes))
