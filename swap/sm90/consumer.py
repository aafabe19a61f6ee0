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


def make_mma() -> cute.TiledMma:
    """D [64, 128] = A [64, K] B [128, K]^T: both operands from shared memory, K contiguous."""
    major, tile = OperandMajorMode.K, (WARPGROUP_ROWS, SLOT_ROWS)
    return hopper.make_trivial_tiled_mma(BFloat16, BFloat16, major, major, Float32, ONE_WARPGROUP, tile)


def operands_of(config, base, consumer) -> tuple:
    """a, b (MMA, MMA_M or MMA_N, MMA_K, SLOT): descriptors of the ring's slots. consumer: which 64 rows of A."""
    mma, tiler = make_mma(), (WARPGROUP_ROWS, SLOT_ROWS, K_TILE)

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
    a, b = operands_of(config, base, consumer)
    weight_slots, k_slots = config.weight_slots(phase), config.k_slots(phase)
    shape = make_mma().partition_shape_C((WARPGROUP_ROWS, SLOT_ROWS))
    fragments = [cute.make_rmem_tensor(shape, Float32) for _ in range(weight_slots)]  # of 128 columns each
    for index in cutlass.range(work.cluster, work.pieces, work.clusters, unroll=1):
        piece = work.piece(config, index)
        tail = config.tail(phase)
        body = piece.count - tail
        for k_tile in cutlass.range(body, unroll=1):
            first = use + k_tile * k_slots
            for i in cutlass.range_constexpr(weight_slots):
                issue(full, fragments[i], a, b, first, 1 + i, Boolean(k_tile > 0))
            if k_tile > 0:
                warpgroup.wait_group(weight_slots)
                release(config, empty, work, first - k_slots, k_slots)
        # The last K tiles, column by column: the first half is stored while the second's products run.
        last = use + body * k_slots
        for i in cutlass.range_constexpr(weight_slots):
            for t in cutlass.range_constexpr(tail):
                issue(full, fragments[i], a, b, last + t * k_slots, 1 + i, Boolean(body > 0) | (t > 0))
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
                store_hidden(ops, flat(fragments[i]), factors, place, column_slot)
            else:
                store_partial(ops, flat(fragments[i]), place, column_slot)
        use += piece.count * k_slots
        if cutlass.const_expr(config.fused):  # noqa: SIM102
            if piece.row_tile < flow.row_tiles:
                count(flow.tile(phase, piece.row_tile), thread)
    return use


@cute.jit
def issue(full, fragment, a, b, first, weights: cutlass.Constexpr, accumulate):
    """The products of a K tile with 128 columns. first: its activations' use of the ring; weights: slots behind it."""
    full.wait(first)
    full.wait(first + weights)
    activations, columns = full.stage(first), full.stage(first + weights)
    multiply(
        make_mma(),
        fragment,
        a[None, None, None, activations],
        b[None, None, None, columns],
        Boolean(accumulate),
    )


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
    """The split's sums of 128 columns in fp32, pairs of columns: 32 bytes a quad. Arguments as of ``store_hidden``."""
    row, piece, member = place
    blocks = SLOT_ROWS // COLUMNS
    for r in cutlass.range_constexpr(THREAD_ROWS):
        at = row + r * ROW_DISTANCE
        if at < ops.hidden.shape[0]:
            target = ops.partial[piece.split, at, None]
            for block in cutlass.range_constexpr(blocks):
                pair = cute.make_rmem_tensor(PAIR, Float32)
                for j in cutlass.range_constexpr(PAIR):
                    pair[j] = sums[(block * THREAD_ROWS + r) * PAIR + j]
                part = (column_slot * blocks + block) * QUAD + member
                cute.autovec_copy(pair, cute.local_tile(target, (PAIR,), (part,)))
