"""A consumer: weights of 64 features from the ring, decoded in registers, times the tile's tokens on wgmma."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.hardware import QUAD, WARPGROUP_ROWS, WARPGROUP_THREADS
from warpspec.common.nvfp4 import BLOCK
from warpspec.common.wgmma import flat, multiply
from warpspec.moe.sm90.decode import decode_chunk
from warpspec.moe.sm90.epilogue import store, terms_of
from warpspec.moe.sm90.tiles import has_rows, tile_at, tile_count
from warpspec.moe.streamed import CHUNK, CHUNK_BYTES, STEP_CHUNKS, VECTOR_WORDS, WORD_BYTES

ONE_WARPGROUP = (1, 1, 1)
FIRST_JOIN_BARRIER = 1  # named barriers, one a row group


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
def consume(
    config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, ops, group, split, thread
):
    """One consumer: the steps split, split + splits, ... of 64 features of all tiles of the CTA. thread: 0..127 of it.

    Consumes full; the fence behind it lets wgmma read what the load warps' copies wrote, and the copy engine write what
    was read before. Produces empty, one arrival a warp, when the products of a stage are done. Two chunks are in
    registers: one is decoded while the products of the other run.
    """
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    splits = config.shape.splits
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
            sums.fill(0.0)
            for step in cutlass.range(split, whole, splits, unroll=1):
                await_stage(channels, use + step)
                scales = scales_of(config, shared, group, thread, use + step)
                for chunk in cutlass.range_constexpr(STEP_CHUNKS):
                    words = words_of(config, shared, group, thread, use + step, chunk)
                    warpgroup.wait_group(1)
                    if cutlass.const_expr(chunk == 1):  # noqa: SIM102
                        if step >= splits:
                            channels["empty"].arrive_warp(use + step - splits)
                    issue(config, sums, weights[chunk], tokens, words, scales, use + step, chunk)
            left = cutlass.max(steps - splits, 0)
            left += (split + left * (splits - 1)) % splits  # the split's last step; a half one, and the one before
            if (whole < steps) & (whole % splits == split):
                await_stage(channels, use + whole)
                scales = scales_of(config, shared, group, thread, use + whole)
                words = words_of(config, shared, group, thread, use + whole, 0)
                warpgroup.wait_group(1)
                issue(config, sums, weights[0], tokens, words, scales, use + whole, 0)
                left = cutlass.max(whole - splits, split)
            warpgroup.wait_group(0)
            cute.arch.fence_view_async_shared()
            for step in cutlass.range(left, steps, splits, unroll=1):
                channels["empty"].arrive_warp(use + step)
            if cutlass.const_expr(splits > 1):
                join(config, shared, group, split, thread, flat(sums))
            if split == 0:
                store(config, ops, tile, group, thread, flat(sums), terms)
        else:
            for step in cutlass.range(split, steps, splits, unroll=1):
                await_stage(channels, use + step)
                channels["empty"].arrive_warp(use + step)
        use += steps


def await_stage(channels, use) -> None:
    """The stage is here, for wgmma too; and what was read before may be written."""
    channels["full"].wait(use)
    cute.arch.fence_view_async_shared()


@cute.jit
def join(config: cutlass.Constexpr, shared, group, split, thread, sums: cute.Tensor):
    """The first split's sums (n) become the sum of all splits', in their order."""
    others, size = config.shape.splits - 1, cute.size(sums)
    slots = cute.make_layout((WARPGROUP_THREADS, size, others, config.shape.row_groups))
    region = cute.make_tensor(cute.recast_ptr(shared.sums, dtype=Float32), slots)
    threads = config.shape.splits * WARPGROUP_THREADS
    barrier = FIRST_JOIN_BARRIER + group
    if split > 0:
        for i in cutlass.range_constexpr(size):
            region[thread, i, split - 1, group] = sums[i]
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
    if split == 0:
        for other in cutlass.range_constexpr(others):
            for i in cutlass.range_constexpr(size):
                sums[i] += region[thread, i, other, group]
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def issue(config, sums, weights, tokens, words, scales, use, chunk: int) -> None:
    """Decode a chunk and issue its products."""
    decode_chunk(words, scales, chunk, cute.recast_tensor(flat(weights), Uint32))
    b = tokens[None, None, None, use % config.shape.stages * STEP_CHUNKS + chunk]
    multiply(make_mma(config), sums, weights, b, True)


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
