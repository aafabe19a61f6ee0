"""The rings in shared memory that load warps fill through TMA, and where in global memory it comes from."""

from __future__ import annotations

import cutlass.cute as cute

from warpspec.common import tma
from warpspec.fmha.sm90.rows import first_query


def q_ring(config, atom, coordinates, base, tile, group, dtype) -> tma.TileRing:
    """The ring of one group of rows' Q, whose stages are the blocks of D of every group."""
    first_head = tile.kv_head * tile.group + tile.head_tile * config.pack
    # (D, HEAD, QUERY, BLOCK): from the group's first head and query on
    q = coordinates[None, None, None, None, tile.batch]
    q = cute.domain_offset((0, first_head, first_query(config, tile, group), 0), q)
    tiles = cute.local_tile(q, config.q_box, (0, 0, 0, None))
    block_bytes = config.q_bytes // config.blocks
    shared = tma.shared_tiles(base, dtype, config.q_box, config.row_groups * config.blocks, block_bytes)
    return tma.TileRing.make(atom, tiles, shared)


def kv_ring(config, atom, coordinates, base, tile, dtype) -> tma.TileRing:
    """The ring of K or V."""
    # (D, KEY, BLOCK, (TILE, BLOCK TILE, BATCH or PAGE))
    tiles = coordinates[None, None, None, tile.kv_head, None]
    tiles = cute.local_tile(tiles, config.kv_box, (0, None, None, None))
    tiles = cute.group_modes(tiles, 3, 6)
    # A stage's boxes stand in it one after another: a block of D, in it the pages.
    shared = tma.shared_tiles(base, dtype, config.kv_box, config.kv_stages * cute.size(config.kv_boxes))
    return tma.TileRing.make(atom, tiles, shared)
