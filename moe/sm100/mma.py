"""The MMA warp: block-scaled products on tcgen05, kind mxf4nvf4, one e4m3 scale per 16 along K."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Boolean, Float4E2M1FN, Float8E4M3FN, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from warpspec.common.device import tmem
from warpspec.common.hardware import WARP_THREADS
from warpspec.common.nvfp4 import ATOM_BYTES, NVFP4_BLOCK
from warpspec.moe.sm100.config import ACCUMULATORS, K_STEPS, MMA_K, SCALE_COLUMNS


def make_tiled_mma(config) -> cute.TiledMma:
    """D [M, N] = A [M, K] B [N, K]^T, both K-major in shared memory, scales in tensor memory."""
    return blackwell.make_blockscaled_trivial_tiled_mma(
        Float4E2M1FN,
        Float4E2M1FN,
        OperandMajorMode.K,
        OperandMajorMode.K,
        Float8E4M3FN,
        NVFP4_BLOCK,
        tcgen05.CtaGroup.TWO if config.pair else tcgen05.CtaGroup.ONE,
        config.mma_tiler[:2],
    )


class Fragments(NamedTuple):
    """Operands of the MMA.

    a (MMA, MMA_M, MMA_K, STAGE), b (MMA, MMA_N, MMA_K, STAGE): descriptors of shared memory. d (MMA, MMA_M, MMA_N,
    ACCUMULATOR): tensor memory. columns: pointer to the first column of TMEM, fp32. token_scales, weight_scales: shared
    memory.
    """

    a: cute.Tensor
    b: cute.Tensor
    d: cute.Tensor
    columns: cute.Pointer
    token_scales: cute.Pointer
    weight_scales: cute.Pointer


def fragments(config, tokens, weights, token_scales, weight_scales, columns) -> Fragments:
    """Make the fragments in tensor memory and in regions of shared memory that are given by their first byte."""
    tiled_mma = make_tiled_mma(config)
    mine = tiled_mma.get_slice(0)
    a_base, b_base = (weights, tokens) if config.swapped else (tokens, weights)

    def shared(base, layout):
        return cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=Float4E2M1FN), layout.outer)

    a = shared(a_base, blackwell.make_smem_layout_a(tiled_mma, config.mma_tiler, Float4E2M1FN, config.stages))
    b = shared(b_base, blackwell.make_smem_layout_b(tiled_mma, config.mma_tiler, Float4E2M1FN, config.stages))
    layout = mine.make_fragment_C(mine.partition_shape_C(config.mma_tiler[:2])).layout
    layout = cute.append(layout, cute.make_layout(ACCUMULATORS, stride=config.accumulator_columns))
    return Fragments(
        mine.make_fragment_A(a),
        mine.make_fragment_B(b),
        cute.make_tensor(columns, layout),
        columns,
        token_scales,
        weight_scales,
    )


@cute.jit
def mma(
    config: cutlass.Constexpr, channels: cutlass.Constexpr, records, operands: cutlass.Constexpr, k, rank
):
    """For every tile record, sum over K into one of the accumulators while the epilogue reads the other.

    k: values along K. rank: this CTA's rank in its pair; only the first CTA's warp issues. tcgen05.cp copies scales to
    tensor memory in order with the MMAs before and after, so one buffer for them is enough. Consumes record_full, full
    and accumulator_empty. Produces, by one commit each, empty after a K tile and accumulator_full after the last.
    """
    full, empty = channels["full"], channels["empty"]
    tiled_mma = make_tiled_mma(config)
    k_steps = cute.ceil_div(k, MMA_K)
    use, fill = Int32(0), Int32(0)
    tile = records.read(use)
    while tile.rows > 0:
        if rank == 0:
            wait_for_accumulator(config, channels["accumulator_empty"], use)  # the fence below covers it too
            accumulator = operands.d[None, None, None, use % ACCUMULATORS]
            for k_tile in cutlass.range(cute.ceil_div(k_steps, K_STEPS), unroll=1):
                full.wait(fill)
                tmem.fence_after_wait()
                stage = full.stage(fill)
                copy_scales(config, operands, stage, tile.atom_row)
                steps = cutlass.min(k_steps - k_tile * K_STEPS, K_STEPS)
                multiply(config, tiled_mma, operands, accumulator, stage, tile, steps, k_tile > 0)
                empty.commit_mma(fill, pair=config.pair)
                fill += 1
            channels["accumulator_full"].commit_mma(use, pair=config.pair)
        use += 1
        tile = records.read(use)


@cute.jit
def wait_for_accumulator(config: cutlass.Constexpr, empty: cutlass.Constexpr, use):
    """Wait until the use-th tile may use its accumulator.

    The epilogue must have read the tile before the last; if accumulators overlap, also the columns that the last tile's
    accumulator shares with this one.
    """
    if cutlass.const_expr(config.overlap == 0):
        empty.wait_previous(use)
    elif use > 0:
        empty.wait(use - 1)


@cute.jit
def copy_scales(config: cutlass.Constexpr, operands: cutlass.Constexpr, stage, atom_row):
    """Copy a stage's scales to tensor memory.

    Tokens that begin in the middle of an atom (swapped only) start at lane 0.
    """
    with cute.arch.elect_one():
        tokens = operands.token_scales + stage * config.scale_bytes
        if cutlass.const_expr(config.swapped):
            tokens += atom_row % WARP_THREADS * tmem.SCALE_LINE_BYTES
        weights = operands.weight_scales + stage * config.scale_bytes
        for step in cutlass.range_constexpr(K_STEPS):
            column = operands.columns + config.tmem_token_scales + step * SCALE_COLUMNS
            tmem.copy_scale_atom(tokens + step * ATOM_BYTES, column, pair=config.pair)
            for atom in cutlass.range_constexpr(config.weight_atoms):
                column = operands.columns + weight_scale_column(config, step) + atom * SCALE_COLUMNS
                source = weights + (atom * K_STEPS + step) * ATOM_BYTES
                tmem.copy_scale_atom(source, column, pair=config.pair)


def weight_scale_column(config, step) -> int:
    """First column of a K step's weight scales; the atoms of its rows are adjacent."""
    return config.tmem_weight_scales + step * SCALE_COLUMNS * config.weight_atoms


@cute.jit
def multiply(
    config: cutlass.Constexpr,
    tiled_mma: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    accumulator,
    stage,
    tile,
    steps,
    accumulate,
):
    """Issue an MMA for every K step of a stage; the last stage of a problem may have fewer steps.

    The scales of an atom's rows from r on, r a multiple of 32, begin r / 32 columns after the atom's first column. Only
    tokens can begin within an atom, and only if they are N.
    """
    scales = []
    for step in cutlass.range_constexpr(K_STEPS):
        tokens = operands.columns + config.tmem_token_scales + step * SCALE_COLUMNS
        weights = operands.columns + weight_scale_column(config, step)
        if cutlass.const_expr(config.swapped):
            tokens += tile.atom_row // WARP_THREADS
        pair = (weights, tokens) if cutlass.const_expr(config.swapped) else (tokens, weights)
        scales.append(tuple(cute.recast_ptr(pointer, dtype=Float8E4M3FN) for pointer in pair))
    for step in cutlass.range_constexpr(K_STEPS):
        if step < steps:
            tiled_mma.set(tcgen05.Field.ACCUMULATE, Boolean(accumulate) if step == 0 else True)
            tiled_mma.set(tcgen05.Field.SFA, scales[step][0])
            tiled_mma.set(tcgen05.Field.SFB, scales[step][1])
            a = operands.a[None, None, step, stage]
            b = operands.b[None, None, step, stage]
            cute.gemm(tiled_mma, accumulator, a, b, accumulator)
