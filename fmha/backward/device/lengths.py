"""Dealing pieces of packed key tiles to the SMs, for each length that they may have (``fmha.backward.lengths``)."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward import pieces
from warpspec.fmha.backward.lengths import BUCKETS, HORIZON, SECTIONS, TIMES, WAYS

LANES = pieces.LENGTHS  # a lane for each length


class Deal(NamedTuple):
    """What a CTA shares. counts, steps: of each bucket and lane, as in ``lengths.Pieces``; means: steps of a piece.
    cut: of each lane. free: how many SMs are free at each time, for each way and lane. times: of the best length of
    each way. chosen: of each way, steps of the longest piece and rows that are whole."""

    counts: cute.Tensor
    steps: cute.Tensor
    means: cute.Tensor
    cut: cute.Tensor
    free: cute.Tensor
    times: cute.Tensor
    chosen: cute.Tensor

    @classmethod
    def allocate(cls, smem) -> Deal:
        numbers = BUCKETS * LANES
        sizes = (numbers, numbers, numbers, LANES, WAYS * (TIMES + 1) * LANES, WAYS, 2 * WAYS)
        types = (Int32, Int32, Float32, Int32, Int32, Float32, Int32)
        return cls(
            *(
                smem.allocate_tensor(each, cute.make_layout(size), byte_alignment=16)
                for each, size in zip(types, sizes, strict=True)
            )
        )


class Load(NamedTuple):
    """What a lane's pieces are dealt by. base: time of the rows before those that are dealt, in steps. quantum: the
    distance of two times. least: time that the way takes at least. first: rows before those that are dealt. section:
    rows of a section. sections: that are dealt. whole: rows whose tiles are whole. further: pieces of a row beyond one
    for each of its tiles."""

    base: Float32
    quantum: Float32
    least: Float32
    first: Int32
    section: Int32
    sections: Int32
    whole: Int32
    further: Int32


@cute.jit
def dealt_length(
    deal: cutlass.Constexpr,
    tiles: cute.Tensor,
    count,
    length: cutlass.Constexpr,
    rows,
    sums: cutlass.Constexpr,
) -> tuple:
    """(steps of the longest piece, rows that are not cut): of the lengths that ``pieces`` considers, and of the ways,
    those with which all pieces are done first. tiles: steps of each of the ``count`` key tiles, in shared memory. rows:
    of all KV heads or slices. sums: (steps of all tiles, of the longest). Called by a whole CTA."""
    thread, _, _ = cute.arch.thread_idx()
    threads, _, _ = cute.arch.block_dim()
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
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
    for i in cutlass.range(thread, BUCKETS * LANES, threads, unroll=1):
        number = cutlass.max(deal.counts[i], 1).to(Float32)
        deal.means[i] = deal.steps[i].to(Float32) * cute.arch.rcp_approx(number)
    cute.arch.sync_threads()
    sms = Int32(rows.to(Float32) / length.share + 0.5)
    for way in cutlass.range(warp, WAYS, threads // WARP_THREADS, unroll=1):
        load = load_of_lane(deal, length, (rows, sms), (own, sums[1]), lane, way)
        time = dealt_steps(deal, load, length.start, (rows, sms), lane, way)
        cut_rows = rows - load.whole
        time += length.cost / rows.to(Float32) * (deal.cut[lane] * cut_rows).to(Float32)
        # Where a product is rounded otherwise, a row may have one more.
        fits = Boolean(load.further == 0) | Boolean((load.further + 1) * cut_rows <= length.further * rows)
        time = Float32(cutlass.select_(fits, time, Float32.inf))
        best = cute.arch.warp_reduction(time, cute.arch.fmin)
        chosen = Int32(cutlass.select_(Boolean(time == best), own, Int32(0)))
        chosen = cute.arch.warp_reduction(chosen, cutlass.max)
        exists = Boolean(way == 0) | Boolean(load.whole > 0)
        if lane == 0:
            deal.times[way] = Float32(cutlass.select_(exists, best, Float32.inf))
            deal.chosen[2 * way] = chosen
            deal.chosen[2 * way + 1] = load.whole
    cute.arch.sync_threads()
    best, most, whole = deal.times[0], deal.chosen[0], deal.chosen[1]
    for way in cutlass.range_constexpr(1, WAYS):
        better = Boolean(deal.times[way] < best)
        best = Float32(cutlass.select_(better, deal.times[way], best))
        most = Int32(cutlass.select_(better, deal.chosen[2 * way], most))
        whole = Int32(cutlass.select_(better, deal.chosen[2 * way + 1], whole))
    return most, whole


def length_of_lane(length, total, most, lane) -> Int32:
    """The lane's steps of the longest piece; the last lane's tiles are whole. most: steps of the longest tile."""
    own = Int32(pieces.limit_of(length, total.to(Float32), lane.to(Float32), exp2=cute.math.exp2)) + 1
    own = cutlass.max(own, lane + 1)
    return Int32(cutlass.select_(Boolean(lane == pieces.LENGTHS - 1), most, cutlass.min(own, most)))


def parts_of(steps: Float32, limit: Float32) -> Int32:
    """``pieces.parts_of`` on the device."""
    parts = cute.math.ceil(steps * cute.arch.rcp_approx(limit) - pieces.NEARLY)
    return cutlass.max(Int32(parts), 1)


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
def load_of_lane(
    deal: cutlass.Constexpr,
    length: cutlass.Constexpr,
    all_: cutlass.Constexpr,
    longest: cutlass.Constexpr,
    lane,
    way,
) -> Load:
    """What the lane's pieces are dealt by. all_: (rows, SMs). longest: steps of (the lane's longest piece, the longest
    tile). If there is no such way, no rows are whole."""
    rows, sms = all_
    count, uncut, steps = Int32(0), Int32(0), Int32(0)
    for bucket in cutlass.range(BUCKETS, unroll=8):
        count += deal.counts[bucket * LANES + lane]
        uncut += deal.counts[bucket * LANES + LANES - 1]
        steps += deal.steps[bucket * LANES + lane]
    section = cutlass.max(Int32(length.last * rows.to(Float32) + 0.5), 1)
    sections = (rows + section - 1) // section
    dealt = cutlass.min(sections, SECTIONS)
    first = (sections - dealt) * section
    exists = Boolean(way > 0) & Boolean(way < sections)
    whole = Int32(cutlass.select_(exists, (sections - way) * section, Int32(0)))
    each, each_whole = (
        (steps.to(Float32) + length.start * number.to(Float32)) / sms.to(Float32) for number in (count, uncut)
    )
    before = cutlass.min(first, whole)
    base = before.to(Float32) * each_whole + (first - before).to(Float32) * each
    total = whole.to(Float32) * each_whole + (rows - whole).to(Float32) * each
    own = cutlass.select_(Boolean(whole > first), longest[1], longest[0])
    most = cute.arch.fmax(total, base + Int32(own).to(Float32) + length.start)
    least = longest[1].to(Float32) + length.start
    least = Float32(cutlass.select_(Boolean(whole > 0), least, Float32(0.0)))
    quantum = (most * HORIZON - base) * (1.0 / TIMES)
    return Load(base, quantum, least, first, section, dealt, whole, count - uncut)


@cute.jit
def dealt_steps(
    deal: cutlass.Constexpr, load: cutlass.Constexpr, start, all_: cutlass.Constexpr, lane, way
) -> Float32:
    """``lengths.dealt_steps`` of a lane, without what pieces cost. all_: (rows, SMs)."""
    rows, sms = all_
    scale, items = cute.arch.rcp_approx(load.quantum), load.sections * BUCKETS
    begin = way * (TIMES + 1) * LANES + lane
    time, last, left, taken, item, free, zero = *(Int32(0),) * 5, sms, Int32(0)
    row, number, mean = item_at(deal, load, rows, item, lane)
    while (item < items) | (left > 0):  # without branches: lanes are at different places
        begins = Boolean(left == 0)
        its_taken = cutlass.min(cutlass.max(Int32((mean + start) * scale + 0.5), 1), TIMES)
        left = Int32(cutlass.select_(begins, row * number, left))
        taken = Int32(cutlass.select_(begins, its_taken, taken))
        item += Int32(begins)
        row, number, mean = item_at(deal, load, rows, item, lane)
        moved, end = cutlass.min(free, left), cutlass.min(time + taken, TIMES)
        cute.arch.atomic_add(deal.free.iterator + (begin + end * LANES), moved, sem="relaxed", scope="cta")
        last = cutlass.max(last, Int32(cutlass.select_(Boolean(moved > 0), end, zero)))
        left -= moved
        passes = Boolean(left > 0)
        time = cutlass.min(time + Int32(passes), TIMES)
        free = Int32(cutlass.select_(passes, deal.free[begin + time * LANES], free - moved))
        left = Int32(cutlass.select_(Boolean(time < TIMES), left, zero))
    return cute.arch.fmax(load.base + last.to(Float32) * load.quantum, load.least)


def item_at(deal, load, rows, item, lane) -> tuple:
    """(rows, pieces of each, steps of a piece) of a bucket of a section: the item-th of those that are dealt, longest
    first. Past the last there are none."""
    number = item // BUCKETS
    first = load.first + number * load.section
    count = cutlass.max(cutlass.min(load.section, rows - first), 0)
    column = Int32(cutlass.select_(Boolean(first < load.whole), Int32(LANES - 1), lane))
    place = (BUCKETS - 1 - item % BUCKETS) * LANES + column
    return count, deal.counts[place], deal.means[place]
