"""The MMA warp: S = Q K^T and O += P V on tcgen05."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import BFloat16, Boolean, Float16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from warpspec.common.device import tmem
from warpspec.fmha.tiles import ELEMENT_BYTES

DTYPES = {"bfloat16": BFloat16, "float16": Float16}


def make_qk(config, dtype) -> cute.TiledMma:
    """S [M, N] = Q [M, K] K [N, K]^T: both operands from shared memory, D contiguous."""
    return blackwell.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        OperandMajorMode.K,
        Float32,
        tcgen05.CtaGroup.ONE,
        config.qk_tiler[:2],
    )


def make_pv(config, columns: int | None = None) -> cute.TiledMma:
    """O [M, N] += P [M, K] V [K, N]: V from shared memory, N (that is D) contiguous; P from either memory. columns: N,
    those of O by default."""
    return blackwell.make_trivial_tiled_mma(
        DTYPES[config.p_dtype],
        DTYPES[config.p_dtype],
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        tcgen05.CtaGroup.ONE,
        (config.tile_m, columns) if columns else config.pv_instruction,
        tcgen05.OperandSource.SMEM if config.p_in_smem else tcgen05.OperandSource.TMEM,
    )


class Fragments(NamedTuple):
    """Operands of both products. q (MMA, MMA_M, MMA_K), k, v (MMA, MMA_N, MMA_K, STAGE): descriptors of
    shared memory. p (MMA, MMA_M, MMA_K): descriptors or tensor memory. s, o (MMA, MMA_M, MMA_N): tensor
    memory; the second column tile of an o of 64 rows lies in the other 16 lanes of each quarter."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    s: cute.Tensor
    o: cute.Tensor


def fragments(config, dtype, q_base, k_base, v_base, p_base, columns) -> Fragments:
    """q_base, k_base, v_base, p_base: shared memory regions; v_base is k_base where V is K. columns: TMEM
    pointer to the first column, fp32."""
    qk, pv, p_dtype = make_qk(config, dtype), make_pv(config), DTYPES[config.p_dtype]
    qk_tile, pv_tile = qk.get_slice(0), pv.get_slice(0)
    stages, room = config.kv_stages, config.heads.v_room
    # If O has fewer columns than V's spans, another instruction describes the spans.
    wide = pv if config.heads.whole else make_pv(config, room)
    wide_tile = wide.get_slice(0)

    def shared(base, layout, element=dtype):
        return cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=element), layout.outer)

    def accumulator(tile, tiler, column):
        layout = tile.make_fragment_C(tile.partition_shape_C(tiler[:2])).layout
        return cute.make_tensor(columns + column, layout)

    q = shared(q_base, blackwell.make_smem_layout_a(qk, config.qk_tiler, dtype, 1))
    k = shared(k_base, blackwell.make_smem_layout_b(qk, config.qk_tiler, dtype, stages))
    v_layout = blackwell.make_smem_layout_b(wide, config.pv_tiler, p_dtype, 1)
    v = shared(v_base, v_layout, p_dtype)[None, None, None, 0]
    v_stages = cute.make_layout(stages, stride=config.kv.v_stage_bytes // ELEMENT_BYTES)
    v = cute.make_tensor(v.iterator, cute.append(v.layout, v_stages))
    p_layout = blackwell.make_smem_layout_a(pv, config.pv_tiler, p_dtype, 1)
    if config.p_in_smem:
        p = pv_tile.make_fragment_A(shared(p_base, p_layout, p_dtype))[None, None, None, 0]
    else:  # only the layout's shape matters: in tensor memory P has one row per lane, two keys per column
        p = pv_tile.make_fragment_A(cute.make_tensor(columns, p_layout.outer))[None, None, None, 0]
        p = cute.make_tensor(cute.recast_ptr(columns + config.tmem_p, dtype=p_dtype), p.layout)
    return Fragments(
        q=qk_tile.make_fragment_A(q)[None, None, None, 0],
        k=qk_tile.make_fragment_B(k),
        v=wide_tile.make_fragment_B(v),
        p=p,
        s=accumulator(qk_tile, config.qk_tiler, config.tmem_s),
        o=accumulator(pv_tile, (config.tile_m, config.o_columns * config.column_groups), config.tmem_o),
    )


@cute.jit
def mma(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    span,
    dtype: cutlass.Constexpr,
    uses=(0, 0),
):
    """QK of the next KV tile is issued before PV of this one, so the tensor core has work while softmax makes P.

    operands: ``Fragments``. dtype: dtype of q and k. uses: (M tiles with keys, KV tiles) that the CTA has finished
    before. Consumes: q_full; k_full and s_empty before QK; v_full and p_full before PV. Produces, each by one commit:
    k_empty and s_full after QK; v_empty and pv_done after PV. If V is K, there is no v ring, and k_empty comes after
    PV. If work is cut by length, q_empty comes after the M tile's last QK.
    """
    tile_use, first_use = uses
    if span.count > 0:
        channels["q_full"].wait(tile_use)
        score(config, channels, operands, first_use, dtype)
    for step in cutlass.range(span.count, unroll=1):
        use = first_use + step
        if step + 1 < span.count:
            score(config, channels, operands, use + 1, dtype)
        elif cutlass.const_expr(config.scheduler.cuts_tiles):
            channels["q_empty"].commit_mma(tile_use)
        full, empty = channels[config.format.v_ring + "_full"], channels[config.format.v_ring + "_empty"]
        full.wait(use)
        channels["p_full"].wait(use)
        tmem.fence_after_wait()
        v = operands.v[None, None, None, full.stage(use)]
        multiply(make_pv(config), operands.o, operands.p, v, step > 0)
        empty.commit_mma(use)
        channels["pv_done"].commit_mma(use)


@cute.jit
def score(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    use,
    dtype: cutlass.Constexpr,
):
    """Issue S of KV tile ``use``, once its K is loaded and the previous S has been read."""
    channels["k_full"].wait(use)
    channels["s_empty"].wait_previous(use)
    tmem.fence_after_wait()
    qk = make_qk(config, dtype)
    qk.set(tcgen05.Field.NEGATE_A, config.logits.negate)
    k = operands.k[None, None, None, channels["k_full"].stage(use)]
    multiply(qk, operands.s, operands.q, k, False, config.heads.qk_steps)
    if cutlass.const_expr(not config.format.shared_kv):
        channels["k_empty"].commit_mma(use)
    channels["s_full"].commit_mma(use)


def multiply(tiled_mma, d, a, b, accumulate, count: int | None = None):
    """Issue D = A B, plus D if ``accumulate``: one tcgen05.mma for every MMA_K and column tile of D. count: number of
    MMA_Ks; None: all of A's."""
    for k_block in range(cute.size(a, mode=[2]) if count is None else count):
        tiled_mma.set(tcgen05.Field.ACCUMULATE, Boolean(accumulate) if k_block == 0 else True)
        cute.gemm(tiled_mma, d, a[None, None, k_block], b[None, None, k_block], d)
