"""The load warps: a step of weights by one bulk copy a row group, its tokens by copies of 16 bytes a lane."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Int32, Int64

from warpspec.common import tma
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.moe.sm90.config import ELEMENT_BYTES, PASS_ROWS, ROW_VECTORS
from warpspec.moe.sm90.tiles import has_rows, tile_at, tile_count
from warpspec.moe.streamed import CHUNK_BYTES, STEP, STEP_CHUNKS

CHUNK_VECTORS = ROW_VECTORS // STEP_CHUNKS  # 16-byte pieces of a token in a chunk: a span of the swizzle


@cute.jit
def load(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, ops, warp):
    """One load warp; warp: 0 loads the weights too.

    Produces full: the first warp's arrival with the weights' bytes, and one of every thread that comes by itself when the
    thread's copies of tokens are done. Consumes empty.
    """
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    lane = cute.arch.lane_idx()
    steps, use, ahead = Int32(cute.ceil_div(ops.chunks, STEP_CHUNKS)), Int32(0), Int32(0)
    total = tile_count(config, ops)
    rows = cute.make_rmem_tensor(config.loads, Int64)
    if cutlass.const_expr(config.early):
        if (cta < total) & (warp == 0):
            tile = tile_at(config, ops, cta)
            ahead = cutlass.min(steps, config.shape.stages)
            for step in cutlass.range(ahead, unroll=1):
                load_weights(config, channels, shared, ops, tile, step, step)
        cute.arch.griddepcontrol_wait()
    for index in cutlass.range(cta, total, ctas, unroll=1):
        tile = tile_at(config, ops, index)
        find_rows(config, ops, tile, warp, lane, rows)
        for step in cutlass.range(steps, unroll=1):
            if use >= ahead:
                channels["empty"].wait_previous(use)
                if warp == 0:
                    load_weights(config, channels, shared, ops, tile, step, use)
            load_tokens(config, shared, ops, tile, step, use, warp, lane, rows)
            cute.arch.cp_async_mbarrier_arrive_noinc(channels["full"].barrier(use))
            use += 1
    for last in cutlass.range(cutlass.max(use - config.shape.stages, 0), use, unroll=1):
        channels["empty"].wait(last)


@cute.jit
def load_weights(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, ops, tile, step, use):
    """A step of every row group's weights; the last step may have one chunk."""
    full = channels["full"]
    whole = Int32(config.weight_bytes)
    size = whole if (step + 1) * STEP_CHUNKS <= ops.chunks else whole - CHUNK_BYTES
    present = Int32(0)
    for group in cutlass.range_constexpr(config.shape.row_groups):
        present += Int32(has_rows(ops, tile, group))
    full.expect_bytes(use, size * present)
    with cute.arch.elect_one():
        for group in cutlass.range_constexpr(config.shape.row_groups):
            if has_rows(ops, tile, group):
                row = ops.data[tile.expert, tile.row_tile + group, None]
                address = row.iterator.toint() + Int64(step) * config.weight_bytes
                slot = full.stage(use) * config.shape.row_groups + group
                target = shared.weights + slot * config.weight_bytes
                tma.bulk_load(target, address, size, full.barrier(use), "first")


@cute.jit
def find_rows(config: cutlass.Constexpr, ops, tile, warp, lane, rows: cute.Tensor):
    """rows (LOAD): addresses of the token rows that this lane loads its pieces of, at its piece of a step."""
    for i in cutlass.range_constexpr(config.loads):
        row = row_of(config, warp, lane, i)
        source = cutlass.min(tile.first + row, tile.first + tile.count - 1)
        if cutlass.const_expr(config.gathers):
            source = Int32(ops.source[source]) // ops.choices
        rows[i] = ops.tokens[source, None].iterator.toint() + Int64(lane % ROW_VECTORS * VECTOR_BYTES)


def row_of(config, warp, lane, i: int) -> Int32:
    """Which row of the tile a lane loads in pass i."""
    return (i * config.shape.load_warps + warp) * PASS_ROWS + lane // ROW_VECTORS


@cute.jit
def load_tokens(config: cutlass.Constexpr, shared, ops, tile, step, use, warp, lane, rows: cute.Tensor):
    """The lane's pieces of a step's tokens, where the 128-byte swizzle puts them. Rows past the tile's stay as they
    are: no other column of the product depends on them."""
    vector = lane % ROW_VECTORS
    chunk, piece = vector // CHUNK_VECTORS, vector % CHUNK_VECTORS
    base = shared.tokens.toint() + use % config.shape.stages * config.token_bytes
    base += chunk * (config.token_bytes // STEP_CHUNKS)
    present = Boolean(step * STEP_CHUNKS + chunk < ops.chunks)
    for i in cutlass.range_constexpr(config.loads):
        row = row_of(config, warp, lane, i)
        if present & (row < tile.count):
            target = base + row * tma.ROW_BYTES + (piece ^ (row % 8)) * VECTOR_BYTES
            copy_vector(target, rows[i] + Int64(step) * (STEP * ELEMENT_BYTES))


def copy_vector(target, address) -> None:
    """16 bytes from global to shared memory, in the thread's next group of copies, past L1."""
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {VECTOR_BYTES};",
        read_only_args=[Int32(target), address],
    )


assert BFloat16.width // 8 == ELEMENT_BYTES
