"""The runs of packed requests whose queries all see all of their keys: laid out by one CTA of the first kernel, read by
the main kernel (``fmha.backward.runs``)."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward import pieces, runs
from warpspec.fmha.backward.device.blocks import FAR
from warpspec.fmha.backward.device.lengths import parts_of
from warpspec.fmha.device.packed import entry
from warpspec.fmha.device.request import request_at


class Requests(NamedTuple):
    """What a CTA knows of all requests, in shared memory: steps of a key tile; key tiles; what they are sorted by; the
    numbers of the requests in order."""

    steps: cute.Tensor
    tiles: cute.Tensor
    keys: cute.Tensor
    order: cute.Tensor


class Limits(NamedTuple):
    """least: steps of the shortest piece. kept: SMs for which a piece leaves work, 0.0 if all have ``least`` steps at
    most. sms: SMs. further: how many pieces there may be beside one of each key tile."""

    least: Float32
    kept: Float32
    sms: Int32
    further: Int32


class Deal(NamedTuple):
    """What candidates are dealt by. free: how many SMs are free at each time, of each candidate, in shared memory. own:
    number of this thread's candidate. scale: times in a step. start: steps that a CTA takes beside its own."""

    free: cute.Tensor
    own: Int32
    scale: Float32
    start: Float32


@cute.jit
def lay_out_requests(
    config: cutlass.Constexpr, operands, length: cutlass.Constexpr, slices, threads: cutlass.Constexpr
):
    """Write all runs into ``tile_order``, and into its last row how many CTAs they have and how many there are. All
    threads of one CTA share the work."""
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    layout = cute.make_layout(runs.MOST_REQUESTS)
    found = Requests(*(smem.allocate_tensor(Int32, layout, byte_alignment=4) for _ in Requests._fields))
    count = cutlass.min(cute.size(operands.cu_seqlens_k) - 1, runs.MOST_REQUESTS)
    rows = operands.k.shape[2] * slices
    group = operands.q.shape[2] // rows
    for request in cutlass.range(thread, count, threads, unroll=1):
        place = request_at(config.requests, operands, request)
        steps = (place.seq_q + config.tile_m - 1) // config.tile_m * group
        found.steps[request] = steps
        found.keys[request] = steps
        found.tiles[request] = (place.length + config.tile_n - 1) // config.tile_n
    cute.arch.sync_threads()
    sort(found, count, thread, threads)
    limits = Limits(Float32(FAR), Float32(0.0), Int32(1), Int32(0))
    if cutlass.const_expr(config.cuts_on_device):
        limits = limits_of(found, length, rows, count, smem, threads)
        for request in cutlass.range(thread, count, threads, unroll=1):
            steps = found.steps[request]
            parts = parts_of(steps.to(Float32), limits.least)
            size = (steps + parts - 1) // parts
            found.keys[request] = Int32(cutlass.select_(Boolean(limits.kept > 0.0), steps, size))
        cute.arch.sync_threads()
        sort(found, count, thread, threads)
    if thread < WARP_THREADS:
        lay_out(found, rows, count, limits, (operands.tile_order, operands.tile_pieces))


@cute.jit
def sort(found: cutlass.Constexpr, count, thread, threads: cutlass.Constexpr):
    """Sort the requests by their keys, the greatest first, ties in order."""
    for own in cutlass.range(thread, count, threads, unroll=1):
        key, before = found.keys[own], Int32(0)
        for other in cutlass.range(count, unroll=4):
            its = found.keys[other]
            first = Boolean(its > key) | (Boolean(its == key) & Boolean(other < own))
            before += Int32(first)
        found.order[before] = own
    cute.arch.sync_threads()


@cute.jit
def limits_of(
    found: cutlass.Constexpr, length: cutlass.Constexpr, rows, count, smem, threads: cutlass.Constexpr
) -> Limits:
    """Choose the limits of all pieces. Called by a whole CTA."""
    lane = cute.arch.lane_idx()
    total, tiles, most = Int32(0), Int32(0), Int32(0)
    for request in cutlass.range(lane, count, WARP_THREADS, unroll=1):
        steps = found.steps[request]
        total += steps * found.tiles[request]
        tiles += found.tiles[request]
        most = cutlass.max(most, steps)
    total, tiles = cute.arch.warp_reduction_sum(total), cute.arch.warp_reduction_sum(tiles)
    most = cutlass.max(cute.arch.warp_reduction(most, cutlass.max), 1)
    sms = Int32(rows.to(Float32) / length.share + 0.5)
    least, kept = Float32(0.0), Float32(0.0)
    if total.to(Float32) * length.share >= runs.DEALT_STEPS:
        least, kept = dealt_limits(found, length, rows, count, (total, tiles, sms), smem, threads)
    else:
        least, kept = expected_limits(found, length, rows, count, (total, most, sms))
    return Limits(least, kept, sms, Int32(length.further))


@cute.jit
def dealt_limits(
    found: cutlass.Constexpr,
    length: cutlass.Constexpr,
    rows,
    count,
    sums: cutlass.Constexpr,
    smem,
    threads: cutlass.Constexpr,
) -> tuple:
    """(least, kept) of the candidate that is done first. sums: (steps of all tiles of a row, tiles, SMs). Each warp
    deals some candidates, a lane for each. Called by a whole CTA."""
    thread, _, _ = cute.arch.thread_idx()
    total, tiles, sms = sums
    lane, each = thread % WARP_THREADS, runs.CANDIDATES * WARP_THREADS // threads
    free = smem.allocate_tensor(Int32, cute.make_layout((runs.TIMES + 1) * runs.CANDIDATES), byte_alignment=4)
    times = smem.allocate_tensor(Float32, cute.make_layout(runs.CANDIDATES), byte_alignment=4)
    for i in cutlass.range(thread, cute.size(free), threads, unroll=1):
        free[i] = Int32(cutlass.select_(Boolean(i < runs.CANDIDATES), sms, Int32(0)))
    cute.arch.sync_threads()
    quantum = runs.quantum_of(length, total.to(Float32), tiles.to(Float32))
    if lane < each:
        deal = Deal(
            free, thread // WARP_THREADS * each + lane, cute.arch.rcp_approx(quantum), Float32(length.start)
        )
        times[deal.own] = candidate_steps(found, length, rows, count, sms, deal, quantum)
    cute.arch.sync_threads()
    time = times[lane]
    best = cute.arch.warp_reduction(time, cute.arch.fmin)
    chosen = Int32(cutlass.select_(Boolean(time == best), lane, Int32(0)))
    return limits_of_candidate(length, sms, cute.arch.warp_reduction(chosen, cutlass.max))


@cute.jit
def candidate_steps(
    found: cutlass.Constexpr, length: cutlass.Constexpr, rows, count, sms, deal: cutlass.Constexpr, quantum
) -> Float32:
    """``runs.dealt_steps`` of this thread's candidate."""
    limits = Limits(*limits_of_candidate(length, sms, deal.own), sms, Int32(length.further))
    _, cut, _, last = lay_out(found, rows, count, limits, None, deal)
    return last.to(Float32) * quantum + length.cost / rows.to(Float32) * cut.to(Float32)


def limits_of_candidate(length, sms, number) -> tuple:
    """(least, kept) as in ``Limits``."""
    kept, least = runs.candidate(number, exp2=cute.math.exp2)
    return length.start * least, sms.to(Float32) * kept


@cute.jit
def expected_limits(
    found: cutlass.Constexpr, length: cutlass.Constexpr, rows, count, sums: cutlass.Constexpr
) -> tuple:
    """(least, kept) by formulas: the best of the lengths that ``pieces`` considers, or pieces that shrink. sums: (steps
    of all tiles of a row, of the longest tile, SMs). Called by whole warps, a lane for each length."""
    lane = cute.arch.lane_idx()
    total, most, sms = sums
    own = Int32(pieces.limit_of(length, total.to(Float32), lane.to(Float32), exp2=cute.math.exp2)) + 1
    own = cutlass.max(own, lane + 1)
    own = Int32(cutlass.select_(Boolean(lane == pieces.LENGTHS - 1), most, cutlass.min(own, most)))
    expected = expected_of(found, length, total, count, own)
    best = cute.arch.warp_reduction(expected, cute.arch.fmin)
    chosen = Int32(cutlass.select_(Boolean(expected == best), own, Int32(0)))
    chosen = cute.arch.warp_reduction(chosen, cutlass.max)
    further = cutlass.max(Int32(length.further), 1)
    # With all pieces that there is room for.
    fewest = total.to(Float32) * rows.to(Float32) / further.to(Float32)
    chosen = cutlass.max(chosen, Int32(cute.math.ceil(fewest)))

    least = length.start * runs.LEAST
    shrinking = Limits(least, sms.to(Float32) * runs.KEPT, sms, Int32(length.further))
    number, time = rows.to(Float32), best
    if total.to(Float32) * length.share > least * runs.SHRINKS:
        ctas, cut, first, _ = lay_out(found, rows, count, shrinking, None)
        layout, all_steps = (ctas.to(Float32), cut.to(Float32)), total.to(Float32) * number
        time = runs.expected_steps(length, number, all_steps, layout, first, least, maximum=cute.arch.fmax)
    shrinks = Boolean(time < best)
    least = Float32(cutlass.select_(shrinks, least, chosen.to(Float32)))
    return least, Float32(cutlass.select_(shrinks, shrinking.kept, Float32(0.0)))


@cute.jit
def expected_of(found: cutlass.Constexpr, length: cutlass.Constexpr, total, count, own) -> Float32:
    """``pieces.expected_steps`` of pieces of at most this many steps."""
    limit, number, cut, long, long_steps, longest = own.to(Float32), *(Float32(0.0),) * 5
    zero = Float32(0.0)
    for request in cutlass.range(count, unroll=1):
        its, tiles = found.steps[request].to(Float32), found.tiles[request].to(Float32)
        parts = parts_of(its, limit).to(Float32)
        size = its * cute.arch.rcp_approx(parts)
        number += tiles * parts
        cut += cutlass.select_(Boolean(parts > 1.0), tiles * parts, zero)
        is_long = Boolean(size >= limit * pieces.LONG)
        long += cutlass.select_(is_long, tiles * parts, zero)
        long_steps += cutlass.select_(is_long, tiles * its, zero)
        longest = cute.arch.fmax(longest, size)
    load = pieces.Load(number, cut, long, long_steps, longest)
    extremes = {"maximum": cute.arch.fmax, "minimum": cute.arch.fmin, "ceil": cute.math.ceil}
    return pieces.expected_steps(length, total.to(Float32), load, **extremes)


@cute.jit
def lay_out(
    found: cutlass.Constexpr,
    rows,
    count,
    limits: cutlass.Constexpr,
    tables: cutlass.Constexpr,
    deal: cutlass.Constexpr = None,
) -> tuple:
    """``runs.lay_out``. Returns (CTAs, pieces of key tiles that are cut, steps of the longest piece, the time at which
    the last is done). tables: (``tile_order``, ``tile_pieces`` or None), where runs are written by a whole warp, each
    lane of which does the same; None: they are only counted. deal: None if pieces are not dealt, and the last result
    means nothing."""
    least, kept, sms, further = limits
    left, longest, limit = Float32(0.0), Float32(0.0), least
    for request in cutlass.range(count, unroll=1):
        left += (found.steps[request] * found.tiles[request]).to(Float32)
    left *= rows.to(Float32)
    inverse = Float32(cutlass.select_(Boolean(kept > 0.0), cute.arch.rcp_approx(kept), Float32(0.0)))
    number, cta, place, round_end = Int32(-1), Int32(0), Int32(0), Int32(0)
    time, free, last = Int32(0), sms, Int32(0)
    for i in cutlass.range(count, unroll=1):
        request = found.order[i]
        tiles, steps = found.tiles[request], found.steps[request].to(Float32)
        first, before, own, cuts = Int32(0), Int32(0), number + 1, Boolean(False)
        while first < tiles * rows:
            if cta >= round_end:
                round_end = (cta // sms + 1) * sms
                limit = cute.arch.fmax(least, left * inverse)
            parts = parts_of(steps, limit)
            parts = Int32(cutlass.select_(Boolean(parts - 1 <= further), parts, Int32(1)))
            rest = tiles * rows - first
            room = further // cutlass.max(parts - 1, 1)
            rest = cutlass.min(rest, Int32(cutlass.select_(Boolean(parts > 1), room, rest)))
            fit = (round_end - cta + parts - 1) // parts
            # Tiles that are whole now are whole in further rounds, too.
            more = (left - (fit.to(Float32) + kept) * steps) / cute.arch.fmax(steps * sms.to(Float32), 1.0)
            rounds = cutlass.max(Int32(cute.math.floor(more)) + 1, 0)
            fit += Int32(cutlass.select_(Boolean(parts == 1), rounds * sms, Int32(0)))
            fit = Int32(cutlass.select_(Boolean(kept > 0.0) & Boolean(steps > 0.0), fit, rest))
            rest = cutlass.min(rest, fit)
            if parts != before:
                number += 1
                longest = cute.arch.fmax(longest, steps * cute.arch.rcp_approx(parts.to(Float32)))
                if cutlass.const_expr(tables is not None):
                    write_run(tables[0], number, (cta, request, first, parts, place, tiles))
            if cutlass.const_expr(deal is not None):
                size = steps * cute.arch.rcp_approx(parts.to(Float32))
                time, free, last = deal_pieces(deal, (time, free, last), rest * parts, size)
            before = parts
            cuts = cuts | Boolean(parts > 1)
            first += rest
            cta += rest * parts
            place += Int32(cutlass.select_(Boolean(parts > 1), rest * parts, Int32(0)))
            further -= rest * (parts - 1)
            left -= rest.to(Float32) * steps
        if cutlass.const_expr(tables is not None and tables[1] is not None):  # noqa: SIM102
            if cute.arch.lane_idx() == 0:
                tables[1][request, 0] = own
                tables[1][request, 1] = Int32(cutlass.select_(cuts, number + 1 - own, Int32(0)))
    if cutlass.const_expr(tables is not None):
        end = tables[0].shape[0] - 1
        if cute.arch.lane_idx() == 0:
            tables[0][end, 0] = cta
            tables[0][end, 1] = cutlass.min(number + 1, end)
    return cta, place, longest, last


@cute.jit
def deal_pieces(deal: cutlass.Constexpr, state: cutlass.Constexpr, count, steps) -> tuple:
    """Deal pieces of so many steps to the SMs. state: (time that has been reached, SMs free at it, time at which the
    last piece so far is done). Returns the next state."""
    time, free, last = state
    taken = cutlass.max(Int32((steps + deal.start) * deal.scale + 0.5), 1)
    while count > 0:
        moved, end = cutlass.min(free, count), cutlass.min(time + taken, runs.TIMES)
        place = end * runs.CANDIDATES + deal.own
        deal.free[place] = deal.free[place] + moved
        last = cutlass.max(last, Int32(cutlass.select_(Boolean(moved > 0), end, Int32(0))))
        count -= moved
        passes = Boolean(count > 0)
        time = cutlass.min(time + Int32(passes), runs.TIMES)
        following = deal.free[time * runs.CANDIDATES + deal.own]
        free = Int32(cutlass.select_(passes, following, free - moved))
        count = Int32(cutlass.select_(Boolean(time < runs.TIMES), count, Int32(0)))
    return time, free, last


@cute.jit
def write_run(table: cute.Tensor, number, run: cutlass.Constexpr):
    """Write a row of ``tile_order``, if there is room: cu_seqlens that go down may ask for more."""
    if (cute.arch.lane_idx() == 0) & (number < table.shape[0] - 1):
        for i in cutlass.range_constexpr(len(run)):
            table[number, i] = run[i]


@cute.jit
def find_run(table: cute.Tensor, which: cutlass.Constexpr, value, low, count) -> Int32:
    """The last of ``count`` runs from ``low`` on whose number ``which`` is at most ``value``. Called by a whole
    warp."""
    lane = cute.arch.lane_idx()
    while count > 1:
        step = (count + WARP_THREADS - 1) // WARP_THREADS
        probe = low + cutlass.min(lane * step, count - 1)
        begins = Boolean(table[probe, which] <= value)
        begun = cute.arch.popc(cute.arch.vote_ballot_sync(begins))
        passed = cutlass.min(cutlass.max(begun - 1, 0) * step, count - 1)
        low, count = low + passed, cutlass.min(step, count - passed)
    return low


@cute.jit
def pieces_of(table: cute.Tensor, tile_pieces: cute.Tensor, request, tile) -> tuple:
    """(place of its first piece's sums, pieces) of a key tile among those of a request's rows. Called by a whole
    warp, whose lanes read the request's runs together."""
    lane, last = cute.arch.lane_idx(), table.shape[0] - 2
    first, count = tile_pieces[request, 0], tile_pieces[request, 1]
    place, pieces, begun = Int32(0), Int32(1), Int32(0)
    while begun < count:
        run = cutlass.min(first + begun + lane, last)
        numbers = tuple(table[run, which] for which in (runs.FIRST_TILE, runs.RUN_PIECES, runs.FIRST_PLACE))
        begins = Boolean(begun + lane < count) & Boolean(numbers[0] <= tile)
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(begins))
        source = cutlass.max(passed - 1, 0)
        its_first, its_pieces, its_place = (cute.arch.shuffle_sync(each, source) for each in numbers)
        if passed > 0:
            pieces = its_pieces
            place = its_place + (tile - its_first) * its_pieces
        begun += WARP_THREADS
    return place, pieces


def slot_of(config, operands, request, number) -> Int32:
    """The number of a request's key tile among the key tiles of all requests, as in ``packed.request_of``."""
    keys, requests = operands.k.shape[1], cute.size(operands.cu_seqlens_k) - 1
    begins = entry(operands.cu_seqlens_k, request, keys) // config.tile_n
    slot = Int32(cutlass.select_(Boolean(number == 0), request, requests - 1 + begins + number))
    return cutlass.min(slot, keys // config.tile_n + requests - 1)
