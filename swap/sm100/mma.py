"""The MMA warp: products on tcgen05, summed up in tensor memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from warpspec.common import tmem
from warpspec.swap.config import K_TILE, SLOT_ROWS, TILE_M


def make_mma() -> cute.TiledMma:
    """D [128, 128] = A [128, K] B [128, K]^T: both operands from shared memory, K contiguous."""
    major, tile = OperandMajorMode.K, (TILE_M, SLOT_ROWS)
    return blackwell.make_trivial_tiled_mma(
        BFloat16, BFloat16, major, major, Float32, tcgen05.CtaGroup.ONE, tile
    )


def fragments(config, base, columns) -> tuple:
    """a, b (MMA, MMA_M or MMA_N, MMA_K, SLOT): descriptors of the ring's slots; accumulators (MMA, MMA_M, MMA_N):
    tensor memory, one for every 128 columns."""
    tiled_mma, slots = make_mma(), config.slots
    tiler = (TILE_M, SLOT_ROWS, K_TILE)
    mine = tiled_mma.get_slice(0)

    def shared(layout):
        return cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=BFloat16), layout.outer)

    a = shared(blackwell.make_smem_layout_a(tiled_mma, tiler, BFloat16, slots))
    b = shared(blackwell.make_smem_layout_b(tiled_mma, tiler, BFloat16, slots))
    layout = mine.make_fragment_C(mine.partition_shape_C(tiler[:2])).layout
    accumulators = [
        cute.make_tensor(columns + i * SLOT_ROWS, layout) for i in range(config.weight_slots(config.phase))
    ]
    return mine.make_fragment_A(a), mine.make_fragment_B(b), accumulators


@cute.jit
def mma(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands: cutlass.Constexpr, work):
    """Every tile of the CTA: one tcgen05.mma for every 16 of K.

    operands: from ``fragments``. Consumes: full; accumulator_empty before a tile's first. Produces, each by one commit:
    empty for every slot, accumulator_full after a tile's last.
    """
    full, empty = channels["full"], channels["empty"]
    tiled_mma = make_mma()
    a, b, accumulators = operands
    use, tile = Int32(0), Int32(0)
    for index in cutlass.range(work.cluster, work.pieces, work.clusters, unroll=1):
        piece = work.piece(config, index)
        channels["accumulator_empty"].wait_previous(tile)
        for k_tile in cutlass.range(piece.count, unroll=1):
            full.wait(use)
            for i in cutlass.range_constexpr(len(accumulators)):
                full.wait(use + 1 + i)
                tmem.fence_after_wait()
                d, weights = accumulators[i], full.stage(use + 1 + i)
                for k_block in cutlass.range_constexpr(cute.size(a, mode=[2])):
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, Boolean(k_tile > 0) if k_block == 0 else True)
                    activations = a[None, None, k_block, full.stage(use)]
                    cute.gemm(tiled_mma, d, activations, b[None, None, k_block, weights], d)
                empty.commit_mma(use + 1 + i)
            empty.commit_mma(use)
            use += 1 + len(accumulators)
        channels["accumulator_full"].commit_mma(tile)
        tile += 1
