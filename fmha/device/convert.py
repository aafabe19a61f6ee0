"""The converter, four warps: it turns the loaded FP8 or NVFP4 tiles of K and V into the 16-bit tiles that the products
read. Its code is the same on every architecture.

Codes have no swizzle. A thread takes 16 at a time and stores two chunks of 16 bytes with the 128-byte swizzle. Eight
neighbouring threads take codes of two rows, so that neither their loads nor their stores have bank conflicts: at D 64
both rows; at larger D the first half of a block pair in one row and the second half in the other, then the other way
round. (NVFP4's 16 codes are 8 bytes, so sixteen threads load together; at D 64 two rows conflict.)
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device import tma
from warpspec.common.device.words import VECTOR_WORDS, load_shared, load_shared_byte, store_shared
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS, WORD_BYTES
from warpspec.fmha.device.block_scales import scale_address, tile_scales
from warpspec.fmha.device.codes import codes_of
from warpspec.fmha.device.tiles import each_tile
from warpspec.fmha.heads import BLOCK

SWIZZLE_ROWS = 8  # period of the swizzle in rows
OCTET = 8  # threads whose 16-byte accesses form one shared-memory transaction
VECTOR = 16  # codes that a thread takes at a time; a block of NVFP4
BLOCK_VECTORS = BLOCK // VECTOR  # of a row of a block
BATCH = 8  # words of codes of a thread in registers


@dataclass(frozen=True)
class Converter:
    """The converter's state for all tiles. raw, wide: Uint8 pointers to the rings, in the order of ``format.rings``.
    scales: Uint8 pointer to the rings of block scales, or None."""

    config: object
    channels: dict
    raw: tuple
    wide: tuple
    scales: cute.Pointer | None
    thread: Int32


@cute.jit
def convert(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands, raw, wide, scales, where):
    """Convert every K and V tile of the CTA, in the order in which they are loaded.

    Consumes: raw_k_full, raw_v_full; k_empty, v_empty before refilling a stage. Produces: k_full, v_full; raw_k_empty,
    raw_v_empty, one arrival per warp. Returns only when every stage has been released.
    """
    thread = cute.arch.thread_idx()[0] - config.convert_warp * WARP_THREADS
    role = Converter(config, channels, raw, wide, scales, thread)
    use = each_tile(config, operands, where, convert_tile, role, Int32(0))
    for last in cutlass.range(cutlass.max(use - config.kv_stages, 0), use, unroll=1):
        for name in config.format.rings:
            channels[name + "_empty"].wait(last)


@cute.jit
def convert_tile(role, tile, use):
    """Convert K and V of one tile's KV tiles. use: number of KV tiles before; returns the number after."""
    config = role.config
    for step in cutlass.range(use, use + tile.span.count, unroll=1):
        for i, name in enumerate(config.format.rings):
            convert_stage(role, i, name, step)
    return use + tile.span.count


@cute.jit
def convert_stage(role, ring: cutlass.Constexpr, name: cutlass.Constexpr, use):
    """Convert one K or V tile. ring: its number in ``config.format.rings``; name: its name."""
    config, channels, thread = role.config, role.channels, role.thread
    vectors = config.tile_n * config.heads.qk // (WARPGROUP_THREADS * VECTOR)
    kind, words = codes_of(config, config.ring_dtype(name)), config.format.kv_row(VECTOR) // WORD_BYTES
    each = BATCH // words  # vectors in registers
    source = role.raw[ring].toint() + use % config.shape.raw_stages * config.codes.tile_bytes
    target = role.wide[ring].toint() + use % config.kv_stages * config.kv.k_bytes
    scales = None
    if cutlass.const_expr(config.format.kv_block > 0):
        scales = tile_scales(config, role.scales, ring, use % config.shape.raw_stages)
    channels["raw_" + name + "_full"].wait(use)
    for first in cutlass.range_constexpr(0, vectors, each):
        batch = range(first, min(first + each, vectors))
        places = [place_of(config, thread, vector) for vector in batch]
        codes = [
            load_shared(source + row * config.codes.row_bytes + config.format.kv_row(column), words)
            for row, column in places
        ]
        block_scales = [block_scale(config, scales, name, *place) for place in places]
        if cutlass.const_expr(first == 0):
            channels[name + "_empty"].wait_previous(use)
        for i in cutlass.range_constexpr(len(places)):
            row, column = places[i]
            scale = None if block_scales[i] is None else kind.scale_pair(block_scales[i])
            wide = kind.in_order([codes[i][w] for w in range(words)], scale)
            block, chunk = column // BLOCK, column % BLOCK // 8
            at = target + (block * config.tile_n + row) * tma.ROW_BYTES
            chunk = (chunk ^ (row % SWIZZLE_ROWS)) * VECTOR_BYTES
            store_shared(at + chunk, wide[:VECTOR_WORDS])
            store_shared(at + (chunk ^ VECTOR_BYTES), wide[VECTOR_WORDS:])
    cute.arch.fence_view_async_shared()
    # An arrival does not wait for earlier loads, but here their data have been used.
    channels["raw_" + name + "_empty"].arrive_warp(use)
    channels[name + "_full"].arrive_warp(use)


def block_scale(config, scales, name: str, row, column):
    """The e4m3 scale of 16 codes of a tile; None for formats without block scales. scales: address of the tile's."""
    if config.format.kv_block == 0:
        return None
    return load_shared_byte(scale_address(config, scales, name, row, column // config.format.kv_block))


def place_of(config, thread: Int32, vector: int) -> tuple:
    """(row, first column) of the thread's ``vector``-th 16 codes of a tile."""
    octet, member = thread // OCTET + vector * (WARPGROUP_THREADS // OCTET), thread % OCTET
    half, place = member // BLOCK_VECTORS, member % BLOCK_VECTORS
    if config.heads.qk_blocks == 1:
        return octet * 2 + half, place * VECTOR
    turn, pair = octet % 2, octet // 2
    row = pair // (config.heads.qk_blocks // 2) * 2 + (half ^ turn)
    block = pair % (config.heads.qk_blocks // 2) * 2 + half
    return row, block * BLOCK + place * VECTOR
