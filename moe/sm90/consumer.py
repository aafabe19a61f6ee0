"""A consumer: weights of 64 features from the ring, decoded in registers, times the tile's tokens on wgmma."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.hardware import QUAD, WARPGROUP_ROWS
from warpspec.common.nvfp4 import BLOCK
from warpspec.common.wgmma import flat, multiply
from warpspec.moe.sm90.decode import decode_chunk
from warpspec.moe.sm90.epilogue import store, terms_of
from warpspec.moe.sm90.tiles import has_rows, tile_at, tile_count
from warpspec.moe.streamed import CHUNK, CHUNK_BYTES, STEP_CHUNKS, VECTOR_WORDS, WORD_BYTES

ONE_WARPGROUP = (1, 1, 1)


def make_mma(config) -> cute.TiledMma:
    """D [64, N] += A [64, K] B [N, K]^T: A from registers, B from shared memory, K contiguous."""
    major, tile = OperandMajorMode.K, (WARPGROUP_ROWS, config.shape.tokens)
    return hopper.make_trivial_tiled_mma(
        BFloat16, BFloat16, major, major, Float32, ONE_WARPGROUP, tile, warpgroup.OperandSource.RMEM
    )


def token_chunks(config, base) -> cute.Tensor:
    """(MMA, MMA_N, MMA_K, CHUNK): descriptors of all stages' chunks, two a stage."""
    tiler = (WARPGROUP_ROWS, config.shape.tokens, CHUNK)
    chunks = STEP_CHUNKS * config.shape.stages
    layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, BFloat16, chunks)
    shared = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=BFloat16), layout.outer)
    mma = make_mma(config)
    return mma.make_fragment_B(mma.get_slice(0).partition_B(shared))


@cute.jit
def consume(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, ops, group, thread):
    """One consumer: its 64 features of all tiles of the CTA. thread: 0..127 of it.

    Consumes full. Produces empty, one arrival a warp, when the products of the stage are done. Two chunks are in
    registers: one is decoded while the products of the other run.
    """
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    mma, tokens = make_mma(config), token_chunks(config, shared.tokens)
    sums = cute.make_rmem_tensor(mma.partition_shape_C((WARPGROUP_ROWS, config.shape.tokens)), Float32)
    chunk_shape = mma.partition_shape_A((WARPGROUP_ROWS, CHUNK))
    weights = [cute.make_rmem_tensor(chunk_shape, BFloat16) for _ in range(STEP_CHUNKS)]
    whole, use = ops.chunks // STEP_CHUNKS, Int32(0)
    steps = Int32(cute.ceil_div(ops.chunks, STEP_CHUNKS))
    for index in cutlass.range(cta, tile_count(config, ops), ctas, unroll=1):
        tile = tile_at(config, ops, index)
        if has_rows(ops, tile, group):
            terms = terms_of(config, ops, tile, group, thread)
            for step in cutlass.range(whole, unroll=1):
                channels["full"].wait(use + step)
                scales = scales_of(config, shared, group, thread, use + step)
                for chunk in cutlass.range_constexpr(STEP_CHUNKS):
                    words = words_of(config, shared, group, thread, use + step, chunk)
                    warpgroup.wait_group(1)
                    if cutlass.const_expr(chunk == 1):  # noqa: SIM102
                        if step > 0:
                            release(channels, use + step - 1)
                    issue(config, sums, weights[chunk], tokens, words, scales, use + step, chunk, step)
            if whole < steps:
                last = use + whole
                channels["full"].wait(last)
                scales = scales_of(config, shared, group, thread, last)
                words = words_of(config, shared, group, thread, last, 0)
                warpgroup.wait_group(1)
                issue(config, sums, weights[0], tokens, words, scales, last, 0, whole)
            warpgroup.wait_group(0)
            for left in cutlass.range(cutlass.max(whole - 1, 0), steps, unroll=1):
                release(channels, use + left)
            store(config, ops, tile, group, thread, flat(sums), terms)
        else:
            for step in cutlass.range(steps, unroll=1):
                channels["full"].wait(use + step)
                release(channels, use + step)
        use += steps


def release(channels, use) -> None:
    """The warp has read a stage, and the copy engine may write it."""
    cute.arch.fence_view_async_shared()
    channels["empty"].arrive_warp(use)


def issue(config, sums, weights, tokens, words, scales, use, chunk: int, step) -> None:
    """Decode a chunk and issue its products; the first of a tile does not accumulate."""
    decode_chunk(words, scales, chunk, cute.recast_tensor(flat(weights), Uint32))
    b = tokens[None, None, None, use % config.shape.stages * STEP_CHUNKS + chunk]
    multiply(make_mma(config), sums, weights, b, Boolean(step > 0) if chunk == 0 else True)


def stage_of(config, shared, group, use) -> cute.Pointer:
    """The row group's weights of a stage."""
    slot = use % config.shape.stages * config.shape.row_groups + group
    return shared.weights + slot * config.weight_bytes


def scales_of(config, shared, group, thread, use) -> Uint32:
    """The scales of the thread's rows, both chunks."""
    word = thread if config.block == BLOCK else thread // (config.block // BLOCK)
    base = cute.recast_ptr(
        stage_of(config, shared, group, use).align(VECTOR_WORDS * WORD_BYTES), dtype=Uint32
    )
    return cute.make_tensor(base, cute.make_layout(config.scale_bytes // WORD_BYTES))[word]


def words_of(config, shared, group, thread, use, chunk: int) -> cute.Tensor:
    """(VECTOR_WORDS): the thread's codes of a chunk, in registers."""
    base = stage_of(config, shared, group, use) + config.scale_bytes + chunk * CHUNK_BYTES
    base = cute.recast_ptr(base.align(VECTOR_WORDS * WORD_BYTES), dtype=Uint32)
    vectors = cute.make_tensor(
        base, cute.make_layout((VECTOR_WORDS, CHUNK_BYTES // WORD_BYTES // VECTOR_WORDS))
    )
    words = cute.make_rmem_tensor(VECTOR_WORDS, Uint32)
    cute.autovec_copy(vectors[None, thread], words)
    return words


assert BLOCK == CHUNK // QUAD
