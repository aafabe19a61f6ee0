"""The MMA warp: products on tcgen05, summed up in tensor memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from warpspec.common import tmem
from warpspec.swap.config import K_TILE, TILE_M


def make_mma(config) -> cute.TiledMma:
    """D [128, N] = A [128, K] B [N, K]^T: both operands from shared memory, K contiguous."""
    major = OperandMajorMode.K
    tile = (TILE_M, config.columns(config.phase))
    return blackwell.make_trivial_tiled_mma(
        BFloat16, BFloat16, major, major, Float32, tcgen05.CtaGroup.ONE, tile
    )


def fragments(config, a_base, b_base, columns) -> tuple:
    """a, b (MMA, MMA_M or MMA_N, MMA_K, STAGE): descriptors of shared memory; d (MMA, MMA_M, MMA_N): tensor memory."""
    tiled_mma, stages = make_mma(config), config.stages
    tiler = (TILE_M, config.columns(config.phase), K_TILE)
    mine = tiled_mma.get_slice(0)

    def shared(base, layout):
        return cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=BFloat16), layout.outer)

    a = shared(a_base, blackwell.make_smem_layout_a(tiled_mma, tiler, BFloat16, stages))
    b = shared(b_base, blackwell.make_smem_layout_b(tiled_mma, tiler, BFloat16, stages))
    layout = mine.make_fragment_C(mine.partition_shape_C(tiler[:2])).layout
    return mine.make_fragment_A(a), mine.make_fragment_B(b), cute.make_tensor(columns, layout)


@cute.jit
def mma(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands: cutlass.Constexpr, work):
    """Every tile of the CTA: one tcgen05.mma for every 16 of K.

    operands: from ``fragments``. Consumes: full; accumulator_empty before a tile's first. Produces, each by one commit:
    empty after a stage, accumulator_full after a tile's last.
    """
    full, empty = channels["full"], channels["empty"]
    tiled_mma = make_mma(config)
    a, b, d = operands
    use, tile = Int32(0), Int32(0)
    for index in cutlass.range(work.cluster, work.pieces, work.clusters, unroll=1):
        piece = work.piece(config, index)
        channels["accumulator_empty"].wait_previous(tile)
        for k_tile in cutlass.range(piece.count, unroll=1):
            full.wait(use)
            tmem.fence_after_wait()
            stage = full.stage(use)
            for k_block in cutlass.range_constexpr(cute.size(a, mode=[2])):
                tiled_mma.set(tcgen05.Field.ACCUMULATE, Boolean(k_tile > 0) if k_block == 0 else True)
                cute.gemm(tiled_mma, d, a[None, None, k_block, stage], b[None, None, k_block, stage], d)
            empty.commit_mma(use)
            use += 1
        channels["accumulator_full"].commit_mma(tile)
        tile += 1
