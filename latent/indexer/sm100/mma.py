"""The MMA warp of sm_100a: products of index keys and a query's heads, S = K Q^T by tcgen05.

A tile's 128 keys are the rows of the product, the heads its columns. FP4 is multiplied as stored, with a ue8m0 scale
for every 32 numbers of either operand (kind mxf4, K 64); e4m3 is multiplied without scales (kind f8f6f4, K 32).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float4E2M1FN, Float8E4M3FN, Float8E8M0FNU, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from warpspec.common.device import tmem
from warpspec.common.nvfp4 import MXFP4_BLOCK
from warpspec.latent.indexer.sm100.config import ATOM_BYTES, ATOM_COLUMNS, Sm100ScoresConfig

STEP_SCALES = 2  # scales of a row that one product takes


def element(config: Sm100ScoresConfig):
    return Float4E2M1FN if config.scaled else Float8E4M3FN


def make_mma(config: Sm100ScoresConfig) -> cute.TiledMma:
    """D [keys, heads] = A [keys, K] B [heads, K]^T, both operands in shared memory; block scales in tensor memory."""
    major, dtype = OperandMajorMode.K, element(config)
    shape, group = (config.tile_keys, config.columns), tcgen05.CtaGroup.ONE
    if config.scaled:
        return blackwell.make_blockscaled_trivial_tiled_mma(
            dtype, dtype, major, major, Float8E8M0FNU, MXFP4_BLOCK, group, shape
        )
    return blackwell.make_trivial_tiled_mma(dtype, dtype, major, major, Float32, group, shape)


def fragments(config: Sm100ScoresConfig, mma, shared, columns) -> tuple:
    """(a, b, d): descriptors (MMA, MMA_MN, MMA_K, STAGE); tensor memory (MMA, MMA_M, MMA_N, ACCUMULATOR)."""
    mine, dtype = mma.get_slice(0), element(config)
    tiler = (config.tile_keys, config.columns, config.fmt.dim)
    layouts = (
        blackwell.make_smem_layout_a(mma, tiler, dtype, config.stages),
        blackwell.make_smem_layout_b(mma, tiler, dtype, 1),
    )
    a, b = (
        cute.make_tensor(cute.recast_ptr(base.align(1024), layout.inner, dtype=dtype), layout.outer)
        for base, layout in zip((shared.keys, shared.query), layouts, strict=True)
    )
    layout = mine.make_fragment_C(mine.partition_shape_C(tiler[:2])).layout
    layout = cute.append(layout, cute.make_layout(config.accumulators, stride=config.columns))
    return mine.make_fragment_A(a), mine.make_fragment_B(b), cute.make_tensor(columns, layout)


@cute.jit
def multiply_tiles(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, columns, work):
    """The MMA warp. Consumes full and sum_empty. Produces empty and sum_full, each by a commit.

    Copies of scales and the products that read them run in order, so the commit to empty covers both.
    """
    mma = make_mma(config)
    a, b, d = fragments(config, mma, shared, columns)
    key_scales, query_scales = columns + config.tmem_key_scales, columns + config.tmem_query_scales
    use = Int32(0)
    for _ in cutlass.range(work.first, work.end, work.step, unroll=1):
        channels["sum_empty"].wait_previous(use)
        channels["full"].wait(use)
        cute.arch.fence_view_async_shared()  # makes what threads have copied visible to the tensor core
        tmem.fence_after_wait()
        stage = use % config.stages
        if cutlass.const_expr(config.scaled):
            if use == 0:
                with cute.arch.elect_one():
                    tmem.copy_scale_atom(shared.query_scales, query_scales)
            with cute.arch.elect_one():
                tmem.copy_scale_atom(
                    shared.key_scales + stage * ATOM_BYTES, key_scales + stage * ATOM_COLUMNS
                )
        total = d[None, None, None, use % config.accumulators]
        for k in cutlass.range_constexpr(config.products):
            mma.set(tcgen05.Field.ACCUMULATE, k > 0)
            if cutlass.const_expr(config.scaled):
                places = (key_scales + stage * ATOM_COLUMNS, query_scales)
                for field, place in zip((tcgen05.Field.SFA, tcgen05.Field.SFB), places, strict=True):
                    mma.set(field, cute.recast_ptr(place, dtype=Float8E8M0FNU) + k * STEP_SCALES)
            cute.gemm(mma, total, a[None, None, k, stage], b[None, None, k, 0], total)
        channels["empty"].commit_mma(use)
        channels["sum_full"].commit_mma(use)
        use += 1
