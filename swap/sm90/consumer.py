"""The consumers: two warpgroups, 64 rows each of a tile, products on wgmma and their epilogues."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common import tma
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS
from warpspec.common.wgmma import (
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
from warpspec.swap.config import ELEMENT_BYTES, K_TILE, SLOT_BYTES, SLOT_ROWS, TILE_M
from warpspec.swap.device.activation import swiglu
from warpspec.swap.device.flow import count

ONE_WARPGROUP = (1, 1, 1)
VECTOR = VECTOR_BYTES // ELEMENT_BYTES


def make_mma(columns: int) -> cute.TiledMma:
    """D [64, N] = A [64, K] B [N, K]^T: both operands from shared memory, K contiguous."""
    major, tile = OperandMajorMode.K, (WARPGROUP_ROWS, columns)
    return hopper.make_trivial_tiled_mma(BFloat16, BFloat16, major, major, Float32, ONE_WARPGROUP, tile)


def operands_of(config, base, consumer, columns: int) -> tuple:
    """a, b (MMA, MMA_M or MMA_N, MMA_K, SLOT): descriptors of the ring's slots; b's of a slot and, for 256 columns, the
    one behind it. consumer: which 64 rows of A."""
    mma, tiler = make_mma(columns), (WARPGROUP_ROWS, columns, K_TILE)

    def shared(base, layout):
        first = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=BFloat16), layout.outer)
        first = first[None, None, 0]
        ring = cute.make_layout(config.slots, stride=SLOT_BYTES // ELEMENT_BYTES)
        return cute.make_tensor(first.iterator, cute.append(first.layout, ring))

    a_base = (base + consumer * WARPGROUP_ROWS * tma.ROW_BYTES).align(tma.TILE_ALIGNMENT)
    row_major = LayoutEnum.ROW_MAJOR
    a = shared(a_base, hopper.make_smem_layout_a(row_major, tiler, BFloat16, 1))
    b = shared(base, hopper.make_smem_layout_b(row_major, tiler, BFloat16, 1))
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
    """All tiles of this CTA in a product phase. Returns the slots used so far, ``use`` before.

    base: of the ring. Consumes full, produces empty, one arrival a warp in every CTA that loads for this one. Fused,
    produces the row tile's counts of the phase.
    """
    full, empty = channels["full"], channels["empty"]
    consumer = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
    weight_slots, k_slots = config.weight_slots(phase), config.k_slots(phase)
    columns = config.columns(phase)
    whole, parts = (operands_of(config, base, consumer, n) for n in (columns, SLOT_ROWS))
    fragment = cute.make_rmem_tensor(make_mma(columns).partition_shape_C((WARPGROUP_ROWS, columns)), Float32)
    halves = split_fragment(fragment, weight_slots)
    for index in cutlass.range(work.cluster, work.pieces, work.clusters, unroll=1):
        piece = work.piece(config, index)
        padding = config.padding(phase, use)
        for i in cutlass.range(padding, unroll=1):
            full.wait(use + i)
            release(config, empty, work, use + i, 1)
        use += padding
        tail = config.tail(phase)
        body = piece.count - tail
        for k_tile in cutlass.range(body, unroll=1):
            first = use + k_tile * k_slots
            for i in cutlass.range_constexpr(weight_slots):
                full.wait(first + 1 + i)
            issue(full, columns, fragment, *whole, first, 1, Boolean(k_tile > 0))
            if k_tile > 0:
                warpgroup.wait_group(1)
                release(config, empty, work, first - k_slots, k_slots)
        # The last K tiles, column by column: the first half is stored while the second's products run.
        last = use + body * k_slots
        for i in cutlass.range_constexpr(weight_slots):
            for t in cutlass.range_constexpr(tail):
                issue(
                    full, SLOT_ROWS, halves[i], *parts, last + t * k_slots, 1 + i, Boolean(body > 0) | (t > 0)
                )
                if cutlass.const_expr(i + t == 0):
                    warpgroup.wait_group(1)
                    if body > 0:
                        release(config, empty, work, last - k_slots, k_slots)
        row = piece.row_tile * TILE_M + consumer * WARPGROUP_ROWS
        row += thread % WARPGROUP_THREADS // WARP_THREADS * WARP_ROWS + thread % WARP_THREADS // QUAD
        place = (row, piece, thread % QUAD)
        factors = None
        if cutlass.const_expr(phase == "up"):
            factors = inverse_of(ops, row)  # while the last products run
        for i in cutlass.range_constexpr(weight_slots):
            warpgroup.wait_group((weight_slots - 1 - i) * tail)
            for t in cutlass.range_constexpr(tail):
                release(config, empty, work, last + t * k_slots + 1 + i, 1)
            if cutlass.const_expr(i + 1 == weight_slots):
                if cutlass.const_expr(tail == 0):
                    release(config, empty, work, last - k_slots, k_slots)
                for t in cutlass.range_constexpr(tail):
                    release(config, empty, work, last + t * k_slots, 1)
            column_slot = piece.column_tile * weight_slots + i
            if cutlass.const_expr(phase == "up"):
                store_hidden(ops, flat(halves[i]), factors, place, column_slot)
            else:
                store_partial(ops, flat(halves[i]), place, column_slot)
        use += piece.count * k_slots
        if cutlass.const_expr(config.fused):  # noqa: SIM102
            if piece.row_tile < flow.row_tiles:
                count(flow.tile(phase, piece.row_tile), thread)
    return use


def split_fragment(fragment: cute.Tensor, parts: int) -> list[cute.Tensor]:
    """The registers of a fragment as fragments of 128 columns each."""
    layout = make_mma(SLOT_ROWS).partition_shape_C((WARPGROUP_ROWS, SLOT_ROWS))
    size = cute.size(layout)
    assert size * parts == cute.size(fragment)
    return [cute.make_tensor(fragment.iterator + i * size, cute.make_layout(layout)) for i in range(parts)]


@cute.jit
def issue(full, columns: cutlass.Constexpr, fragment, a, b, first, weights: cutlass.Constexpr, accumulate):
    """The products of a K tile with some columns. first: its activations' use of the ring; weights: slots behind it."""
    full.wait(first)
    full.wait(first + weights)
    a_slot, b_slot = full.stage(first), full.stage(first + weights)
    a, b = a[None, None, None, a_slot], b[None, None, None, b_slot]
    multiply(make_mma(columns), fragment, a, b, Boolean(accumulate))


@cute.jit
def release(config: cutlass.Constexpr, empty: cutlass.Constexpr, work, first, slots: cutlass.Constexpr):
    """The warp has read some slots, from use ``first`` on: tell the load warps that write into them, a lane each."""
    tiles = config.tiles
    if cutlass.const_expr(tiles.cluster == 1):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(slots):
                empty.arrive(first + i)
    else:
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        # First the CTAs of this column, then the others of this row.
        in_column = lane < tiles.cluster_m
        other = lane - tiles.cluster_m
        other += Int32(other >= work.rank_n)
        rank = work.rank_n * tiles.cluster_m + lane if in_column else other * tiles.cluster_m + work.rank_m
        if lane < config.sharers:
            for i in cutlass.range_constexpr(slots):
                empty.arrive_in(rank, first + i, has_read=True)


@cute.jit
def inverse_of(ops, row) -> list:
    """1 / RMS of both rows of a thread, past L1: other CTAs of this launch write it where it is fused."""
    found = []
    for r in cutlass.range_constexpr(THREAD_ROWS):
        at = cutlass.min(row + r * ROW_DISTANCE, ops.hidden.shape[0] - 1)
        found.append(cute.arch.load(ops.inverse.iterator + at, Float32, sem="relaxed", scope="gpu"))
    return found


@cute.jit
def store_hidden(ops, sums: cute.Tensor, factors, place: tuple, column_slot):
    """silu(gate) * up of 64 features in bf16, 16 bytes a store. sums: 8 columns of gate and 8 of up, in turn. factors:
    1 / RMS of the thread's rows.

    place: (the thread's first row, piece, member of the quad, whose threads swap words so that each stores 8 columns).
    column_slot: which 128 columns.
    """
    row, _, member = place
    blocks = SLOT_ROWS // COLUMNS // 2  # of outputs
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
                    ops.hidden[at, None], (VECTOR,), (column_slot * blocks + block + member,)
                )
                cute.autovec_copy(cute.recast_tensor(vector, BFloat16), part)


@cute.jit
def store_partial(ops, sums: cute.Tensor, place: tuple, column_slot):
    """The split's sums of 128 columns in fp32. Arguments as of ``store_hidden``.

    Of two blocks of 8 columns, neighbours exchange a pair, so that each stores four columns, 16 bytes: even threads of
    the quad those of the first block, odd ones those of the second.
    """
    row, piece, member = place
    blocks, odd = SLOT_ROWS // COLUMNS, Boolean(member % 2 == 1)
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
                target = ops.partial[piece.split, at, None]
                part = (column_slot * blocks + block + member % 2) * 2 + member // 2
                cute.autovec_copy(vector, cute.local_tile(target, (2 * PAIR,), (part,)))
