"""Products of a tile: 64 features of the weights, from the ring and decoded in registers, times its tokens, by
wgmma."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.device.wgmma import flat, multiply
from warpspec.common.hardware import QUAD, WARPGROUP_ROWS, WORD_BYTES
from warpspec.common.nvfp4 import NVFP4_BLOCK
from warpspec.moe.sm90.decode import decode_chunk
from warpspec.moe.sm90.tiles import stage_count
from warpspec.moe.streamed import CHUNK, CHUNK_BYTES, STEP_CHUNKS, VECTOR_WORDS

ONE_WARPGROUP = (1, 1, 1)


def make_mma(width: int) -> cute.TiledMma:
    """D [64, N] += A [64, K] B [N, K]^T with N = width: A from registers, B from shared memory, K contiguous."""
    major, tile = OperandMajorMode.K, (WARPGROUP_ROWS, width)
    return hopper.make_trivial_tiled_mma(
        BFloat16, BFloat16, major, major, Float32, ONE_WARPGROUP, tile, warpgroup.OperandSource.RMEM
    )


def token_chunks(config, width: int, base) -> cute.Tensor:
    """(MMA, MMA_N, MMA_K, CHUNK): descriptors of the chunks of all stages, for the first ``width`` tokens of each."""
    chunks = config.stage_chunks * config.shape.stages
    one = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (WARPGROUP_ROWS, width, CHUNK), BFloat16, 1)
    rows, columns, _ = one.outer.shape
    strides = (*one.outer.stride[:2], config.shape.tokens * CHUNK)
    outer = cute.make_layout((rows, columns, chunks), stride=strides)
    shared = cute.make_tensor(cute.recast_ptr(base, one.inner, dtype=BFloat16), outer)
    mma = make_mma(width)
    return mma.make_fragment_B(mma.get_slice(0).partition_B(shared))


@cute.jit
def add_products(
    config: cutlass.Constexpr,
    width: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared,
    ops,
    group,
    thread,
    use,
    sums: cutlass.Constexpr,
):
    """One consumer computes a tile's products. use: ring use count of its first stage. sums: fragments of ``width``
    tokens, one for each row group. Two chunks are in registers: one is decoded while the products of the other run."""
    tall, chunks, empty = config.shape.tall, config.stage_chunks, channels["empty"]
    tokens = token_chunks(config, width, shared.tokens)
    weights = [make_weights(width) for _ in range(2)]
    whole, stages = ops.chunks // chunks, stage_count(config, ops)
    for stage in cutlass.range(whole, unroll=1):
        await_stage(channels, use + stage)
        words = [stage_words(config, shared, group + i, thread, use + stage, chunks) for i in range(tall)]
        for unit in cutlass.range_constexpr(chunks * tall):
            warpgroup.wait_group(1)
            if cutlass.const_expr(unit == 1):  # noqa: SIM102
                if stage >= 1:
                    empty.arrive_warp(use + stage - 1)
            chunk, i = unit // tall, unit % tall
            decode(words[i], chunk, weights[unit % 2])
            issue(config, width, sums[i], weights[unit % 2], tokens, use + stage, chunk)
    # If the last stage is partial, the stage before it is still to be released as well.
    left = cutlass.max(stages - 1, 0)
    if whole < stages:
        await_stage(channels, use + whole)
        most = chunks - 1
        words = [stage_words(config, shared, group + i, thread, use + whole, most) for i in range(tall)]
        for unit in cutlass.range_constexpr(most * tall):
            chunk, i = unit // tall, unit % tall
            if chunk < ops.chunks % chunks:
                warpgroup.wait_group(1)
                decode(words[i], chunk, weights[unit % 2])
                issue(config, width, sums[i], weights[unit % 2], tokens, use + whole, chunk)
        left = cutlass.max(whole - 1, 0)
    warpgroup.wait_group(0)
    cute.arch.fence_view_async_shared()
    for stage in cutlass.range(left, stages, unroll=1):
        empty.arrive_warp(use + stage)


def make_weights(width: int) -> cute.Tensor:
    """Registers for the fragments of a chunk."""
    return cute.make_rmem_tensor(make_mma(width).partition_shape_A((WARPGROUP_ROWS, CHUNK)), BFloat16)


def await_stage(channels, use) -> None:
    """Wait for a stage. The fence makes it visible to wgmma, and lets what was read before be overwritten."""
    channels["full"].wait(use)
    cute.arch.fence_view_async_shared()


def decode(words: tuple, chunk: int, weights: cute.Tensor) -> None:
    """Decode a chunk to fragments. words: from ``stage_words``."""
    codes, scales = words
    out = cute.recast_tensor(flat(weights), Uint32)
    decode_chunk(codes[chunk], scales[chunk // STEP_CHUNKS], chunk % STEP_CHUNKS, out)


def issue(config, width: int, sums, weights, tokens, use, chunk: int) -> None:
    """Issue a chunk's products."""
    b = tokens[None, None, None, use % config.shape.stages * config.stage_chunks + chunk]
    multiply(make_mma(width), sums, weights, b, True)


def stage_words(config, shared, group, thread, use, chunks: int) -> tuple[list, list]:
    """Load (codes of each chunk, (VECTOR_WORDS); a word of scales of its rows for each step) to registers."""
    place = use % config.shape.stages * config.shape.row_groups + group
    base = (shared.weights + place * config.weight_bytes).align(VECTOR_WORDS * WORD_BYTES)
    words = cute.make_tensor(
        cute.recast_ptr(base, dtype=Uint32), cute.make_layout(config.weight_bytes // WORD_BYTES)
    )
    vectors = cute.zipped_divide(words, (VECTOR_WORDS,))
    scale_word = thread if config.block == NVFP4_BLOCK else thread // (config.block // NVFP4_BLOCK)
    step_words = config.step_bytes // WORD_BYTES
    first = config.scale_bytes // WORD_BYTES // VECTOR_WORDS
    scales = [words[step * step_words + scale_word] for step in range(-(-chunks // STEP_CHUNKS))]
    codes = []
    for chunk in range(chunks):
        at = chunk // STEP_CHUNKS * (step_words // VECTOR_WORDS) + first
        at += chunk % STEP_CHUNKS * (CHUNK_BYTES // WORD_BYTES // VECTOR_WORDS)
        own = cute.make_rmem_tensor(VECTOR_WORDS, Uint32)
        cute.autovec_copy(vectors[None, at + thread], own)
        codes.append(own)
    return codes, scales


assert NVFP4_BLOCK == CHUNK // QUAD
