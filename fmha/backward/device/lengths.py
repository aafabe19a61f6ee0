"""Dealing pieces of packed key tiles to the SMs, for each length that they may have (``fmha.backward.lengths``)."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward import pieces
from warpspec.fmha.backward.lengths import BUCKETS, HORIZON, SECTIONS, TIMES

LANES = pieces.LENGTHS  # a lane for each length
TAKEN_BITS = (
    7  # lowest bits of a word of ``Deal.counts`` for the times that a piece takes, below how many there are
)


class Deal(NamedTuple):
    """What a CTA shares. counts, steps: of each bucket and lane, as in ``lengths.Pieces``. cut: of each lane. free: how
    many SMs are free at each time, for each lane. chosen: steps of the longest piece."""

    counts: cute.Tensor
    steps: cute.Tensor
    cut: cute.Tensor
    free: cute.Tensor
    chosen: cute.Tensor

    @classmethod
    def allocate(cls, smem) -> Deal:
        sizes = (BUCKETS * LANES, BUCKETS * LANES, LANES, (TIMES + 1) * LANES, 1)
        return cls(
            *(smem.allocate_tensor(Int32, cute.make_layout(size), byte_alignment=16) for size in sizes)
        )


class Load(NamedTuple):
    """What a lane's pieces are dealt by, in steps. base: time of the sections before those that are dealt. quantum: the
    distance of two times. first: rows before those that are dealt. section: rows of a section."""

    base: Float32
    quantum: Float32
    first: Int32
    section: Int32


@cute.jit
def dealt_length(
    deal: cutlass.Constexpr,
    tiles: cute.Tensor,
    count,
    length: cutlass.Constexpr,
    rows,
    sums: cutlass.Constexpr,
) -> Int32:
    """Steps of the longest piece: of the lengths that ``pieces`` considers the one with which all pieces are done
    first. tiles: steps of each of the ``count`` key tiles, in shared memory. rows: of all KV heads or slices. sums:
    (steps of all tiles, of the longest). Called by a whole CTA."""
    thread, _, _ = cute.arch.thread_idx()
    threads, _, _ = cute.arch.block_dim()
    lane = thread % WARP_THREADS
    for cleared in (deal.counts, deal.steps, deal.cut, deal.free):
        for i in cutlass.range(thread, cute.size(cleared), threads, unroll=1):
            cleared[i] = 0
    cute.arch.sync_threads()
    own = length_of_lane(length, *sums, lane)
    inverse = cute.arch.rcp_approx(own.to(Float32))
    for first in cutlass.range(thread - lane, count, threads, unroll=1):
        steps = tiles[cutlass.min(first + lane, count - 1)]
        steps = Int32(cutlass.select_(Boolean(first + lane < count), steps, Int32(0)))
        count_pieces(deal, steps, inverse, lane)
    cute.arch.sync_threads()
    load = load_of_lane(deal, length, rows, own, lane)
    cute.arch.sync_threads()
    scale = cute.arch.rcp_approx(load.quantum)
    for bucket in cutlass.range(thread // WARP_THREADS, BUCKETS, threads // WARP_THREADS, unroll=1):
        place = bucket * LANES + lane
        number, steps = deal.counts[place], deal.steps[place].to(Float32)
        mean = steps * cute.arch.rcp_approx(cutlass.max(number, 1).to(Float32))
        taken = cutlass.max(Int32((mean + length.start) * scale + 0.5), 1)
        deal.counts[place] = (number << TAKEN_BITS) + cutlass.min(taken, TIMES)
    cute.arch.sync_threads()
    if thread < WARP_THREADS:
        time = dealt_steps(deal, load, Int32(rows.to(Float32) / length.share + 0.5), rows, lane)
        time += length.cost * deal.cut[lane].to(Float32)
        best = cute.arch.warp_reduction(time, cute.arch.fmin)
        own = Int32(cutlass.select_(Boolean(time == best), own, Int32(0)))
        own = cute.arch.warp_reduction(own, cutlass.max)
        if lane == 0:
            deal.chosen[0] = own
    cute.arch.sync_threads()
    return deal.chosen[0]


def length_of_lane(length, total, most, lane) -> Int32:
    """The lane's steps of the longest piece; the last lane's tiles are whole. most: steps of the longest tile."""
    own = Int32(pieces.limit_of(length, total.to(Float32), lane.to(Float32), exp2=cute.math.exp2)) + 1
    own = cutlass.max(own, lane + 1)
    return Int32(cutlass.select_(Boolean(lane == pieces.LENGTHS - 1), most, cutlass.min(own, most)))


@cute.jit
def count_pieces(deal: cutlass.Constexpr, steps, inverse, lane):
    """Count the pieces of the lane's tile with every length. Each lane begins with its own, so that no two add to the
    same number. inverse: of the lane's length. Called by a whole warp."""
    for i in cutlass.range(LANES, unroll=4):
        which = (lane + i) % LANES
        its = steps.to(Float32) * cute.arch.shuffle_sync(inverse, which)
        parts = cute.arch.fmax(cute.math.ceil(its - pieces.NEARLY), 1.0)
        bucket = cutlass.min(Int32(its * cute.arch.rcp_approx(parts) * BUCKETS), BUCKETS - 1)
        place, parts = bucket * LANES + which, Int32(parts)
        if steps > 0:
            cute.arch.atomic_add(deal.counts.iterator + place, parts, sem="relaxed", scope="cta")
            cute.arch.atomic_add(deal.steps.iterator + place, steps, sem="relaxed", scope="cta")
            if parts > 1:
                cute.arch.atomic_add(deal.cut.iterator + which, parts, sem="relaxed", scope="cta")


@cute.jit
def load_of_lane(deal: cutlass.Constexpr, length: cutlass.Constexpr, rows, longest, lane) -> Load:
    """What the lane's pieces are dealt by. longest: steps of its longest piece."""
    count, steps, number = Int32(0), Int32(0), rows.to(Float32)
    for bucket in cutlass.range(BUCKETS, unroll=8):
        count += deal.counts[bucket * LANES + lane]
        steps += deal.steps[bucket * LANES + lane]
    section = cutlass.max(Int32(length.last * number + 0.5), 1)
    each = (
        (steps.to(Float32) + length.start * count.to(Float32)) * length.share / number
    )  # of a row, for each SM
    first = cutlass.max((rows + section - 1) // section - SECTIONS, 0) * section
    base = first.to(Float32) * each
    most = cute.arch.fmax(number * each, base + longest.to(Float32) + length.start)
    return Load(base, (most * HORIZON - base) * (1.0 / TIMES), first, section)


@cute.jit
def dealt_steps(deal: cutlass.Constexpr, load: cutlass.Constexpr, sms, rows, lane) -> Float32:
    """``lengths.dealt_steps`` of a lane, without what pieces cost."""
    left_rows = rows - load.first  # of at most two sections
    numbers = (cutlass.min(load.section, left_rows), left_rows - cutlass.min(load.section, left_rows))
    items = Int32(cutlass.select_(Boolean(numbers[1] > 0), Int32(2 * BUCKETS), Int32(BUCKETS)))
    time, last, left, taken, item, free, zero = *(Int32(0),) * 5, sms, Int32(0)
    following = deal.counts[(BUCKETS - 1) * LANES + lane]
    while (item < items) | (left > 0):  # without branches: lanes are at different places
        begins = Boolean(left == 0)
        number = Int32(cutlass.select_(Boolean(item < BUCKETS), *numbers))
        left = Int32(cutlass.select_(begins, (following >> TAKEN_BITS) * number, left))
        taken = Int32(cutlass.select_(begins, following & ((1 << TAKEN_BITS) - 1), taken))
        item += Int32(begins)
        following = deal.counts[((BUCKETS - 1 - item) & (BUCKETS - 1)) * LANES + lane]
        moved, end = cutlass.min(free, left), cutlass.min(time + taken, TIMES)
        cute.arch.atomic_add(deal.free.iterator + (end * LANES + lane), moved, sem="relaxed", scope="cta")
        last = cutlass.max(last, Int32(cutlass.select_(Boolean(moved > 0), end, zero)))
        left -= moved
        passes = Boolean(left > 0)
        time = cutlass.min(time + Int32(passes), TIMES)
        free = Int32(cutlass.select_(passes, deal.free[time * LANES + lane], free - moved))
        left = Int32(cutlass.select_(Boolean(time < TIMES), left, zero))
    return load.base + last.to(Float32) * load.quantum
