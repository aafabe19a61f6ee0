"""The consumers: two warpgroups with 64 rows of a tile each; products on wgmma, and their epilogues."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.device import tma
from warpspec.common.device.wgmma import (
    COLUMNS,
    PAIR,
    QUAD,
    ROW_DISTANCE,
    THREAD_ROWS,
    WARP_ROWS,
    WARPGROUP_ROWS,
    flat,
    multiply,
    transpose,
)
from warpspec.common.hardware import BF16_BYTES, VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS
from warpspec.swap.config import A_BYTES, GROUP_TILES, K_TILE, THREADS, TILE_M
from warpspec.swap.device.activation import swiglu
from warpspec.swap.device.flow import TURN_BARRIER, count

ONE_WARPGROUP = (1, 1, 1)
VECTOR = VECTOR_BYTES // BF16_BYTES


def make_mma(columns: int) -> cute.TiledMma:
    """D [64, N] = A [64, K] B [N, K]^T, both operands in shared memory, K contiguous."""
    major, tile = OperandMajorMode.K, (WARPGROUP_ROWS, columns)
    return hopper.make_trivial_tiled_mma(BFloat16, BFloat16, major, major, Float32, ONE_WARPGROUP, tile)


def operands_of(config, phase: str, base, consumer) -> tuple:
    """a, b (MMA, MMA_M or MMA_N, MMA_K, STAGE): descriptors of the ring's stages. consumer: which 64 rows of A."""
    columns, stages = config.columns(phase), config.stages(phase)
    mma, tiler = make_mma(columns), (WARPGROUP_ROWS, columns, K_TILE)

    def shared(at, layout, stage_bytes):
        at = at.align(tma.TILE_ALIGNMENT)
        first = cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype=BFloat16), layout.outer)
        first = first[None, None, 0]
        ring = cute.make_layout(stages, stride=stage_bytes // BF16_BYTES)
        return cute.make_tensor(first.iterator, cute.append(first.layout, ring))

    a_base, b_base = base + consumer * WARPGROUP_ROWS * tma.ROW_BYTES, base + stages * A_BYTES
    row_major = LayoutEnum.ROW_MAJOR
    a = shared(a_base, hopper.make_smem_layout_a(row_major, tiler, BFloat16, 1), A_BYTES)
    b_bytes = config.stage_bytes(phase) - A_BYTES
    b = shared(b_base, hopper.make_smem_layout_b(row_major, tiler, BFloat16, 1), b_bytes)
    mine = mma.get_slice(0)
    return mma.make_fragment_A(mine.partition_A(a)), mma.make_fragment_B(mine.partition_B(b))


@cute.jit
def product_phase(
    config: cutlass.Constexpr,
    phase: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    base: cutlass.Constexpr,
    work,
    ops,
    flow,
    thread,
    use,
) -> Int32:
    """Compute all tiles of this CTA in a product phase. use: stages used before; returns the new count.

    base: the ring's address. Consumes full; produces empty, one arrival a warp in every CTA that loads for this one. In
    the fused kernel it also produces the row tile's counts of the phase.
    """
    full, empty = channels[f"{phase}_full"], channels[f"{phase}_empty"]
    consumer = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
    columns, stages = config.columns(phase), config.stages(phase)
    a, b = operands_of(config, phase, base, consumer)
    mma = make_mma(columns)
    fragment = cute.make_rmem_tensor(mma.partition_shape_C((WARPGROUP_ROWS, columns)), Float32)
    for index in cutlass.range(work.cluster, work.items, work.clusters, unroll=1):
        item = work.item(config, index)
        turn = item.count - (stages - 1)
        # Otherwise the old sums, which the first products overwrite, would stay live from tile to tile and take
        # registers.
        fragment.fill(0.0)
        for k_tile in cutlass.range(item.count, unroll=1):
            if (k_tile == turn) & (turn > 0) & (consumer > 0):
                after_the_first()
            full.wait(use + k_tile)
            stage = full.stage(use + k_tile)
            a_stage, b_stage = a[None, None, None, stage], b[None, None, None, stage]
            multiply(mma, fragment, a_stage, b_stage, True)
            if k_tile > 0:
                warpgroup.wait_group(1)
                release(config, empty, work, use + k_tile - 1)
        if (turn > 0) & (consumer == 0):
            first_has_issued()
        use += item.count
        row = item.row_tile * TILE_M + consumer * WARPGROUP_ROWS
        row += thread % WARPGROUP_THREADS // WARP_THREADS * WARP_ROWS + thread % WARP_THREADS // QUAD
        place = (row, item, thread % QUAD)
        if cutlass.const_expr(phase == "up"):
            factors = inverse_of(ops, row)  # while the last products are running
            warpgroup.wait_group(0)
            release(config, empty, work, use - 1)
            store_hidden(ops, flat(fragment), factors, place, columns)
        else:
            warpgroup.wait_group(0)
            release(config, empty, work, use - 1)
            store_partial(ops, flat(fragment), place, columns)
        if cutlass.const_expr(config.fused):  # noqa: SIM102
            if item.row_tile < flow.row_tiles:
                group = item.column_tile // GROUP_TILES
                count(flow.tile(phase, item.row_tile, group), thread)
    return use


# At the end of a tile the second consumer lets the first one get ahead by all stages but one, so that each one's
# epilogue runs during the other's products. Tiles with fewer K tiles take no turns: the first could get a whole tile
# ahead.


def first_has_issued() -> None:
    """Signal that the first consumer has issued its tile's last products."""
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=THREADS)


def after_the_first() -> None:
    """The second consumer waits for that signal."""
    cute.arch.barrier(barrier_id=TURN_BARRIER, number_of_threads=THREADS)


@cute.jit
def release(config: cutlass.Constexpr, empty: cutlass.Constexpr, work, use):
    """Release a stage that the warp has read: its lanes arrive at the load warps that write into it, one each.

    Reads by wgmma must have been waited for; reads by the threads' loads need a fence before.
    """
    tiles = config.tiles
    if cutlass.const_expr(tiles.cluster == 1):
        empty.arrive_warp(use)
    else:
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        # First the CTAs of this column, then the others of this row.
        in_column = lane < tiles.cluster_m
        other = lane - tiles.cluster_m
        other += Int32(other >= work.rank_n)
        rank = work.rank_n * tiles.cluster_m + lane if in_column else other * tiles.cluster_m + work.rank_m
        if lane < config.sharers:
            empty.arrive_in(rank, use, has_read=True)


@cute.jit
def inverse_of(ops, row) -> list:
    """1 / RMS of a thread's two rows. It bypasses L1, because in a fused launch other CTAs write it."""
    found = []
    for r in cutlass.range_constexpr(THREAD_ROWS):
        at = cutlass.min(row + r * ROW_DISTANCE, ops.hidden.shape[0] - 1)
        found.append(cute.arch.load(ops.inverse.iterator + at, Float32, sem="relaxed", scope="gpu"))
    return found


@cute.jit
def store_hidden(ops, sums: cute.Tensor, factors, place: tuple, columns: cutlass.Constexpr):
    """Store silu(gate) * up of a tile's features as bf16, 16 bytes a store.

    sums: 8 columns of gate and 8 of up alternate. factors: 1 / RMS of the thread's rows. columns: columns of the tile.
    place: (the thread's first row, item, member of the quad). The threads of a quad exchange words so that each stores
    8 columns.
    """
    row, item, member = place
    blocks = columns // COLUMNS // 2  # blocks of outputs
    for r in cutlass.range_constexpr(THREAD_ROWS):
        at = row + r * ROW_DISTANCE
        for block in cutlass.range_constexpr(0, blocks, QUAD):
            words = []
            for i in cutlass.range_constexpr(QUAD):
                pair = cute.make_rmem_tensor(PAIR, BFloat16)
                for j in cutlass.range_constexpr(PAIR):
                    gate = ((block + i) * 2 * THREAD_ROWS + r) * PAIR + j
                    up = gate + THREAD_ROWS * PAIR
                    pair[j] = swiglu(sums[gate] * factors[r], sums[up] * factors[r]).to(BFloat16)
                words.append(cute.recast_tensor(pair, Int32)[0])
            moved = transpose(words, member)
            if at < ops.hidden.shape[0]:
                vector = cute.make_rmem_tensor(QUAD, Int32)
                for i in cutlass.range_constexpr(QUAD):
                    vector[i] = moved[i]
                part = cute.local_tile(
                    ops.hidden[at, None], (VECTOR,), (item.column_tile * blocks + block + member,)
                )
                cute.autovec_copy(cute.recast_tensor(vector, BFloat16), part)


@cute.jit
def store_partial(ops, sums: cute.Tensor, place: tuple, columns: cutlass.Constexpr):
    """Store the split's sums of a tile in fp32. Arguments as in ``store_hidden``.

    Adjacent threads exchange a pair from two blocks of 8 columns, so that each stores four columns, 16 bytes: even
    threads of the quad store the first block, odd ones the second.
    """
    row, item, member = place
    blocks, odd = columns // COLUMNS, Boolean(member % 2 == 1)
    for r in cutlass.range_constexpr(THREAD_ROWS):
        at = row + r * ROW_DISTANCE
        for block in cutlass.range_constexpr(0, blocks, 2):
            first, second = ((block + i) * THREAD_ROWS * PAIR + r * PAIR for i in range(2))
            vector = cute.make_rmem_tensor(2 * PAIR, Float32)
            for j in cutlass.range_constexpr(PAIR):
                low, high = sums[first + j], sums[second + j]
                got = cute.arch.shuffle_sync_bfly(Float32(cutlass.select_(odd, low, high)), 1)
                vector[j] = Float32(cutlass.select_(odd, got, low))
                vector[PAIR + j] = Float32(cutlass.select_(odd, high, got))
            if at < ops.hidden.shape[0]:
                target = ops.partial[item.split, at, None]
                part = (item.column_tile * blocks + block + member % 2) * 2 + member // 2
                cute.autovec_copy(vector, cute.local_tile(target, (2 * PAIR,), (part,)))
