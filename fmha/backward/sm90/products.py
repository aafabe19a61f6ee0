"""The products of a consumer, on wgmma: operands in shared memory and registers, sums in registers."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from warpspec.common.device import tma
from warpspec.fmha.backward.sm90.config import CONSUMER_KEYS
from warpspec.fmha.heads import BLOCK, rounded

ONE_WARPGROUP = (1, 1, 1)
MMA_K = 16  # rows that one wgmma sums over
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def make_mma(dtype, a_major, b_major, columns: int, registers: bool = False) -> cute.TiledMma:
    """Tiled MMA of D [64, columns] = A B, with A from shared memory or registers."""
    source = warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
    tile = (CONSUMER_KEYS, columns)
    return hopper.make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, ONE_WARPGROUP, tile, source)


class GradientProducts(NamedTuple):
    """The products of a consumer; a paired consumer has only those it makes.

    k, v, ds (MMA, MMA_M, MMA_K[, STAGE]), q, do, q_columns, do_columns (MMA, MMA_N, MMA_K, STAGE): descriptors of
    shared memory, k and v at D 64 registers. queries, k_columns, dq: a product, its descriptors and its registers for
    each of the consumer's blocks of dQ; dq is None of a block that rows do not have. s, dp, dk, dv: fp32 registers; p,
    ds_rows: operands in registers, 16 bits. held, held_v: a product whose A is in registers, and V's second span as its
    A; None unless consumers hold that.
    """

    scores: cute.TiledMma
    rows: cute.TiledMma
    rows_v: cute.TiledMma
    queries: list
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    q_columns: cute.Tensor
    do_columns: cute.Tensor
    ds: cute.Tensor
    k_columns: list
    s: cute.Tensor | None
    dp: cute.Tensor | None
    p: cute.Tensor | None
    ds_rows: cute.Tensor | None
    dq: list
    dk: cute.Tensor | None
    dv: cute.Tensor | None
    held: cute.TiledMma | None
    held_v: cute.Tensor | None


def ring(dtype, base, layout, stages: int, stage_bytes: int) -> cute.Tensor:
    """Shared memory of ``stages`` equal tiles, ``stage_bytes`` apart, as (rows, columns, STAGE)."""
    first = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=dtype), layout.outer)[None, None, 0]
    stage = cute.make_layout(stages, stride=stage_bytes * 8 // dtype.width)
    return cute.make_tensor(first.iterator, cute.append(first.layout, stage))


def places_of_dq(config, dtype, shared, own_blocks: list[int]) -> tuple:
    """Where the operands of a consumer's blocks of dQ lie: (dS, which all of them share; K of each block).

    A block has rows and columns of dQ; a consumer's blocks are neighbours.
    """
    columns = config.room // BLOCK
    block_bytes = config.tile_n * BLOCK * dtype.width // 8
    ds_base = (shared.ds + config.dq_place(own_blocks[0])[0] // columns * block_bytes).align(
        tma.TILE_ALIGNMENT
    )
    k_bases = []
    for number, column in map(config.dq_place, own_blocks):
        base = (shared.k + number % columns * block_bytes).align(tma.TILE_ALIGNMENT)
        # The swizzle is of addresses, so a matrix may begin at any 16 bytes of a span's row.
        k_bases.append(base if config.dq_columns == BLOCK else base + column * dtype.width // 8)
    return ds_base, k_bases


def accumulator(mma, shape: tuple) -> cute.Tensor:
    """Registers for sums of a shape."""
    return cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)


def first_of(values: cute.Tensor, mma, columns: int) -> cute.Tensor:
    """The first registers of ``values`` again, for sums of a block with this many columns."""
    shape = mma.partition_shape_C((BLOCK, columns))
    return cute.make_tensor(values.iterator, cute.make_layout(shape))


def registers(config, dtype, consumer, mmas: tuple, queries: list) -> dict:
    """The sums of a consumer and the operands that it has in registers, by field of ``GradientProducts``.

    mmas: those of scores, rows, rows_v and a span of dQ. queries: (MMA, columns) of each of its blocks of dQ, with 0
    columns of a block that rows do not have.
    """
    scores, rows, rows_v, span = mmas
    makes_p, makes_ds = (not config.paired or consumer == each for each in range(2))
    scores_shape = (CONSUMER_KEYS, config.block_m)
    operand = rows.partition_shape_A(scores_shape)
    s = accumulator(scores, scores_shape) if makes_p else None
    dp = accumulator(scores, scores_shape) if makes_ds else None
    # dQ reuses dP's registers once dS is in shared memory. A pair's next S or dP is in flight then, so its dQ has
    # registers of its own.
    dq = accumulator(span, (BLOCK, BLOCK)) if config.paired else dp
    if config.makes_dq_alone and queries[0][1]:
        dq = accumulator(queries[0][0], (BLOCK, queries[0][1]))
        dp = first_of(dq, scores, config.block_m)
    return {
        "s": s,
        "dp": dp,
        "p": cute.make_rmem_tensor(operand, dtype) if makes_p else None,
        "ds_rows": cute.make_rmem_tensor(operand, dtype) if makes_ds else None,
        "dq": [first_of(dq, mma, columns) if columns else None for mma, columns in queries],
        "dk": accumulator(rows, (CONSUMER_KEYS, config.sum_columns("k"))) if makes_ds else None,
        "dv": accumulator(rows_v, (CONSUMER_KEYS, config.sum_columns("v"))) if makes_p else None,
    }


def products(config, dtype, shared, consumer) -> GradientProducts:
    """The products of a consumer. consumer: its number, which selects its 64 keys and its blocks of dQ."""
    m, n = config.tile_m, config.tile_n
    scores = make_mma(dtype, K_MAJOR, K_MAJOR, config.block_m, registers=config.keys_in_registers)
    rows, rows_v = (
        make_mma(dtype, K_MAJOR, MN_MAJOR, config.sum_columns(name), registers=True) for name in "kv"
    )
    # Descriptors are those of whole spans, of which the products may read some columns.
    depth_k, depth_v = (BLOCK * config.spans_of(name) for name in "kv")
    spans_k, spans_v = (
        make_mma(dtype, K_MAJOR, MN_MAJOR, each, registers=True) for each in (depth_k, depth_v)
    )
    ds_mode = K_MAJOR if config.stores_bias else MN_MAJOR
    depth_dq = depth_k if config.makes_dq_alone else BLOCK
    span = make_mma(dtype, ds_mode, MN_MAJOR, depth_dq)
    row_major, column_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR

    def a(mma, base, layout, stages=1, stage_bytes=0):
        tiles = ring(dtype, base, layout, stages, stage_bytes)
        return mma.make_fragment_A(mma.get_slice(0).partition_A(tiles))

    def b(mma, base, layout, stages, stage_bytes):
        tiles = ring(dtype, base, layout, stages, stage_bytes)
        return mma.make_fragment_B(mma.get_slice(0).partition_B(tiles))

    rooms = [config.room_of(name) for name in "kv"]
    keys, values = (hopper.make_smem_layout_a(row_major, (n, m, each), dtype, 1) for each in rooms)
    q_rows, do_rows = (hopper.make_smem_layout_b(row_major, (n, m, each), dtype, 1) for each in rooms)
    q_columns, do_columns = (
        hopper.make_smem_layout_b(column_major, (n, each, m), dtype, 1) for each in (depth_k, depth_v)
    )
    ds_major = row_major if config.stores_bias else column_major
    ds_layout = hopper.make_smem_layout_a(ds_major, (BLOCK, BLOCK, n), dtype, 1)
    k_layout = hopper.make_smem_layout_b(column_major, (BLOCK, depth_dq, n), dtype, 1)
    own_blocks = [consumer * config.dq_blocks + i for i in range(config.dq_blocks)]
    ds_base, k_bases = places_of_dq(config, dtype, shared, own_blocks)
    dq_columns = [config.dq_size(dq_block) for dq_block in own_blocks]
    queries = [make_mma(dtype, ds_mode, MN_MAJOR, columns or BLOCK) for columns in dq_columns]
    queries_of = {"stages": config.q_stages, "stage_bytes": config.tile_bytes("q")}
    dos_of = {"stages": config.do_stages, "stage_bytes": config.tile_bytes("do")}

    def keys_of(base, layout):
        if config.keys_in_registers:
            return cute.make_rmem_tensor(scores.partition_shape_A((CONSUMER_KEYS, config.room)), dtype)
        return batched(a(scores, base, layout)[None, 0 if config.paired else consumer, None, 0])

    held, held_v = None, None
    if config.holds_v:
        held = make_mma(dtype, K_MAJOR, K_MAJOR, config.block_m, registers=True)
        columns = rounded(config.rows.v - BLOCK, MMA_K)
        held_v = cute.make_rmem_tensor(held.partition_shape_A((CONSUMER_KEYS, columns)), dtype)
    own_queries = list(zip(queries, dq_columns, strict=True))
    return GradientProducts(
        scores,
        rows,
        rows_v,
        queries,
        k=keys_of(shared.k, keys),
        v=keys_of(shared.v, values),
        q=b(scores, shared.q, q_rows, **queries_of),
        do=b(scores, shared.do, do_rows, **dos_of),
        q_columns=b(spans_k, shared.q, q_columns, **queries_of),
        do_columns=b(spans_v, shared.do, do_columns, **dos_of),
        ds=a(span, ds_base, ds_layout, max(config.ds_stages, 1), config.ds_bytes),
        k_columns=[b(span, base, k_layout, 1, 0) for base in k_bases],
        held=held,
        held_v=held_v,
        **registers(config, dtype, consumer, (scores, rows, rows_v, span), own_queries),
    )


def other_products(work):
    """The products' descriptors again, from addresses that the compiler cannot prove equal: keeping the first ones live
    from the loop on would take registers that are not there."""
    lane = cute.arch.inline_ptx(
        "and.b32 {$w0}, {$r0}, 31;", write_only_types=[Int32], read_only_args=[work.thread]
    )
    zero = cute.arch.make_warp_uniform(lane >> 5) * tma.TILE_ALIGNMENT
    shared = work.shared._replace(k=work.shared.k + zero, ds=work.shared.ds + zero, q=work.shared.q + zero)
    return products(work.config, work.operands.q.element_type, shared, work.consumer)


def batched(fragment: cute.Tensor) -> cute.Tensor:
    """(MMA, MMA_K) as (MMA, 1, MMA_K)."""
    shape, stride = fragment.layout.shape, fragment.layout.stride
    return cute.make_tensor(
        fragment.iterator, cute.make_layout((shape[0], 1, shape[1]), stride=(stride[0], 0, stride[1]))
    )


def rows_of(fragment: cute.Tensor, block: int, stage) -> cute.Tensor:
    """(MMA, 1, MMA_K): a block of 64 rows of a stage."""
    return batched(fragment[None, block, None, stage])
