"""The load warp: Q of an M tile, then K and V tiles through TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from warpspec.common.device import tma
from warpspec.common.device.pipeline import drain
from warpspec.fmha.device.block_scales import load_scales
from warpspec.fmha.device.pages import kv_places
from warpspec.fmha.device.rings import kv_ring
from warpspec.fmha.sm100 import bias as biases


def rings(config, atoms, coordinates, bases, tile, dtype) -> tuple[tma.TileRing, ...]:
    """Rings of Q, whose stages are the blocks of D, and of K and V. atoms, coordinates: from ``tma.make_load``.
    bases: Uint8 pointers to the shared memory that TMA fills."""
    # (D, HEAD, QUERY, BLOCK): this tile's, from its first head and query on
    q = coordinates[0][None, None, None, None, tile.batch]
    q = cute.domain_offset((0, tile.first_head, tile.first_row_of(0), 0), q)
    q_tiles = cute.local_tile(q, config.q_box, (0, 0, 0, None) if config.heads.whole else (None, 0, 0, 0))
    block_bytes = config.tile_m * tma.ROW_BYTES
    q_shared = tma.shared_tiles(bases[0], dtype, config.q_box, config.heads.qk_blocks, block_bytes)
    found = [tma.TileRing.make(atoms[0], q_tiles, q_shared)]
    for places in zip(atoms[1:], coordinates[1:], bases[1:], config.format.rings, strict=False):
        found.append(kv_ring(config, *places, tile, dtype))
    return tuple(found)


@cute.jit
def load(config: cutlass.Constexpr, channels: cutlass.Constexpr, rings, tile, operands, bias, scales, uses):
    """Fill shared memory: the Q tile, then one K and one V tile for every KV tile of ``tile.span``, in order;
    one tile for both if they are one tensor.

    rings: of Q, K and, if it is another tensor, V. operands: for the page table. bias: its ring, if it has one. scales:
    shared memory of block scales, if there are any. uses: (M tiles with keys, KV tiles) that the CTA has loaded before.
    Produces: q_full, k_full, v_full (expect_tx by one lane, bytes by TMA). Consumes: q_empty, if there are several M
    tiles; k_empty, v_empty before refilling a stage. For codes, raw_k_full and so on instead.
    """
    span, (tile_use, first_use) = tile.span, uses
    if span.count > 0:
        if cutlass.const_expr(config.scheduler.cuts_tiles):
            channels["q_empty"].wait_previous(tile_use)
        channels["q_full"].expect_bytes(tile_use, config.heads.qk_blocks * tma.tile_bytes(config.q_box))
        for block in cutlass.range_constexpr(config.heads.qk_blocks):
            rings[0].load(block, block, channels["q_full"].barrier(tile_use))
    for step in cutlass.range(span.count, unroll=1):
        use = first_use + step
        places = kv_places(config, operands, tile, span.tile(step))
        for i, (name, ring) in enumerate(zip(config.format.rings, rings[1:], strict=True)):
            loaded = config.load_ring(name)
            full, empty = channels[loaded + "_full"], channels[loaded + "_empty"]
            empty.wait_previous(use)
            full.expect_bytes(use, config.load_tile_bytes(name))
            blocks, pages = config.kv.boxes(name)
            for box in cutlass.range(blocks * pages, unroll=1):  # unrolled, its addresses cost spills
                block, page = (box, 0) if cutlass.const_expr(pages == 1) else (box // pages, box % pages)
                row, source = places[page]
                ring.load(
                    config.kv.place_of(row, block, source),
                    full.stage(use) * blocks * pages + box,
                    full.barrier(use),
                )
            if cutlass.const_expr(config.format.kv_block > 0):
                load_scales(config, operands, scales, tile, i, full, use, places)
        if cutlass.const_expr(bias is not None):
            biases.load(config, channels, bias, span.tile(step), step)


@cute.jit
def drain_all(config: cutlass.Constexpr, channels: cutlass.Constexpr, uses):
    """``drain`` all rings. uses: use counts of all that was loaded."""
    tile_use, end = uses
    drain(tuple(channels[config.load_ring(name) + "_empty"] for name in config.format.rings), end)
    if cutlass.const_expr(config.scheduler.cuts_tiles):  # noqa: SIM102
        if tile_use > 0:
            channels["q_empty"].wait(tile_use - 1)
    if cutlass.const_expr(config.bias_stages > 0):
        drain((channels["bias_empty"],), end)
