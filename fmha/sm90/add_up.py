"""States of pieces of a tile, which paired consumers leave in the workspace and add up.

A state lies in memory as in registers: each thread stores and loads 16 bytes at a time, beside those of its neighbours.
A thread of another piece finds its own rows and columns where the thread with its number left them. O is in fp32, or
as means (``config.leaves_means``): divided by the rows' sums, in fp16; where values may be of any size
(``scales_means``), a row's numbers are multiplied by a power of two that brings the largest to the top of fp16's range.
A CTA leaves at most two states, of the first piece of one tile and of a further one of another.

Where a tile has few pieces (``adds_alone``), the last one's consumers add the other states to their registers. Where it
has more, all leave their states; then all but the first, whose CTA has further tiles, share out the columns: each adds
up its share of all states and writes the results. For each consumer the pieces of a tile meet at a word in global
memory, which the last one sets back (``common.workspace``). Whoever adds them up, pieces are added in the same order,
so the same call gives the same bits.

CTAs cannot wait for each other in a circle. A CTA waits without end only for CTAs with lower numbers: for the first
piece of a tile, which its CTA leaves before it waits for anything, or for all of few pieces, of which only the last one
waits.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, Uint32

from warpspec.common.device.warp import warp_anew
from warpspec.common.device.wgmma import WARP_ROWS, flat
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.common.workspace import EMPTY
from warpspec.fmha.device.combine import common_reference, finite
from warpspec.fmha.heads import PIECE_STATISTICS
from warpspec.fmha.line import FEW_PIECES, PAIR_WORDS
from warpspec.fmha.sm90.config import SCORED_BARRIER
from warpspec.fmha.sm90.fragment import PAIR, THREAD_ROWS, elements
from warpspec.fmha.sm90.narrow import factors as powers_of
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS
from warpspec.fmha.sm90.softmax import over_quad

VECTOR = 4  # fp32 numbers that a thread stores at a time; also those of a row's statistics
MEANS_VECTOR = 8  # fp16 numbers that a thread stores at a time
AHEAD = 16  # vectors in flight: O takes most registers
STATE_NUMBERS = 3
BATCH = 6  # pieces whose states are in flight
UNIT = 16  # numbers of a thread that are added up at a time: 32 columns
UNITS = 8  # of a consumer's columns
# The word where a tile's pieces meet counts, from EMPTY: those that came, but the first; the first; those that left
# before all had come; those that are done with the states.
CAME, FIRST, LEFT, DONE = 1, 1 << 15, 1 << 16, 1 << 32
PRESENT = LEFT - 1
PATIENCE = 1 << 12  # looks for later pieces, of some 0.7 us each
OWN, NONE, ALL = range(3)
assert PAIR_WORDS * VECTOR <= PIECE_STATISTICS, "the statistics of both consumers lie after O"


def vector_of(config) -> int:
    """Numbers of O that a thread stores at a time: 16 bytes."""
    return MEANS_VECTOR if config.leaves_means else VECTOR


def number_of(config) -> type:
    """Type of the numbers of O in a state."""
    return Float16 if config.leaves_means else Float32


def columns_of(work, operands, state) -> cute.Tensor:
    """(NUMBER, VECTOR): O of the thread in a state of the workspace. state: its number."""
    numbers, size = work.config.o_columns * WARPGROUP_ROWS // WARPGROUP_THREADS, vector_of(work.config)
    whole = cute.make_layout((size, WARPGROUP_THREADS, numbers // size, work.config.column_groups))
    begin = operands.pieces[state, None, None].iterator
    if work.config.leaves_means:
        begin = cute.recast_ptr(begin, dtype=Float16)
    return cute.make_tensor(begin, whole)[None, work.thread, None, work.column_group]


def statistics_of(work, operands, state) -> cute.Tensor:
    """(NUMBER, ROW): reference, maximum and sum of the rows of a state, and what means have to be multiplied by, after
    its O; each consumer has its own."""
    numbers = work.config.heads.v * WARPGROUP_ROWS + work.column_group * WARPGROUP_ROWS * VECTOR
    layout = cute.make_layout((VECTOR, WARPGROUP_ROWS))
    return cute.make_tensor(operands.pieces[state, None, None].iterator + numbers, layout)


def wait_for_threads(work) -> None:
    """A barrier of the consumer's threads."""
    cute.arch.barrier(barrier_id=SCORED_BARRIER + work.column_group, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def leave_state(work, state, operands):
    """Leave the state of the thread's rows in the piece's place of the workspace."""
    o, number = flat(work.mma.o), work.tile.piece.state
    if work.has_rows:
        references, maxima, sums = state
        totals = tuple(over_quad(total, lambda a, b: a + b) for total in sums)
        target = columns_of(work, operands, number)
        powers = (Float32(1.0),) * THREAD_ROWS
        if cutlass.const_expr(work.config.leaves_means):
            powers = leave_means(work.config, o, totals, target)
        else:
            for vector in cutlass.range_constexpr(cute.size(o) // VECTOR):
                cute.autovec_copy(cute.local_tile(o, (VECTOR,), (vector,)), target[None, vector])
        told = statistics_of(work, operands, number)
        for r in cutlass.range_constexpr(THREAD_ROWS):
            row = work.rows[r]
            if row.member == 0:
                values = cute.make_rmem_tensor(VECTOR, Float32)
                for i, value in enumerate((references[r], maxima[r], totals[r], powers[r])):
                    values[i] = value
                cute.autovec_copy(values, told[None, row.index])
    # A release is cumulative: one thread's covers what the others wrote before the barrier.
    wait_for_threads(work)


def inverse(total) -> Float32:
    """1 / total, or 0 for the sum of a row without keys."""
    return Float32(cutlass.select_(Boolean(total == Float32(0.0)), Float32(0.0), Float32(1.0) / total))


@cute.jit
def leave_means(
    config: cutlass.Constexpr, o: cute.Tensor, totals: cutlass.Constexpr, target: cute.Tensor
) -> tuple:
    """Leave O (n) of the thread's rows, divided by their sums, in ``target`` (NUMBER, VECTOR). O of a row without keys
    is 0, and stays so. Returns the powers of two that they have to be multiplied by."""
    factors, powers = tuple(inverse(total) for total in totals), (Float32(1.0),) * THREAD_ROWS
    if cutlass.const_expr(config.scales_means):
        found = [powers_of_means(o, r, factors[r]) for r in range(THREAD_ROWS)]
        factors = tuple(factor * up for factor, (up, _) in zip(factors, found, strict=True))
        powers = tuple(down for _, down in found)
    for vector in cutlass.range_constexpr(cute.size(o) // MEANS_VECTOR):
        means = cute.make_rmem_tensor(MEANS_VECTOR, Float16)
        for i in cutlass.range_constexpr(MEANS_VECTOR):
            means[i] = (o[vector * MEANS_VECTOR + i] * factors[i // PAIR % THREAD_ROWS]).to(Float16)
        cute.autovec_copy(means, target[None, vector])
    return powers


def powers_of_means(o: cute.Tensor, r: int, factor) -> tuple[Float32, Float32]:
    """Powers of two by which row r, times ``factor``, is multiplied for fp16, and by which it then has to be."""
    return powers_of((largest(o, r) * factor).bitcast(Uint32) >> 16)


def largest(o: cute.Tensor, r: int) -> Float32:
    """The largest magnitude in row r of the threads that share it. NaN is ignored."""
    chains = [Float32(0.0)] * 2
    for n, i in enumerate(elements(o, r)):
        chains[n % 2] = cute.arch.fmax(chains[n % 2], cute.math.absf(o[i]))
    return over_quad(cute.arch.fmax(*chains), cute.arch.fmax)


def weight_of_means(config, weight, power) -> Float32:
    """What a row of means is multiplied by. weight: of the row. power: from ``leave_means``."""
    return weight * power if config.scales_means else weight


@cute.jit
def announce(work, operands):
    """Tell the pieces of the tile that add up its states that this one's is there."""
    if work.thread == 0:
        came = Int64(cutlass.select_(Boolean(work.tile.piece.earlier == 0), Int64(FIRST), Int64(CAME)))
        word = operands.counters.iterator + (work.tile.piece.meeting * PAIR_WORDS + work.column_group)
        cute.arch.atomic_add(word, came, sem="release", scope="gpu")


def adds_alone(work) -> Boolean:
    """Whether the CTA with the tile's last piece adds up all of them; not known to the first piece. Without records
    that consumers can read again, shares would take registers that are needed for KV tiles."""
    piece = work.tile.piece
    return Boolean(piece.earlier + piece.later < FEW_PIECES) if work.config.rereads else Boolean(True)


@cute.jit
def add_earlier(work, state, operands, add: cutlass.Constexpr):
    """Add the states of the tile's earlier pieces, which are few, to O and to the state of the last one; returns the
    state. add: ``add_state``, or what takes its place."""
    piece = work.tile.piece
    if piece.earlier > 0:
        if work.thread == 0:
            number = piece.meeting * PAIR_WORDS + work.column_group
            everyone, seen = Int64(EMPTY) + Int64(FIRST) + Int64(piece.earlier - 1), Int64(EMPTY)
            while seen != everyone:
                seen = cute.arch.load(operands.counters.iterator + number, Int64, sem="acquire", scope="gpu")
            operands.counters[number] = Int64(EMPTY)
        wait_for_threads(work)
    states = Int32(cutlass.select_(Boolean(work.has_rows), Int32(piece.earlier), Int32(0)))
    for i in cutlass.range(states, unroll=1):
        state = add(work, state, operands, piece.state_of(piece.earlier - 1 - i))
    return state


@cute.jit
def take_task(work, operands) -> Int32:
    """Tell the other pieces that this one's state is there, and wait for theirs. Returns which columns this piece adds
    up: OWN, its share; NONE; or ALL. By one thread.

    The first piece's CTA has a lower number and leaves that state before all else: a piece waits for it however long it
    takes. CTAs of other pieces may start only when this one has ended, if SMs are few: a piece looks for them PATIENCE
    times, then tells so and leaves. The last one to come learns of it, and adds up all columns.
    """
    piece, task = work.tile.piece, Int32(OWN)
    word = operands.counters.iterator + (piece.meeting * PAIR_WORDS + work.column_group)
    everyone = Int64(FIRST) + Int64(piece.earlier + piece.later)
    seen = cute.arch.atomic_add(word, Int64(CAME), sem="acq_rel", scope="gpu") - Int64(EMPTY - CAME)
    waits = Boolean((seen & Int64(PRESENT)) != everyone)
    last, looks = Boolean(not waits), Int32(0)
    while waits:
        told = cute.arch.load(word, Int64, sem="acquire", scope="gpu")
        seen = told - Int64(EMPTY)
        waits = Boolean((seen & Int64(PRESENT)) != everyone)
        looks += 1
        if waits & Boolean(looks > PATIENCE) & Boolean((seen & Int64(FIRST)) != Int64(0)):
            found = cute.arch.atomic_cas(word, cmp=told, val=told + Int64(LEFT), sem="relaxed", scope="gpu")
            if found == told:
                task, waits = Int32(NONE), Boolean(False)
    if Boolean(task == OWN) & Boolean((seen & Int64(DONE - LEFT)) != Int64(0)):
        task = Int32(cutlass.select_(last, Int32(ALL), Int32(NONE)))
    return task


@cute.jit
def share_of(work, operands) -> tuple:
    """(begin, step, thread): the units of columns that this warp adds up, of a tile with many pieces, and as which
    thread; begin is UNITS if there are none. The piece has left its state.

    If one or two warps have all rows of the tile, the others stand in for them, and take units of their own.
    """
    piece = work.tile.piece
    words = cute.make_tensor(cute.recast_ptr(work.shared.sums, dtype=Int32), cute.make_layout(1 << 16))
    place = work.config.task_place + work.column_group
    if work.thread == 0:
        words[place] = take_task(work, operands)
    wait_for_threads(work)
    task, begin, step = words[place], piece.earlier - 1, piece.earlier + piece.later
    begin = Int32(cutlass.select_(Boolean(task == ALL), Int32(0), begin))
    step = Int32(cutlass.select_(Boolean(task == ALL), Int32(1), step))
    rows, warps = work.tile.row_count, WARPGROUP_ROWS // WARP_ROWS
    shift = Int32(rows > WARP_ROWS) + Int32(rows > 2 * WARP_ROWS)  # 2^shift warps have rows
    warp = warp_anew() % warps
    group = warp >> shift
    begin, step = begin + step * group, step * (warps >> shift)
    own = warp - (group << shift)
    idle = Boolean(task == NONE) | Boolean(own * WARP_ROWS >= rows)
    begin = Int32(cutlass.select_(idle, Int32(UNITS), begin))
    return begin, step, own * WARP_THREADS + work.thread % WARP_THREADS


@cute.jit
def finish_share(work, operands):
    """Tell that this piece needs the word no more; the last one sets it back. It orders nothing: states are not written
    again before the next launch."""
    piece = work.tile.piece
    if work.thread == 0:
        word = operands.counters.iterator + (piece.meeting * PAIR_WORDS + work.column_group)
        seen = cute.arch.atomic_add(word, Int64(DONE), sem="relaxed", scope="gpu") - Int64(EMPTY - DONE)
        if seen // Int64(DONE) == Int64(piece.earlier + piece.later):
            cute.arch.store(word, Int64(EMPTY), sem="relaxed", scope="gpu")


@cute.jit
def add_unit(work, operands, unit, o):
    """Add up a unit of the thread's columns over all pieces of a tile, into o (n). Returns the rows' state over all
    pieces. States and their statistics are loaded together, so that a batch of pieces takes one latency."""
    piece = work.tile.piece
    numbers = cute.make_rmem_tensor((STATE_NUMBERS, THREAD_ROWS), Float32)
    for r in cutlass.range_constexpr(THREAD_ROWS):
        numbers[0, r], numbers[1, r], numbers[2, r] = -Float32.inf, -Float32.inf, Float32(0.0)
    count = piece.earlier + piece.later + 1
    o.fill(0.0)
    for begin in cutlass.range(0, count, BATCH, unroll=1):
        size, number_type = vector_of(work.config), number_of(work.config)
        loaded = cute.make_rmem_tensor((size, UNIT // size, BATCH), number_type)
        told = cute.make_rmem_tensor((VECTOR, THREAD_ROWS, BATCH), Float32)
        for i in cutlass.range_constexpr(BATCH):
            number = piece.state_of(cutlass.min(begin + i, count - 1))
            # Behind the last piece, all threads load the same vectors, which costs little.
            thread = Int32(cutlass.select_(Boolean(begin + i < count), Int32(work.thread), Int32(0)))
            found = columns_of(replace(work, thread=thread), operands, number)
            statistics = statistics_of(work, operands, number)
            for vector in cutlass.range_constexpr(UNIT // size):
                cute.autovec_copy(found[None, unit * (UNIT // size) + vector], loaded[None, vector, i])
            for r in cutlass.range_constexpr(THREAD_ROWS):
                cute.autovec_copy(statistics[None, work.rows[r].index], told[None, r, i])
        for r in cutlass.range_constexpr(THREAD_ROWS):
            highest = numbers[0, r]
            for i in cutlass.range_constexpr(BATCH):
                inside = Boolean(begin + i < count)
                told[0, r, i] = Float32(cutlass.select_(inside, told[0, r, i], -Float32.inf))
                highest = cute.arch.fmax(highest, told[0, r, i])
                numbers[1, r] = cute.arch.fmax(numbers[1, r], told[1, r, i])
            own = cute.math.exp2(numbers[0, r] - finite(highest), fastmath=True)
            numbers[0, r], total = highest, numbers[2, r] * own
            for at in elements(o, r):
                o[at] = o[at] * own
            for i in cutlass.range_constexpr(BATCH):
                factor = cute.math.exp2(told[0, r, i] - finite(highest), fastmath=True)
                total += told[2, r, i] * factor
                if cutlass.const_expr(work.config.leaves_means):
                    factor = weight_of_means(work.config, told[2, r, i] * factor, told[3, r, i])
                values = flat(loaded[None, None, i])
                for at in elements(o, r):
                    o[at] += values[at].to(Float32) * factor
            numbers[2, r] = total
    once = tuple(  # one of the threads that share a row has its sum
        Float32(cutlass.select_(Boolean(work.rows[r].member == 0), numbers[2, r], Float32(0.0)))
        for r in range(THREAD_ROWS)
    )
    return (
        tuple(numbers[0, r] for r in range(THREAD_ROWS)),
        tuple(numbers[1, r] for r in range(THREAD_ROWS)),
        once,
    )


@cute.jit
def add_state(work, state, operands, number):
    """Add a state of the workspace; returns the rows' new state. References are in log2 units, so the factors of either
    O are powers of two of the differences."""
    o, found = flat(work.mma.o), columns_of(work, operands, number)
    told, new, kept, added = statistics_of(work, operands, number), [], [], []
    for r in cutlass.range_constexpr(THREAD_ROWS):
        row, (reference, maximum, total) = work.rows[r], (one[r] for one in state)
        other = cute.make_rmem_tensor(VECTOR, Float32)
        cute.autovec_copy(told[None, row.index], other)
        highest, own, factor = common_reference(reference, other[0])
        once = Float32(cutlass.select_(Boolean(row.member == 0), other[2] * factor, Float32(0.0)))
        new.append((highest, cute.arch.fmax(maximum, other[1]), total * own + once))
        kept.append(own)
        if work.config.leaves_means:
            factor = weight_of_means(work.config, other[2] * factor, other[3])
        added.append(factor)
    size = vector_of(work.config)
    for first in cutlass.range_constexpr(0, cute.size(o) // size, AHEAD):
        loaded = cute.make_rmem_tensor((size, AHEAD), number_of(work.config))
        for i in cutlass.range_constexpr(AHEAD):
            cute.autovec_copy(found[None, first + i], loaded[None, i])
        for vector in cutlass.range_constexpr(AHEAD):
            for i in cutlass.range_constexpr(size):
                at, r = (first + vector) * size + i, i // PAIR % THREAD_ROWS
                o[at] = o[at] * kept[r] + loaded[i, vector].to(Float32) * added[r]
    return tuple(zip(*new, strict=True))
