"""The load warp: Q once, then K and V tiles through TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from warpspec.common import tma


@cute.jit
def load(config: cutlass.Constexpr, channels: cutlass.Constexpr, rings, query_tile, span):
    """Fill shared memory: the Q tile, then one K and one V tile for every KV tile of ``span``, in its order.

    rings: ``tma.TileRing`` of Q (one stage), K and V. query_tile: which of Q's tiles. Produces: q_full,
    k_full, v_full (expect_tx by one lane, bytes by TMA). Consumes: k_empty, v_empty, a stage of each before
    it is filled again. Leaves only when every stage has been released, so no arrival is still on its way to a
    barrier of a CTA that has ended.
    """
    q, k, v = rings
    if span.count > 0:
        channels["q_full"].expect_bytes(0, tma.tile_bytes(config.q_box))
        q.load(query_tile, 0, channels["q_full"].barrier(0))
    for step in cutlass.range(span.count, unroll=1):
        for name, ring in (("k", k), ("v", v)):
            full, empty = channels[name + "_full"], channels[name + "_empty"]
            empty.wait_previous(step)
            full.expect_bytes(step, config.kv_tile_bytes)
            ring.load(span.tile(step), full.stage(step), full.barrier(step))
    for step in cutlass.range(cutlass.max(span.count - config.kv_stages, 0), span.count, unroll=1):
        channels["k_empty"].wait(step)
        channels["v_empty"].wait(step)
