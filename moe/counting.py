"""A counting sort on the device, by one CTA or by a cluster whose CTAs each take a stretch of the choices.

Every warp has a stretch of the choices, in order. 1. It counts them by bin (expert). 2. Sums over (bin, warp) give the
first row of each warp's choices of each bin. 3. The warp goes through its stretch again and assigns rows; among 32
choices, ``match.sync`` finds those of the same bin. In a cluster every CTA counts its own stretch, reads all CTAs'
counts through distributed shared memory, and adds up those that come before its own.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from warpspec.common.device.warp import running_sum
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.moe.permute import DROPPED, WORK_COLUMNS, head_rows

BATCH = 4  # groups of 32 choices whose loads are issued together
WHOLE_WARP = 0xFFFFFFFF


class SortStorage(NamedTuple):
    """Shared memory of a CTA that sorts.

    counters: (BIN WARP), with ``pitch`` counters a bin. totals: (WARP, 2). In a cluster also three arrays (BIN):
    counts, the CTA's own; before, those of the CTAs before it; starts, the first row of each bin.
    """

    counters: cute.Tensor
    totals: cute.Tensor
    counts: cute.Tensor | None
    before: cute.Tensor | None
    starts: cute.Tensor | None


def allocate(config) -> SortStorage:
    smem = cutlass.memory.SmemAllocator()

    def tensor(*shape):
        layout = cute.make_layout(shape if len(shape) > 1 else shape[0])
        return smem.allocate_tensor(Int32, layout, byte_alignment=VECTOR_BYTES)

    return SortStorage(
        tensor(config.counters),
        tensor(config.shape.warps, 2),
        *(tensor(config.bins) if config.shape.ctas > 1 else None for _ in range(3)),
    )


@cute.jit
def sort(config: cutlass.Constexpr, operands, shared, thread, rank):
    """The work of a CTA that sorts. operands: ``sort.SortOperands``. rank: the CTA's in the cluster of those that
    sort."""
    ids, offsets, work = operands.ids, operands.offsets, operands.work
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    total = Int32(ids.shape[0]) * config.taken
    stretch = cute.ceil_div(cute.ceil_div(total, config.shape.ctas * config.shape.warps), config.granule)
    stretch = stretch * config.granule
    begin = cutlass.min((rank * config.shape.warps + warp) * stretch, total)
    end = cutlass.min(begin + stretch, total)
    counters = shared.counters
    for i in cutlass.range(thread, config.counters, config.threads):
        counters[i] = Int32(0)
    cute.arch.sync_threads()

    # 1. Count each warp's choices of every expert.
    group = WARP_THREADS * BATCH
    for first in cutlass.range(begin, end, group, unroll=1):
        bins = load_bins(config, ids, first + lane, end)
        for i in cutlass.range_constexpr(BATCH):
            if bins[i] >= 0:  # the order of the additions does not matter
                at = bins[i] * config.pitch + warp
                cute.arch.atomic_add(counters.iterator + at, Int32(1), sem="relaxed", scope="cta")
    cute.arch.sync_threads()

    # 2. Find the first row of each; write the experts' ends and the list of work.
    if cutlass.const_expr(config.shape.ctas > 1):
        join(config, shared, thread, rank)
        if rank == config.shape.ctas - 1:  # the last CTA writes, because its stretch is the shortest
            tell(config, shared.starts, offsets, work, shared.totals, thread)
    else:
        scan(config, counters, config.counters, shared.totals[None, 0], thread)
        starts = cute.make_tensor(counters.iterator, cute.make_layout(config.bins, stride=config.pitch))
        tell(config, starts, offsets, work, shared.totals, thread)
    cute.arch.sync_threads()

    # 3. Assign a row to every choice.
    for first in cutlass.range(begin, end, group, unroll=1):
        bins = load_bins(config, ids, first + lane, end)
        for i in cutlass.range_constexpr(BATCH):
            same, rank_of_lane = alike(bins[i], lane)
            if bins[i] >= 0:
                row = counters[bins[i] * config.pitch + warp] + rank_of_lane
                if cutlass.const_expr(config.shape.ctas > 1):
                    row += shared.before[bins[i]]
                choice = first + i * WARP_THREADS + lane
                operands.source[row] = choice
                kept = Int32(cutlass.select_(Boolean(bins[i] < config.experts), row, Int32(DROPPED)))
                operands.position[choice // config.taken, choice % config.taken] = kept
            cute.arch.sync_warp()
            count_bin(config, counters, bins[i], warp, same, lane)
    if cutlass.const_expr(config.shape.ctas > 1):
        cute.arch.cluster_wait()  # until all CTAs have read this CTA's counts


@cute.jit
def join(config: cutlass.Constexpr, shared, thread, rank):
    """Turn counts into rows, across the CTAs of a cluster.

    Afterwards counters hold how many rows of a bin the CTA's earlier warps have, shared.starts the first row of each
    bin, and shared.before how many rows of each bin earlier CTAs have. Ends with an arrival at the cluster's barrier,
    for which the caller waits.
    """
    ctas, counts, before, starts = config.shape.ctas, shared.counts, shared.before, shared.starts
    for at in cutlass.range(thread, config.bins, config.threads, unroll=1):
        running = Int32(0)
        for warp in cutlass.range_constexpr(config.shape.warps):
            place = at * config.pitch + warp
            count = shared.counters[place]
            shared.counters[place] = running
            running += count
        counts[at] = running
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    share = -(-config.bins // config.threads)
    own = Int32(0)
    for i in cutlass.range(share, unroll=1):
        at = thread * share + i
        if at < config.bins:
            whole, earlier = Int32(0), Int32(0)
            for other in cutlass.range_constexpr(ctas):
                count = Int32(cute.arch.map_dsmem_ptr(counts.iterator + at, Int32(other)).load())
                whole += count
                earlier += Int32(cutlass.select_(Boolean(rank > other), count, Int32(0)))
            starts[at], before[at] = whole, earlier
            own += whole
    cute.arch.cluster_arrive()
    running = sum_before(config, own, shared.totals[None, 0], thread)
    for i in cutlass.range(share, unroll=1):
        at = thread * share + i
        if at < config.bins:
            whole = starts[at]
            starts[at] = running
            before[at] = before[at] + running
            running += whole
    cute.arch.sync_threads()


@cute.jit
def tell(config: cutlass.Constexpr, starts, offsets, work, totals, thread):
    """Write the experts' ends and the list of work from the first row of each bin. Executed by one CTA."""
    for expert in cutlass.range(thread, config.experts, config.threads):
        offsets[expert] = starts[expert + 1]
    if cutlass.const_expr(len(config.widths) > 0):
        list_work(config, starts, totals[None, 1], work, thread)


@cute.jit
def load_bins(config: cutlass.Constexpr, ids, first, end) -> cute.Tensor:
    """(BATCH): bins of choices first, first + 32, ...: the expert, or the last bin for none; -1 from ``end`` on."""
    bins = cute.make_rmem_tensor(BATCH, Int32)
    for i in cutlass.range_constexpr(BATCH):
        choice = first + i * WARP_THREADS
        found = Int32(-1)
        if choice < end:
            which = choice % config.taken
            found = config.experts + which - config.taken  # one of the shared experts
            if which < config.choices:
                found = Int32(ids[choice // config.taken, which])
                if (found < 0) | (found >= (config.experts - config.shared) * config.each):
                    found = Int32(config.experts)
                elif cutlass.const_expr(config.each > 1):
                    found = found // config.each
        bins[i] = found
    return bins


def alike(value: Int32, lane) -> tuple:
    """(mask of the lanes with this lane's value, how many of them are lower lanes)."""
    same = cute.arch.match_sync(WHOLE_WARP, value)
    before = (Uint32(1) << Uint32(lane)) - Uint32(1)
    return same, Int32(cute.arch.popc(same & before))


@cute.jit
def count_bin(config: cutlass.Constexpr, counters, value, warp, same, lane):
    """Count a warp's values: the first lane of each value adds how many lanes have it."""
    if (value >= 0) & ((same & ((Uint32(1) << Uint32(lane)) - Uint32(1))) == 0):
        at = value * config.pitch + warp
        counters[at] = counters[at] + Int32(cute.arch.popc(same))
    cute.arch.sync_warp()


@cute.jit
def scan(config: cutlass.Constexpr, values, size: cutlass.Constexpr, totals, thread):
    """Exclusive prefix sum over values (size) in shared memory. Executed by the CTA, which it synchronises."""
    share = -(-size // config.threads)
    own = Int32(0)
    for i in cutlass.range(share, unroll=1):
        if thread * share + i < size:
            own += values[thread * share + i]
    running = sum_before(config, own, totals, thread)
    for i in cutlass.range(share, unroll=1):
        at = thread * share + i
        if at < size:
            value = values[at]
            values[at] = running
            running += value
    cute.arch.sync_threads()


@cute.jit
def sum_before(config: cutlass.Constexpr, own: Int32, totals, thread) -> Int32:
    """Sum of ``own`` over all earlier threads. totals (WARP): shared memory. Synchronises the CTA."""
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    inclusive = running_sum(own, lane)
    if lane == WARP_THREADS - 1:
        totals[warp] = inclusive
    cute.arch.sync_threads()
    before = inclusive - own
    for other in cutlass.range_constexpr(config.shape.warps):
        before += Int32(cutlass.select_(Boolean(warp > other), totals[other], Int32(0)))
    return before


@cute.jit
def list_work(config: cutlass.Constexpr, starts, totals, work, thread):
    """Write the list of work: the end of each class of entries, then the entries (expert, first row, rows).

    An expert's rows are cut into entries of the widest class's width; its last entry belongs to the narrowest class
    that holds it. Entries are ordered by class, then by expert.
    """
    share, heads = -(-config.experts // config.threads), head_rows(config.widths)
    end = Int32(0)
    for number in cutlass.range_constexpr(len(config.widths)):
        own = Int32(0)
        for i in cutlass.range(share, unroll=1):
            expert = thread * share + i
            if expert < config.experts:
                own += entries_of(config, number, rows_of(starts, expert))
        entry = end + sum_before(config, own, totals, thread) + (heads - 1)
        for warp in cutlass.range_constexpr(config.shape.warps):
            end += totals[warp]
        for i in cutlass.range(share, unroll=1):
            expert = thread * share + i
            if expert < config.experts:
                rows = rows_of(starts, expert)
                begin = Int32(0)
                if cutlass.const_expr(number > 0):
                    begin = rows // config.widths[0] * config.widths[0]
                for j in cutlass.range(entries_of(config, number, rows), unroll=1):
                    entry += 1
                    at = begin + j * config.widths[0]
                    work[entry, 0] = expert
                    work[entry, 1] = starts[expert] + at
                    work[entry, 2] = cutlass.min(rows - at, config.widths[0])
        if thread == 0:
            work[number // WORK_COLUMNS, number % WORK_COLUMNS] = end
        cute.arch.sync_threads()


def entries_of(config, number: int, rows) -> Int32:
    """Number of entries of a class that an expert with ``rows`` rows has."""
    narrower = (*config.widths, 0)[number + 1]
    left = rows % config.widths[0]
    last = Int32((left > narrower) & (left <= config.widths[number]))
    return last if number else rows // config.widths[0] + last


def rows_of(starts, expert) -> Int32:
    """Number of an expert's rows, from prefix sums."""
    return Int32(starts[expert + 1]) - Int32(starts[expert])
