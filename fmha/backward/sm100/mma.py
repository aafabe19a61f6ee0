"""The MMA warp: all five products of a step on tcgen05.

S^T = K Q^T and dP^T = V dO^T; once the key warps have made P and dS, dV += P^T dO and dK += dS^T Q with P and dS from
tensor memory, and dQ = dS K, or its transpose, with dS from shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from warpspec.common.device import tma, tmem
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.sm100.mma import multiply

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def make_mma(dtype, a_major, b_major, tile, source=tcgen05.OperandSource.SMEM) -> cute.TiledMma:
    return blackwell.make_trivial_tiled_mma(
        dtype, dtype, a_major, b_major, Float32, tcgen05.CtaGroup.ONE, tile, source
    )


class Fragments(NamedTuple):
    """The products. scores, rows, queries: tiled MMAs. k, v, a, p, ds (MMA, MMA_M, MMA_K), q, do, q_columns,
    do_columns (MMA, MMA_N, MMA_K, STAGE), b (MMA, MMA_N, MMA_K): descriptors of shared memory; p and ds: tensor memory.
    a, b: operands of dQ. s, dp, dq, dk, dv: accumulators."""

    scores: cute.TiledMma
    rows: cute.TiledMma
    queries: cute.TiledMma
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    q_columns: cute.Tensor
    do_columns: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    a: cute.Tensor
    b: cute.Tensor
    s: cute.Tensor
    dp: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor


def fragments(config, dtype, shared, column_group, columns) -> Fragments:
    """column_group: which columns of dK, dV and dQ. columns: TMEM pointer to the first column, fp32."""
    m, n, depth, width = config.tile_m, config.tile_n, config.room, config.width
    scores_tiler, rows_tiler = (n, m, depth), (n, width, m)
    queries_tiler = (width, m, n) if config.transposed_dq else (m, width, n)
    scores = make_mma(dtype, K_MAJOR, K_MAJOR, scores_tiler[:2])
    rows = make_mma(dtype, K_MAJOR, MN_MAJOR, rows_tiler[:2], tcgen05.OperandSource.TMEM)
    queries = make_mma(dtype, MN_MAJOR, MN_MAJOR, queries_tiler[:2])

    def ring(base, layout, stages, stage_bytes):
        first = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=dtype), layout.outer)
        first = first[None, None, None, 0]
        stage = cute.make_layout(stages, stride=stage_bytes * 8 // dtype.width)
        return cute.make_tensor(first.iterator, cute.append(first.layout, stage))

    def a_of(mma, tiler, base):
        layout = blackwell.make_smem_layout_a(mma, tiler, dtype, 1)
        return mma.get_slice(0).make_fragment_A(ring(base, layout, 1, 0))[None, None, None, 0]

    def b_of(mma, tiler, base, stages=1, stage_bytes=0):
        layout = blackwell.make_smem_layout_b(mma, tiler, dtype, 1)
        return mma.get_slice(0).make_fragment_B(ring(base, layout, stages, stage_bytes))

    def accumulator(mma, tiler, column):
        mine = mma.get_slice(0)
        layout = mine.make_fragment_C(mine.partition_shape_C(tiler[:2])).layout
        return cute.make_tensor(columns + column, layout)

    def operand(column):  # only the layout's shape matters: one row per lane, two queries per column
        layout = blackwell.make_smem_layout_a(rows, rows_tiler, dtype, 1)
        mine = rows.get_slice(0).make_fragment_A(cute.make_tensor(columns, layout.outer))[None, None, None, 0]
        return cute.make_tensor(cute.recast_ptr(columns + column, dtype=dtype), mine.layout)

    def group_of(base, tile_rows):  # blocks of 64 columns lie one after another
        if config.clustered:  # no others are there
            return base.align(tma.TILE_ALIGNMENT)
        first = column_group * (width // BLOCK) * tile_rows * tma.ROW_BYTES
        return (base + first).align(tma.TILE_ALIGNMENT)

    queries_of = {"stages": config.q_stages, "stage_bytes": config.tile_bytes("q")}
    dos_of = {"stages": config.do_stages, "stage_bytes": config.tile_bytes("do")}
    k_base = group_of(shared.k, n)
    a_base, b_base = (k_base, shared.ds) if config.transposed_dq else (shared.ds, k_base)
    return Fragments(
        scores,
        rows,
        queries,
        k=a_of(scores, scores_tiler, shared.k),
        v=a_of(scores, scores_tiler, shared.v),
        q=b_of(scores, scores_tiler, shared.q, **queries_of),
        do=b_of(scores, scores_tiler, shared.do, **dos_of),
        q_columns=b_of(rows, rows_tiler, group_of(shared.q, m), **queries_of),
        do_columns=b_of(rows, rows_tiler, group_of(shared.do, m), **dos_of),
        p=operand(config.tmem_s),
        ds=operand(config.tmem_dp),
        a=a_of(queries, queries_tiler, a_base),
        b=b_of(queries, queries_tiler, b_base)[None, None, None, 0],
        s=accumulator(scores, scores_tiler, config.tmem_s),
        dp=accumulator(scores, scores_tiler, config.tmem_dp),
        dq=accumulator(queries, queries_tiler, config.tmem_s),
        dk=accumulator(rows, rows_tiler, config.tmem_dk),
        dv=accumulator(rows, rows_tiler, config.tmem_dv),
    )


@cute.jit
def mma(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    tile,
    column_group,
    columns,
):
    """Consumes k_full, v_full, q_full, do_full and the previous step's dq_empty, or clean, for which the key warps wait
    for all of these; the previous step's step_done before S, ds_full before the other products, dv_done before dQ:
    products with different accumulators may overtake each other, and tensor memory is reused. Produces, by commits,
    s_full, dv_done, q_empty and step_done."""
    f = fragments(config, dtype, shared, column_group, columns)
    if cutlass.const_expr(not config.scatters):  # noqa: SIM102
        if tile.steps > 0:
            channels["k_full"].wait(0)
            channels["v_full"].wait(0)
    for step in cutlass.range(tile.steps, unroll=1):
        if cutlass.const_expr(config.scatters):
            channels["clean"].wait(step)
        else:
            channels["q_full"].wait(step)
            channels["do_full"].wait(step)
            if cutlass.const_expr(config.wanted.q):
                channels["dq_empty"].wait_previous(step)
        channels["step_done"].wait_previous(step)
        tmem.fence_after_wait()
        q_stage, do_stage = channels["q_full"].stage(step), channels["do_full"].stage(step)
        multiply(f.scores, f.s, f.k, f.q[None, None, None, q_stage], False)
        if cutlass.const_expr(config.wanted.ds):
            multiply(f.scores, f.dp, f.v, f.do[None, None, None, do_stage], False)
        channels["s_full"].commit_mma(step)
        channels["ds_full"].wait(step)
        tmem.fence_after_wait()
        if cutlass.const_expr(config.wanted.v):
            multiply(f.rows, f.dv, f.p, f.do_columns[None, None, None, do_stage], step > 0)
        channels["dv_done"].commit_mma(step)
        if cutlass.const_expr(config.wanted.k):
            multiply(f.rows, f.dk, f.ds, f.q_columns[None, None, None, q_stage], step > 0)
        channels["q_empty"].commit_mma(step)
        if cutlass.const_expr(config.wanted.q):
            channels["dv_done"].wait(step)
            tmem.fence_after_wait()
            multiply(f.queries, f.dq, f.a, f.b, False)
        channels["step_done"].commit_mma(step)
