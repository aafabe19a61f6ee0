"""The load warps: load a stage's weights by one bulk copy a row group, and its tokens by copies of 16 bytes a lane."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Int32, Int64, Uint32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import drain
from warpspec.common.hardware import BF16_BYTES, QUAD, VECTOR_BYTES, WARP_THREADS, WORD_BYTES
from warpspec.moe.sm90.config import STEP_ROW_BYTES
from warpspec.moe.sm90.tiles import has_rows, stage_count, tile_at, tile_count
from warpspec.moe.streamed import CHUNK_BYTES, STEP_CHUNKS

CHUNK_VECTORS = tma.ROW_BYTES // VECTOR_BYTES  # 16-byte vectors of a token in a chunk: a span of the swizzle
SWIZZLE_ROWS = 8  # after which the swizzle repeats
WORD_ELEMENTS = WORD_BYTES // BF16_BYTES


@cute.jit
def load(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, ops, warp):
    """One load warp; warp 0 loads the weights too.

    Produces full. Its arrivals are that of warp 0, with the weights' bytes, and one of every thread, which happens by
    itself when the thread's copies of tokens are done. Consumes empty.
    """
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    lane = cute.arch.lane_idx()
    stages, use, ahead = stage_count(config, ops), Int32(0), Int32(0)
    next_tile = tile_at(config, ops, cta)  # read before it is known to exist, to wait once, not twice
    total = tile_count(config, ops)
    if cutlass.const_expr(config.early):
        if (cta < total) & (warp == 0):
            ahead = cutlass.min(stages, config.shape.stages)
            for number in cutlass.range(ahead, unroll=1):
                load_weights(config, channels, shared, ops, next_tile, number, number)
        cute.arch.griddepcontrol_wait()
    for index in cutlass.range(cta, total, ctas, unroll=1):
        tile = next_tile
        if index + ctas < total:
            next_tile = tile_at(config, ops, index + ctas)
        rows = find_rows(config, ops, tile, warp, lane)
        for number in cutlass.range(stages, unroll=1):
            if use >= ahead:
                channels["empty"].wait_previous(use)
                if warp == 0:
                    load_weights(config, channels, shared, ops, tile, number, use)
            if cutlass.const_expr(config.first):
                load_words(config, shared, ops, tile, number, use, warp, lane, rows)
            else:
                load_tokens(config, shared, ops, tile, number, use, warp, lane, rows)
            cute.arch.cp_async_mbarrier_arrive_noinc(channels["full"].barrier(use))
            use += 1
    drain((channels["empty"],), use)


@cute.jit
def load_weights(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, ops, tile, number, use):
    """Load stage ``number`` of the tile: the steps of every row group, one after another; the last may lack some."""
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
                place = full.stage(use) * config.shape.row_groups + group
                target = shared.weights + place * config.weight_bytes
                tma.bulk_load(target, address, size, full.barrier(use), "first")


@cute.jit
def find_rows(config: cutlass.Constexpr, ops, tile, warp, lane) -> cute.Tensor:
    """(n): where the rows of activations begin that this lane loads, one for each of its instructions.

    They are counted in vectors, so that 32 bits are enough for large tensors.
    """
    found = cute.make_rmem_tensor(config.shape.tokens // rows_of_all(config), Uint32)
    pitch = Uint32(ops.tokens.stride[0]) // (VECTOR_BYTES // BF16_BYTES)
    for i in cutlass.range_constexpr(cute.size(found)):
        row = tile.first + cutlass.min(
            first_row(config, warp, lane) + i * rows_of_all(config), tile.count - 1
        )
        if cutlass.const_expr(config.first):
            row = tile.first // config.routing.taken  # the tile's only one
        elif cutlass.const_expr(config.gathers):
            row = Int32(ops.source[row]) // config.choices
        found[i] = Uint32(row) * pitch
    return found


def first_row(config, warp, lane) -> Int32:
    """Row of the tile that the lane's first instruction loads; the next rows are ``rows_of_all`` apart."""
    at_once = rows_at_once(config)
    return warp * at_once + lane // (WARP_THREADS // at_once)


def rows_at_once(config) -> int:
    """Rows that one instruction of a warp loads."""
    return WARP_THREADS * VECTOR_BYTES // config.row_bytes


def rows_of_all(config) -> int:
    """Rows that one instruction of all load warps loads: a power of two."""
    return rows_at_once(config) * config.shape.load_warps


@cute.jit
def load_tokens(config: cutlass.Constexpr, shared, ops, tile, number, use, warp, lane, rows: cute.Tensor):
    """Load a stage of the tile's rows, 16 bytes a lane and instruction, to where the 128-byte swizzle puts them.

    Rows past the tile's last keep old contents, which reach no other column of the product.
    """
    vector = lane % (WARP_THREADS // rows_at_once(config))
    chunk, place = vector // CHUNK_VECTORS, vector % CHUNK_VECTORS
    first, step = first_row(config, warp, lane), rows_of_all(config)
    base = Int32(shared.tokens.toint()) + use % config.shape.stages * config.token_bytes
    base += chunk * (config.token_bytes // config.stage_chunks)
    base += first * tma.ROW_BYTES + (place ^ (first % SWIZZLE_ROWS)) * VECTOR_BYTES
    address = ops.tokens.iterator.toint() + Int64(number * config.row_bytes + vector * VECTOR_BYTES)
    if number * config.stage_chunks + chunk < ops.chunks:
        for i in cutlass.range_constexpr(cute.size(rows)):
            # The bits in which a row's number differs from the first row's are none of those below ``step``.
            swizzled = base ^ (i * step % SWIZZLE_ROWS * VECTOR_BYTES)
            if first + i * step < tile.count:
                copy_vector(swizzled + i * step * tma.ROW_BYTES, rows[i], address)


@cute.jit
def load_words(config: cutlass.Constexpr, shared, ops, tile, number, use, warp, lane, rows: cute.Tensor):
    """Load a stage of the tile's only row from a token in its own order, with 0 after the token's end.

    Each 16 bytes in the kernel's order are four words that lie a block apart.
    """
    vector = lane % (WARP_THREADS // rows_at_once(config))
    chunk, place = vector // CHUNK_VECTORS, vector % CHUNK_VECTORS
    target = Int32(shared.tokens.toint()) + use % config.shape.stages * config.token_bytes
    target += chunk * (config.token_bytes // config.stage_chunks) + place * VECTOR_BYTES
    words = ops.tokens.shape[1] // WORD_ELEMENTS
    first = (number * config.stage_chunks + chunk) * CHUNK_VECTORS * QUAD + place
    address = ops.tokens.iterator.toint() + Int64(rows[0]) * VECTOR_BYTES
    behind = number * config.stage_chunks + chunk >= ops.chunks
    if (first_row(config, warp, lane) == 0) & (tile.count > 0) & (not behind):
        for q in cutlass.range_constexpr(QUAD):
            word = first + q * CHUNK_VECTORS
            present = Int32(cutlass.select_(Boolean(word < words), Int32(WORD_BYTES), Int32(0)))
            source = address + Int64(cutlass.min(word, words - 1)) * WORD_BYTES
            copy_word(target + q * WORD_BYTES, source, present)


def copy_word(target, address, present) -> None:
    """Copy 4 bytes to shared memory; only ``present`` of them, 4 or 0, are read, and the others are 0. A later arrival
    of the thread waits for the copy."""
    cute.arch.inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {WORD_BYTES}, {{$r2}};",
        read_only_args=[Int32(target), address, present],
    )


def copy_vector(target, vectors: Uint32, address) -> None:
    """Copy the 16 bytes that lie ``vectors`` vectors after the address to shared memory, bypassing L1.

    A later arrival of the thread waits for the copy. The address is computed by one instruction here, because keeping
    the addresses of all rows would take twice the registers.
    """
    cute.arch.inline_ptx(
        f"{{ .reg .u64 source; mad.wide.u32 source, {{$r1}}, {VECTOR_BYTES}, {{$r2}};"
        f" cp.async.cg.shared.global [{{$r0}}], [source], {VECTOR_BYTES}; }}",
        read_only_args=[Int32(target), vectors, address],
    )


assert BFloat16.width // 8 == BF16_BYTES and STEP_ROW_BYTES == STEP_CHUNKS * tma.ROW_BYTES
