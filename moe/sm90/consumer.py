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
from warpspec.moe.sm90.tiles import has_rows, stage_count, tile_at, tile_count
from warpspec.moe.streamed import CHUNK, CHUNK_BYTES, STEP_CHUNKS, VECTOR_WORDS, WORD_BYTES

ONE_WARPGROUP = (1, 1, 1)
FIRST_JOIN_BARRIER = 1  # named barriers, one a row group


def make_mma(width: int) -> cute.TiledMma:
    """D [64, N] += A [64, K] B [N, K]^T of so many tokens: A from registers, B from shared memory, K contiguous."""
    major, tile = OperandMajorMode.K, (WARPGROUP_ROWS, width)
    return hopper.make_trivial_tiled_mma(
        BFloat16, BFloat16, major, major, Float32, ONE_WARPGROUP, tile, warpgroup.OperandSource.RMEM
    )


def token_chunks(config, width: int, base) -> cute.Tensor:
    """(MMA, MMA_N, MMA_K, CHUNK): descriptors of all stages' chunks, the first tokens of each."""
    chunks = config.stage_chunks * config.shape.stages
    one = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (WARPGROUP_ROWS, width, CHUNK), BFloat16, 1)
    rows, columns, _ = one.outer.shape
    strides = (*one.outer.stride[:2], config.shape.tokens * CHUNK)
    outer = cute.make_layout((rows, columns, chunks), stride=strides)
    shared = cute.make_tensor(cute.recast_ptr(base, one.inner, dtype=BFloat16), outer)
    mma = make_mma(width)
    return mma.make_fragment_B(mma.get_slice(0).partition_B(shared))


@cute.jit
def consume(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, ops, group, split, thread):
    """One consumer: the stages split, split + splits, ... of the row groups from ``group`` on, of all tiles of the CTA.
    thread: 0..127 of it.

    Consumes full; the fence behind it lets wgmma read what the load warps' copies wrote, and the copy engine write what
    was read before. Produces empty, one arrival a warp, when the products of a stage are done. Two chunks are in
    registers: one is decoded while the products of the other run.
    """
    use = Int32(0)
    for number in cutlass.range_constexpr(len(config.widths)):
        use = consume_class(config, number, channels, shared, ops, group, split, thread, use)


@cute.jit
def consume_class(
    config: cutlass.Constexpr,
    number: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared,
    ops,
    group,
    split,
    thread,
    use,
) -> Int32:
    """The tiles of one class of entries. use: of the CTA's first stage of them; of the next class's is returned."""
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    width, splits, tall = config.widths[number], config.shape.splits, config.shape.tall
    mma = make_mma(width)
    sums_shape = mma.partition_shape_C((WARPGROUP_ROWS, width))
    sums = [cute.make_rmem_tensor(sums_shape, Float32) for _ in range(tall)]
    chunk_shape = mma.partition_shape_A((WARPGROUP_ROWS, CHUNK))
    weights = [cute.make_rmem_tensor(chunk_shape, BFloat16) for _ in range(2)]
    stages, first = stage_count(config, ops), cta
    if cutlass.const_expr(number > 0):
        before = cutlass.max(tile_count(config, ops, number - 1) - cta, 0)
        first = cta + cute.ceil_div(before, ctas) * ctas
    for index in cutlass.range(first, tile_count(config, ops, number), ctas, unroll=1):
        tile = tile_at(config, ops, index)
        if has_rows(ops, tile, group):
            terms = [terms_of(config, ops, tile, group + i, thread) for i in range(tall)]
            for i in cutlass.range_constexpr(tall):
                sums[i].fill(0.0)
            add_products(config, width, channels, shared, ops, group, split, thread, use, sums, weights)
            if cutlass.const_expr(splits > 1):
                join(config, shared, group, split, thread, flat(sums[0]))
            if split == 0:
                for i in cutlass.range_constexpr(tall):
                    store(config, width, ops, tile, group + i, thread, flat(sums[i]), terms[i])
        else:
            for stage in cutlass.range(split, stages, splits, unroll=1):
                await_stage(channels, use + stage)
                channels["empty"].arrive_warp(use + stage)
        use += stages
    return use


@cute.jit
def add_products(
    config: cutlass.Constexpr,
    width: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared,
    ops,
    group,
    split,
    thread,
    use,
    sums: cutlass.Constexpr,
    weights: cutlass.Constexpr,
):
    """A tile's products. use: of its first stage. sums: of each row group, fragments of ``width`` tokens. weights: of two
    chunks."""
    splits, tall, chunks, empty = (
        config.shape.splits,
        config.shape.tall,
        config.stage_chunks,
        channels["empty"],
    )
    tokens = token_chunks(config, width, shared.tokens)
    whole, stages = ops.chunks // chunks, stage_count(config, ops)
    for stage in cutlass.range(split, whole, splits, unroll=1):
        await_stage(channels, use + stage)
        words = [stage_words(config, shared, group + i, thread, use + stage, chunks) for i in range(tall)]
        for unit in cutlass.range_constexpr(chunks * tall):
            warpgroup.wait_group(1)
            if cutlass.const_expr(unit == 1):  # noqa: SIM102
                if stage >= splits:
                    empty.arrive_warp(use + stage - splits)
            chunk, i = unit // tall, unit % tall
            issue(config, width, sums[i], weights[unit % 2], tokens, words[i], use + stage, chunk)
    # The split's last stage; where that is a part of one, also the one before.
    left = cutlass.max(stages - splits, 0)
    left += (split + left * (splits - 1)) % splits
    if (whole < stages) & (whole % splits == split):
        await_stage(channels, use + whole)
        most = chunks - 1
        words = [stage_words(config, shared, group + i, thread, use + whole, most) for i in range(tall)]
        for unit in cutlass.range_constexpr(most * tall):
            chunk, i = unit // tall, unit % tall
            if chunk < ops.chunks % chunks:
                warpgroup.wait_group(1)
                issue(config, width, sums[i], weights[unit % 2], tokens, words[i], use + whole, chunk)
        left = cutlass.max(whole - splits, split)
    warpgroup.wait_group(0)
    cute.arch.fence_view_async_shared()
    for stage in cutlass.range(left, stages, splits, unroll=1):
        empty.arrive_warp(use + stage)


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


def issue(config, width: int, sums, weights, tokens, words, use, chunk: int) -> None:
    """Decode a chunk and issue its products. words: what ``stage_words`` gave."""
    codes, scales = words
    out = cute.recast_tensor(flat(weights), Uint32)
    decode_chunk(codes[chunk], scales[chunk // STEP_CHUNKS], chunk % STEP_CHUNKS, out)
    b = tokens[None, None, None, use % config.shape.stages * config.stage_chunks + chunk]
    multiply(make_mma(width), sums, weights, b, True)


def stage_words(config, shared, group, thread, use, chunks: int) -> tuple[list, list]:
    """(codes of each chunk, (VECTOR_WORDS); the scales of its rows, a word for each step), in registers."""
    slot = use % config.shape.stages * config.shape.row_groups + group
    base = (shared.weights + slot * config.weight_bytes).align(VECTOR_WORDS * WORD_BYTES)
    words = cute.make_tensor(
        cute.recast_ptr(base, dtype=Uint32), cute.make_layout(config.weight_bytes // WORD_BYTES)
    )
    vectors = cute.zipped_divide(words, (VECTOR_WORDS,))
    scale_word = thread if config.block == BLOCK else thread // (config.block // BLOCK)
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


assert BLOCK == CHUNK // QUAD
