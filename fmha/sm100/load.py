"""The load warp: Q once, then K and V tiles through TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from warpspec.common import tma


def rings(config, atoms, coordinates, bases, tile, dtype) -> tuple[tma.TileRing, ...]:
    """Rings of Q, K and V. atoms, coordinates: from ``tma.make_load``. bases: shared memory regions."""
    q, k, v = coordinates
    # (D, HEAD, QUERY, TILE)
    q_tiles = cute.local_tile(
        q[None, None, None, tile.kv_head, tile.batch], config.q_box, (0, tile.head_tile, None)
    )
    # (D, KEY, TILE)
    k_tiles, v_tiles = (
        cute.local_tile(t[None, None, tile.kv_head, tile.batch], config.kv_box, (0, None)) for t in (k, v)
    )
    tiles, boxes = (q_tiles, k_tiles, v_tiles), (config.q_box, config.kv_box, config.kv_box)
    stages = (1, config.kv_stages, config.kv_stages)
    return tuple(
        tma.TileRing.make(atom, tile, tma.shared_tiles(base, dtype, box, stage))
        for atom, tile, base, box, stage in zip(atoms, tiles, bases, boxes, stages, strict=True)
    )


@cute.jit
def load(config: cutlass.Constexpr, channels: cutlass.Constexpr, rings, tile):
    """Fill shared memory: the Q tile, then one K and one V tile for every KV tile of ``tile.span``, in order.

    rings: of Q (one stage), K and V. Produces: q_full, k_full, v_full (expect_tx by one lane, bytes by TMA).
    Consumes: k_empty, v_empty, a stage of each before it is filled again. Leaves only when every stage has
    been released, so no arrival is still on its way to a barrier of a CTA that has ended.
    """
    span = tile.span
    q, k, v = rings
    if span.count > 0:
        channels["q_full"].expect_bytes(0, tma.tile_bytes(config.q_box))
        q.load(tile.query_tile, 0, channels["q_full"].barrier(0))
    for step in cutlass.range(span.count, unroll=1):
        for name, ring in (("k", k), ("v", v)):
            full, empty = channels[name + "_full"], channels[name + "_empty"]
            empty.wait_previous(step)
            full.expect_bytes(step, config.kv_tile_bytes)
            ring.load(span.tile(step), full.stage(step), full.barrier(step))
    for step in cutlass.range(cutlass.max(span.count - config.kv_stages, 0), span.count, unroll=1):
        channels["k_empty"].wait(step)
        channels["v_empty"].wait(step)
