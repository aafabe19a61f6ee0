"""The load warps: a stage of weights by one bulk copy a row group, its tokens by copies of 16 bytes a lane."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from warpspec.common import tma
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.common.words import shuffle_address
from warpspec.moe.sm90.config import ELEMENT_BYTES, STEP_ROW_BYTES
from warpspec.moe.sm90.tiles import has_rows, stage_count, tile_at, tile_count
from warpspec.moe.streamed import CHUNK_BYTES, STEP_CHUNKS

CHUNK_VECTORS = tma.ROW_BYTES // VECTOR_BYTES  # 16-byte pieces of a token in a chunk: a span of the swizzle


@cute.jit
def load(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, ops, warp):
    """One load warp; warp: 0 loads the weights too.

    Produces full: the first warp's arrival with the weights' bytes, and one of every thread that comes by itself when
    the thread's copies of tokens are done. Consumes empty.
    """
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    lane = cute.arch.lane_idx()
    stages, use, ahead = stage_count(config, ops), Int32(0), Int32(0)
    total = tile_count(config, ops)
    if cutlass.const_expr(config.early):
        if (cta < total) & (warp == 0):
            tile = tile_at(config, ops, cta)
            ahead = cutlass.min(stages, config.shape.stages)
            for number in cutlass.range(ahead, unroll=1):
                load_weights(config, channels, shared, ops, tile, number, number)
        cute.arch.griddepcontrol_wait()
    for index in cutlass.range(cta, total, ctas, unroll=1):
        tile = tile_at(config, ops, index)
        row = find_row(config, ops, tile, warp, lane)
        for number in cutlass.range(stages, unroll=1):
            if use >= ahead:
                channels["empty"].wait_previous(use)
                if warp == 0:
                    load_weights(config, channels, shared, ops, tile, number, use)
            load_tokens(config, shared, ops, tile, number, use, warp, lane, row)
            cute.arch.cp_async_mbarrier_arrive_noinc(channels["full"].barrier(use))
            use += 1
    for last in cutlass.range(cutlass.max(use - config.shape.stages, 0), use, unroll=1):
        channels["empty"].wait(last)


@cute.jit
def load_weights(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, ops, tile, number, use):
    """Stage ``number`` of the tile: its steps of every row group, one behind another; the last may lack some."""
    full = channels["full"]
    left = ops.chunks - number * config.stage_chunks
    steps = (cutlass.min(left, config.stage_chunks) + STEP_CHUNKS - 1) // STEP_CHUNKS
    size = steps * config.scale_bytes + cutlass.min(left, config.stage_chunks) * CHUNK_BYTES
    present = Int32(0)
    for group in cutlass.range_constexpr(config.shape.row_groups):
        present += Int32(has_rows(ops, tile, group))
    full.expect_bytes(use, size * present)
    with cute.arch.elect_one():
        for group in cutlass.range_constexpr(config.shape.row_groups):
            if has_rows(ops, tile, group):
                row = ops.data[tile.expert, tile.row_tile + group, None]
                address = row.iterator.toint() + Int64(number) * config.weight_bytes
                slot = full.stage(use) * config.shape.row_groups + group
                target = shared.weights + slot * config.weight_bytes
                tma.bulk_load(target, address, size, full.barrier(use), "first")


@cute.jit
def find_row(config: cutlass.Constexpr, ops, tile, warp, lane) -> Int64:
    """Address of the lane-th row of the tile that this warp loads: the lane's, which others ask for."""
    row = cutlass.min(row_of(config, warp, lane), tile.count - 1)
    source = tile.first + row
    if cutlass.const_expr(config.gathers):
        source = Int32(ops.source[source]) // ops.choices
    return ops.tokens[source, None].iterator.toint()


def row_of(config, warp, index) -> Int32:
    """Row of the tile that is the warp's index-th: warps take turns at as many as one instruction loads."""
    at_once = rows_at_once(config)
    return (index // at_once * config.shape.load_warps + warp) * at_once + index % at_once


def rows_at_once(config) -> int:
    return WARP_THREADS * VECTOR_BYTES // config.row_bytes


@cute.jit
def load_tokens(config: cutlass.Constexpr, shared, ops, tile, number, use, warp, lane, row: Int64):
    """A stage of the tile's rows, 16 bytes a lane and instruction, where the 128-byte swizzle puts them. Rows past the
    tile's stay as they are: no other column of the product depends on them."""
    at_once = rows_at_once(config)
    vector, member = lane % (WARP_THREADS // at_once), lane // (WARP_THREADS // at_once)
    chunk, piece = vector // CHUNK_VECTORS, vector % CHUNK_VECTORS
    base = shared.tokens.toint() + use % config.shape.stages * config.token_bytes
    base += chunk * (config.token_bytes // config.stage_chunks)
    offset = Int64(number) * config.row_bytes + Int64(vector * VECTOR_BYTES)
    present = number * config.stage_chunks + chunk < ops.chunks
    of_all = at_once * config.shape.load_warps
    for i in cutlass.range((tile.count - warp * at_once + of_all - 1) // of_all, unroll=1):
        address = shuffle_address(row, i * at_once + member)
        at = row_of(config, warp, i * at_once + member)
        if present & (at < tile.count):
            target = base + at * tma.ROW_BYTES + (piece ^ (at % 8)) * VECTOR_BYTES
            copy_vector(target, address + offset)


def copy_vector(target, address) -> None:
    """16 bytes from global to shared memory, past L1, which a later arrival of the thread waits for."""
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {VECTOR_BYTES};",
        read_only_args=[Int32(target), address],
    )


assert BFloat16.width // 8 == ELEMENT_BYTES and STEP_ROW_BYTES == STEP_CHUNKS * tma.ROW_BYTES
