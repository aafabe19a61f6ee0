"""The grouped output projection on sm_90a: one load warp, one or two consumers of 64 tokens each; persistent.

A tile is 64 or 128 tokens by ``tile_n`` columns of one group. In FP8 a stage's products sum 128 numbers, which share a
scale. A consumer scales them and adds them up in fp32 while the other consumer uses the tensor core.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.device import tma
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.device.wgmma import (
    COLUMNS,
    PAIR,
    QUAD,
    ROW_DISTANCE,
    THREAD_ROWS,
    WARP_ROWS,
    WARPGROUP_ROWS,
    flat,
    transpose,
)
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.latent.projection.config import PRODUCER_REGISTERS, Sm90Config
from warpspec.latent.projection.device import (
    SCALE_COLUMNS,
    ProjectionHost,
    element,
    load,
    projection_arguments,
    tile_at,
)

VECTOR = 8  # bf16 numbers of one 16-byte store


class Projection(ProjectionHost):
    """The kernel of one ``Sm90Config``."""

    @cute.kernel
    def kernel(self, atoms, coordinates, a_scales, b_scales, out, work):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        load_warp = config.consumers * WARPGROUP_THREADS // WARP_THREADS
        if warp == load_warp:
            for atom in atoms:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        bases = (storage.a.data_ptr(), storage.b.data_ptr())
        if warp >= load_warp:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == load_warp:
                load(config, channels, bases, atoms, coordinates, out, work)
        else:
            cute.arch.setmaxregister_increase(config.consumer_registers)
            consumer = warp // (WARPGROUP_THREADS // WARP_THREADS)
            for each in cutlass.range_constexpr(config.consumers):
                if consumer == each:
                    consume(config, channels, bases, (a_scales, b_scales), out, work, each)


@cute.jit
def consume(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    bases,
    scales,
    out,
    work,
    number: cutlass.Constexpr,
):
    """One consumer: 64 tokens of every tile of the CTA. Consumes full; produces empty, one arrival a warp."""
    dtype = element(config)
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    mma, a, b, scores = product(config, bases, dtype, number)
    total = flat(scores)
    if cutlass.const_expr(config.float8):
        total = cute.make_rmem_tensor(cute.size(scores), Float32)
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    lane = thread % WARP_THREADS
    own_row = number * WARPGROUP_ROWS + thread // WARP_THREADS * WARP_ROWS + lane // QUAD
    use = Int32(0)
    for index in cutlass.range(cta, work.tiles, ctas, unroll=1):
        first, group, column = tile_at(config, out, work.m_tiles, index)
        rows = [first + own_row + r * ROW_DISTANCE for r in range(THREAD_ROWS)]
        operands = (mma, a, b, scores, total)
        if cutlass.const_expr(config.float8):
            add_scaled(config, channels, operands, scales, rows, (group, column), use, work.blocks)
        else:
            add(config, channels, operands, use, work.blocks)
        use += work.blocks
        tile = cute.local_tile(out[None, group, None], (1, config.tile_n), (None, column))  # (1, N, TOKEN)
        for r in cutlass.range_constexpr(THREAD_ROWS):
            store_row(
                total,
                r,
                lane % QUAD,
                tile[0, None, cutlass.min(rows[r], out.shape[0] - 1)],
                rows[r] < out.shape[0],
            )


def product(config, bases, dtype, number) -> tuple:
    """(mma, a, b, scores): a consumer's product, its operands' descriptors (MMA, MMA_MN, MMA_K, STAGE), its
    registers."""
    major = OperandMajorMode.K
    shape = (WARPGROUP_ROWS, config.tile_n)
    mma = hopper.make_trivial_tiled_mma(dtype, dtype, major, major, Float32, (1, 1, 1), shape)
    tiler = (*shape, config.stage_depth)
    layouts = (
        hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, dtype, config.stages),
        hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, dtype, config.stages),
    )
    own = (bases[0] + number * config.stages * config.a_bytes).align(tma.TILE_ALIGNMENT)
    a, b = (
        cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=dtype), layout.outer)
        for base, layout in zip((own, bases[1]), layouts, strict=True)
    )
    piece = mma.get_slice(0)
    scores = cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)
    return mma, mma.make_fragment_A(piece.partition_A(a)), mma.make_fragment_B(piece.partition_B(b)), scores


@cute.jit
def add(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands: cutlass.Constexpr, use, blocks):
    """Add up the products of all blocks of K in the tensor core, with two stages in flight."""
    for block in cutlass.range(blocks, unroll=1):
        multiply(config, channels, operands, use + block, Boolean(block > 0))
        if block > 0:
            warpgroup.wait_group(1)
            channels["empty"].arrive_warp(use + block - 1)
    warpgroup.wait_group(0)
    channels["empty"].arrive_warp(use + blocks - 1)


@cute.jit
def add_scaled(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    scales,
    rows: cutlass.Constexpr,
    at,
    use,
    blocks,
):
    """Multiply the products of each block of K by the scales of its rows and columns, and add them up in fp32."""
    _, _, _, scores, total = operands
    a_scales, b_scales = scales
    group, column = at
    total.fill(0.0)
    added = flat(scores)
    row_scales = [a_scales[cutlass.min(row, a_scales.shape[0] - 1), group, None] for row in rows]
    column_scales = b_scales[group, column * config.tile_n // SCALE_COLUMNS, None]
    for block in cutlass.range(blocks, unroll=1):
        factors = [row_scale[block] * column_scales[block] for row_scale in row_scales]
        multiply(config, channels, operands, use + block, False)
        warpgroup.wait_group(0)
        channels["empty"].arrive_warp(use + block)
        for i in cutlass.range_constexpr(cute.size(added)):
            total[i] = total[i] + added[i] * factors[i // PAIR % THREAD_ROWS]


@cute.jit
def multiply(
    config: cutlass.Constexpr, channels: cutlass.Constexpr, operands: cutlass.Constexpr, use, accumulate
):
    """Issue one stage's products as one group, once the stage is full."""
    mma, a, b, scores, _ = operands
    channels["full"].wait(use)
    stage = use % config.stages
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, True if k > 0 else accumulate)
        cute.gemm(mma, scores, a[None, None, k, stage], b[None, None, k, stage], scores)
    warpgroup.commit_group()


@cute.jit
def store_row(total: cute.Tensor, r: cutlass.Constexpr, member, target: cute.Tensor, in_range):
    """Store row r of the thread as bf16 to target (N).

    The quad exchanges words so that a thread stores 8 columns at once.
    """
    blocks = target.shape[0] // COLUMNS
    words = []
    for block in cutlass.range_constexpr(blocks):
        pair = cute.make_rmem_tensor(PAIR, BFloat16)
        for i in cutlass.range_constexpr(PAIR):
            pair[i] = total[(block * THREAD_ROWS + r) * PAIR + i].to(BFloat16)
        words.append(cute.recast_tensor(pair, Int32)[0])
    for start in cutlass.range_constexpr(0, blocks, QUAD):
        moved = transpose(words[start : start + QUAD], member)
        if in_range:
            vector = cute.make_rmem_tensor(QUAD, Int32)
            for i in cutlass.range_constexpr(QUAD):
                vector[i] = moved[i]
            cute.autovec_copy(
                cute.recast_tensor(vector, BFloat16), cute.local_tile(target, (VECTOR,), (start + member,))
            )


def host_and_arguments(config: Sm90Config) -> tuple:
    """The host function and its arguments without the stream."""
    return projection_arguments(Projection, config)
