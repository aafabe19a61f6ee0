"""The grouped output projection on sm_100a: a load warp, an MMA warp, four epilogue warps; persistent.

There are two accumulators in tensor memory: one is read while the products are summed into the other. In bf16 an
accumulator holds a tile. In FP8 it holds one block of 128 along K, which the epilogue scales and adds up in registers,
as sm_90a's consumers do.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from warpspec.common.device import tmem
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.latent.projection.config import ACCUMULATORS, Sm100Config
from warpspec.latent.projection.device import (
    SCALE_COLUMNS,
    ProjectionHost,
    element,
    load,
    projection_arguments,
    tile_at,
)

VECTOR = 8  # bf16 numbers of one 16-byte store
READ_COLUMNS = 32  # columns of an accumulator read at a time


class Projection(ProjectionHost):
    """The kernel of one ``Sm100Config``."""

    @cute.kernel
    def kernel(self, atoms, coordinates, a_scales, b_scales, out, work):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        tmem.allocate(warp, config.tmem_columns, storage.tmem_address.data_ptr())
        if warp == config.load_warp:
            for atom in atoms:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        columns = tmem.base(storage.tmem_address.data_ptr())
        bases = (storage.a.data_ptr(), storage.b.data_ptr())
        if warp == config.load_warp:
            load(config, channels, bases, atoms, coordinates, out, work)
        elif warp == config.mma_warp:
            multiply_tiles(config, channels, fragments(config, bases, columns), work)
        else:
            finish_tiles(config, channels, columns, (a_scales, b_scales), out, work, thread)
            cute.arch.barrier(barrier_id=1, number_of_threads=config.epilogue_threads)
            tmem.free(warp, columns, config.tmem_columns)


def make_mma(config: Sm100Config) -> cute.TiledMma:
    """D [M, N] = A [M, K] B [N, K]^T, both operands in shared memory, K contiguous."""
    dtype, major = element(config), OperandMajorMode.K
    shape = (config.tile_m, config.tile_n)
    return blackwell.make_trivial_tiled_mma(dtype, dtype, major, major, Float32, tcgen05.CtaGroup.ONE, shape)


def fragments(config: Sm100Config, bases, columns) -> tuple:
    """(a, b, d): descriptors (MMA, MMA_MN, MMA_K, STAGE); tensor memory (MMA, MMA_M, MMA_N, ACCUMULATOR)."""
    mma, dtype = make_mma(config), element(config)
    mine = mma.get_slice(0)
    tiler = (config.tile_m, config.tile_n, config.stage_depth)
    layouts = (
        blackwell.make_smem_layout_a(mma, tiler, dtype, config.stages),
        blackwell.make_smem_layout_b(mma, tiler, dtype, config.stages),
    )
    a, b = (
        cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=dtype), layout.outer)
        for base, layout in zip(bases, layouts, strict=True)
    )
    layout = mine.make_fragment_C(mine.partition_shape_C(tiler[:2])).layout
    layout = cute.append(layout, cute.make_layout(ACCUMULATORS, stride=config.tile_n))
    return mine.make_fragment_A(a), mine.make_fragment_B(b), cute.make_tensor(columns, layout)


@cute.jit
def multiply_tiles(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands: cutlass.Constexpr, work):
    """The MMA warp. Consumes full and sum_empty.

    Produces empty by a commit after each stage, and sum_full by a commit after an accumulator's last stage.
    """
    a, b, d = operands
    mma = make_mma(config)
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    use, sums = Int32(0), Int32(0)
    for _ in cutlass.range(cta, work.tiles, ctas, unroll=1):
        for block in cutlass.range(work.blocks, unroll=1):
            begins, ends = Boolean(block == 0), Boolean(block == work.blocks - 1)
            if cutlass.const_expr(config.float8):
                begins, ends = Boolean(True), Boolean(True)
            if begins:
                channels["sum_empty"].wait_previous(sums)
            channels["full"].wait(use)
            tmem.fence_after_wait()
            stage = use % config.stages
            for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
                mma.set(tcgen05.Field.ACCUMULATE, True if k > 0 else begins == Boolean(False))
                total = d[None, None, None, sums % ACCUMULATORS]
                cute.gemm(mma, total, a[None, None, k, stage], b[None, None, k, stage], total)
            channels["empty"].commit_mma(use)
            use += 1
            if ends:
                channels["sum_full"].commit_mma(sums)
                sums += 1


@cute.jit
def finish_tiles(config: cutlass.Constexpr, channels: cutlass.Constexpr, columns, scales, out, work, thread):
    """An epilogue thread: its token in every tile of the CTA. Consumes sum_full; produces sum_empty."""
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    sums = Int32(0)
    for index in cutlass.range(cta, work.tiles, ctas, unroll=1):
        first, group, column = tile_at(config, out, work.m_tiles, index)
        token = first + thread
        inside = Boolean(token < out.shape[0])
        token = cutlass.min(token, out.shape[0] - 1)
        target = cute.local_tile(out[token, group, None], (config.tile_n,), (column,))
        if cutlass.const_expr(config.float8):
            total = cute.make_rmem_tensor(config.tile_n, Float32)
            total.fill(0.0)
            row_scales = scales[0][token, group, None]
            column_scales = scales[1][group, column * config.tile_n // SCALE_COLUMNS, None]
            for block in cutlass.range(work.blocks, unroll=1):
                factor = row_scales[block] * column_scales[block]
                channels["sum_full"].wait(sums)
                tmem.fence_after_wait()
                for part in cutlass.range_constexpr(config.tile_n // READ_COLUMNS):
                    read = read_part(config, columns, sums, part, thread)
                    for i in cutlass.range_constexpr(READ_COLUMNS):
                        at = part * READ_COLUMNS + i
                        total[at] = total[at] + read[i] * factor
                tmem.fence_before_arrive()
                channels["sum_empty"].arrive(sums)
                sums += 1
            for part in cutlass.range_constexpr(config.tile_n // READ_COLUMNS):
                store_part(
                    [total[part * READ_COLUMNS + i] for i in range(READ_COLUMNS)], target, part, inside
                )
        else:
            channels["sum_full"].wait(sums)
            tmem.fence_after_wait()
            for part in cutlass.range_constexpr(config.tile_n // READ_COLUMNS):
                read = read_part(config, columns, sums, part, thread)
                store_part([read[i] for i in range(READ_COLUMNS)], target, part, inside)
            tmem.fence_before_arrive()
            channels["sum_empty"].arrive(sums)
            sums += 1


def read_part(config, columns, sums, part: int, thread) -> cute.Tensor:
    """(READ_COLUMNS) fp32: the part-th columns of the thread's row of the accumulator."""
    read = cute.make_rmem_tensor(READ_COLUMNS, Float32)
    tmem.load_row(columns + (sums % ACCUMULATORS * config.tile_n + part * READ_COLUMNS), read, thread)
    tmem.wait_loads()
    return read


@cute.jit
def store_part(values: cutlass.Constexpr, target: cute.Tensor, part: cutlass.Constexpr, inside):
    """Store values as bf16 to the part-th READ_COLUMNS of target (N)."""
    if inside:
        for i in cutlass.range_constexpr(READ_COLUMNS // VECTOR):
            vector = cute.make_rmem_tensor(VECTOR, BFloat16)
            for j in cutlass.range_constexpr(VECTOR):
                vector[j] = values[i * VECTOR + j].to(BFloat16)
            at = part * (READ_COLUMNS // VECTOR) + i
            cute.autovec_copy(vector, cute.local_tile(target, (VECTOR,), (at,)))


def host_and_arguments(config: Sm100Config) -> tuple:
    """The host function and its arguments without the stream."""
    return projection_arguments(Projection, config)
