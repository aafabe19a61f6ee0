"""The MMA warp: products on tcgen05, summed in tensor memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from warpspec.common.device import tma, tmem
from warpspec.swap.config import A_BYTES, K_TILE, TILE_M


def make_mma(columns: int) -> cute.TiledMma:
    """D [128, N] = A [128, K] B [N, K]^T, both operands in shared memory, K contiguous."""
    major, tile = OperandMajorMode.K, (TILE_M, columns)
    return blackwell.make_trivial_tiled_mma(
        BFloat16, BFloat16, major, major, Float32, tcgen05.CtaGroup.ONE, tile
    )


def fragments(config, base, columns) -> tuple:
    """a, b (MMA, MMA_M or MMA_N, MMA_K, STAGE): descriptors of the ring's stages; d (MMA, MMA_M, MMA_N): the
    accumulator in tensor memory."""
    n, stages = config.columns(config.phase), config.stages(config.phase)
    tiled_mma, tiler = make_mma(n), (TILE_M, n, K_TILE)
    mine = tiled_mma.get_slice(0)

    def shared(at, layout):
        at = at.align(tma.TILE_ALIGNMENT)
        return cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype=BFloat16), layout.outer)

    a = shared(base, blackwell.make_smem_layout_a(tiled_mma, tiler, BFloat16, stages))
    b = shared(base + stages * A_BYTES, blackwell.make_smem_layout_b(tiled_mma, tiler, BFloat16, stages))
    d = mine.make_fragment_C(mine.partition_shape_C(tiler[:2]))
    return mine.make_fragment_A(a), mine.make_fragment_B(b), cute.make_tensor(columns, d.layout)


@cute.jit
def mma(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands: cutlass.Constexpr, work):
    """Compute every tile of the CTA, one tcgen05.mma for every 16 of K.

    operands: from ``fragments``. Consumes full, and accumulator_empty before a tile's first product. Produces, by one
    commit each, empty after every stage and accumulator_full after a tile's last.
    """
    full, empty = channels[f"{config.phase}_full"], channels[f"{config.phase}_empty"]
    tiled_mma = make_mma(config.columns(config.phase))
    a, b, d = operands
    use, tile = Int32(0), Int32(0)
    for index in cutlass.range(work.cluster, work.items, work.clusters, unroll=1):
        item = work.item(config, index)
        channels["accumulator_empty"].wait_previous(tile)
        for k_tile in cutlass.range(item.count, unroll=1):
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
