"""A consumer's steps: scores of its 64 keys, softmax over the keys of both consumers, P, O of its value columns.

In S^T and O^T a column is a row of the task (a query of a head), and a row is a key or a value column.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Uint32

from warpspec.common.device.wgmma import PAIR, QUAD, THREAD_ROWS, WARP_ROWS
from warpspec.common.device.words import shared_vector
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS, WORD_BYTES
from warpspec.common.memory import ROW_BYTES
from warpspec.fmha.device.softmax import move_reference
from warpspec.fmha.sm90.narrow import SWIZZLE_ROWS
from warpspec.latent.gathered.transposed.config import (
    CONSUMERS,
    FLAGS,
    KEY_BYTES,
    MAXIMA_BARRIER,
    UNIT_KEYS,
    UNITS,
    WEIGHTS_BARRIER,
)
from warpspec.latent.gathered.transposed.maxima import column_of, number_of, ordered, over_lanes
from warpspec.latent.gathered.transposed.products import ROWS_APART, add_values, key_of, multiply_queries

WARPS = WARPGROUP_THREADS // WARP_THREADS
BATCH = 8  # columns whose weights are computed together
# One bit of each byte of a word: the lowest, all of a magnitude, the sign.
ALL_BYTES, MAGNITUDES, SIGNS = 0x01010101, 0x7F7F7F7F, 0x80808080


@cute.jit
def attend(role, task, use, step_use):
    """Compute O^T of a task that has keys, in ``role.mma.o``; returns its state.

    A state is (place, sums): which of the two places in shared memory has the columns' references, and the columns'
    sums over the thread's keys. use, step_use: numbers of units and of steps before this task.
    """
    for o in role.mma.o:
        o.fill(0.0)
    columns = role.config.columns
    state = (Int32(0), (Float32(0.0),) * columns)
    for step in cutlass.range((task.span.count + 1) // CONSUMERS, unroll=1):
        state = take_step(role, task, use, step * CONSUMERS, step_use + step, state)
    return state


@cute.jit
def score(role, task, use, first):
    """Compute S^T of the consumer's KV tile: consumer 0 has the span's tile number ``first``, consumer 1 the next one.
    If the span ends before it, all scores are -inf. Consumes full. use: number of units before this task."""
    s = role.mma.s
    own, warp = first + role.consumer, role.thread // WARP_THREADS
    if own < task.span.count:
        unit = use + own * UNITS + warp // (WARPS // UNITS)
        role.channels["full"].wait(unit)
        multiply_queries(role, role.unit_at(unit))
        here = role.shared.masks[role.channels["full"].stage(unit)] != Uint32(0)
        tile = task.span.tile(own)
        if is_partial(task, tile) | ~here:
            hide(role, task, tile, here)
    else:
        s.fill(-Float32.inf)


def is_partial(task, tile) -> Boolean:
    """Whether some row does not see some key of a KV tile."""
    return Boolean((tile + 1) * task.config.tile_n > ends_of(task)[0])


@cute.jit
def take_step(role, task, use, first, number, state):
    """Take a step: the span's KV tiles number ``first`` and, if there is one, the next. Returns the new state.

    Consumes full, p_empty; produces empty, p_empty. number: number of steps before this one, of all tasks.
    """
    config, count = role.config, task.span.count
    score(role, task, use, first)
    role.channels["p_empty"].wait_previous(number)
    state = weigh(role, number, state)
    if is_partial(task, task.span.tile(first + CONSUMERS - 1)):  # QK of both consumers is over
        own = first + role.consumer
        if (own < count) & is_partial(task, task.span.tile(own)):
            clear_unseen(role, task, use + own * UNITS, task.span.tile(own))
        barrier(config, MAXIMA_BARRIER)
    if first + 1 < count:
        add_values(role, use + first * UNITS, CONSUMERS)
    else:
        add_values(role, use + first * UNITS, 1)
    role.channels["p_empty"].arrive_warp(number)
    return state


def barrier(config, number: int) -> None:
    """A barrier of all consumers."""
    cute.arch.barrier(barrier_id=number, number_of_threads=config.consumer_threads)


def ends_of(task) -> tuple:
    """Ends of the keys that the task's first query sees, which may be below 0, and its last one."""
    span = task.span
    return span.all_end if task.first_end is None else task.first_end, span.some_end


def row_key(thread, r: int):
    """Key of a KV tile that row r of a thread's S^T stands for."""
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    return warp * WARP_ROWS + key_of(lane // QUAD) + r * ROWS_APART


def element(v: int, r: int) -> int:
    """Index among a product's registers of the thread's v-th column in its row r."""
    return v // PAIR * (PAIR * THREAD_ROWS) + r * PAIR + v % PAIR


@cute.jit
def hide(role, task, tile, here):
    """Set scores of keys that a column's query does not see to -inf. here: whether the tile's page is there."""
    config, s = role.config, role.mma.s
    member = role.thread % QUAD
    for v in cutlass.range_constexpr(config.columns):
        end = ends_of(task)[0] + column_of(v, member) // config.pack
        for r in cutlass.range_constexpr(THREAD_ROWS):
            seen = here & Boolean(tile * config.tile_n + row_key(role.thread, r) < end)
            i = element(v, r)
            s[i] = Float32(cutlass.select_(seen, s[i], -Float32.inf))


@cute.jit
def tell_maxima(role):
    """Raise the columns' maxima in shared memory to those of the warp's keys."""
    config, s, lane = role.config, role.mma.s, role.thread % WARP_THREADS
    values = [cute.arch.fmax(s[element(v, 0)], s[element(v, 1)]) for v in range(config.columns)]
    found, first = over_lanes(values, lane, cute.arch.fmax)
    for i in cutlass.range_constexpr(len(found)):
        column = column_of_any(first + i, lane % QUAD)
        address = role.shared.maxima.iterator.toint() + column * WORD_BYTES
        raise_to(address, ordered(found[i]))


def raise_to(address, value) -> None:
    """Raise a number in shared memory, Int32, to a value."""
    cute.arch.inline_ptx("red.shared.max.s32 [{$r0}], {$r1};", read_only_args=[address, Int32(value)])


def column_of_any(v, member) -> Int32:
    """``column_of`` for a number that only the device knows."""
    return column_of(Int32(v), member)


@cute.jit
def weigh(role, number, state):
    """Turn S^T into P^T, in shared memory; returns the new state.

    P is computed with the references as they are. If that makes a weight of any thread too large, the flag says so, and
    all threads of both consumers take the largest scores, move their references, rescale O^T, and compute P again. That
    is so in a task's first steps. WEIGHTS_BARRIER stands between P, or the flag, and their readers; MAXIMA_BARRIER
    between the maxima and theirs.
    """
    config, shared = role.config, role.shared
    place, sums = state
    columns = own_columns(role)
    new, largest = exponentiate(role, place, None, sums)
    flag = shared.flags[None, number % FLAGS]
    some = cute.arch.vote_any_sync(Boolean(largest > Float32(2.0**config.output.rescale_threshold)))
    if some & Boolean(role.thread % WARP_THREADS == 0):
        raise_to(flag.iterator.toint(), number)
    cute.arch.fence_view_async_shared()
    barrier(config, WEIGHTS_BARRIER)
    if flag[0] == number:
        tell_maxima(role)
        barrier(config, MAXIMA_BARRIER)
        references, sums = move_references(role, place, sums)
        place = 1 - place
        new, _ = exponentiate(role, place, references, sums)
        if role.number < QUAD:  # lanes that have all columns together; read after the next barrier
            for v in cutlass.range_constexpr(config.columns):
                shared.references[columns[v], place] = references[v]
        cute.arch.fence_view_async_shared()
        barrier(config, WEIGHTS_BARRIER)
    return place, new


def own_columns(role) -> list:
    """The thread's columns of S^T and O^T."""
    return [column_of(v, role.thread % QUAD) for v in range(role.config.columns)]


@cute.jit
def move_references(role, place, sums) -> tuple:
    """The columns' references, moved to the largest scores where these have outgrown them. Rescales O^T, and returns
    (references, sums)."""
    config, shared = role.config, role.shared
    found, moves = [], Boolean(False)
    columns = own_columns(role)
    for v in cutlass.range_constexpr(config.columns):
        reference, factor, moved = move_reference(
            shared.references[columns[v], place],
            number_of(shared.maxima[columns[v]]),
            shared.factors[columns[v]],
            config.output.rescale_threshold,
        )
        moves = moves | moved
        found.append((reference, sums[v] * factor, factor))
    if cute.arch.vote_any_sync(moves):
        for o in role.mma.o:
            for v in cutlass.range_constexpr(config.columns):
                for r in cutlass.range_constexpr(THREAD_ROWS):
                    i = element(v, r)
                    o[i] = o[i] * found[v][2]
    return [one[0] for one in found], tuple(one[1] for one in found)


@cute.jit
def exponentiate(role, place, references: cutlass.Constexpr, sums) -> tuple:
    """Write P^T, of S^T and the columns' references, to shared memory. references: None for those at a place of shared
    memory. Returns (sums with this step's weights, the thread's largest weight)."""
    config, shared, s = role.config, role.shared, role.mma.s
    lane, warp = role.thread % WARP_THREADS, role.thread // WARP_THREADS
    g = lane // QUAD
    chunk = 2 * warp + g // QUAD
    base = shared.p.toint() + role.consumer * config.p_bytes + g % QUAD * WORD_BYTES
    columns = own_columns(role)
    new, largest = [], [Float32(0.0)] * 2
    for first in cutlass.range_constexpr(0, config.columns, BATCH):
        batch, words = range(first, min(first + BATCH, config.columns)), []
        # All loads of a batch come before its P is stored: ptxas keeps them in order.
        units = [shared.factors[columns[v]] for v in batch]
        if cutlass.const_expr(references is None):
            offsets = [shared.references[columns[v], place] for v in batch]
        else:
            offsets = [references[v] for v in batch]
        for v in batch:
            unit, offset = units[v - first], offsets[v - first]
            weights = [
                cute.math.exp2(s[element(v, r)] * unit - offset, fastmath=True) for r in range(THREAD_ROWS)
            ]
            new.append(sums[v] + (weights[0] + weights[1]))
            pair = cute.make_rmem_tensor(THREAD_ROWS, Float16)
            for r in cutlass.range_constexpr(THREAD_ROWS):
                pair[r] = weights[r].to(Float16)
                largest[r] = cute.arch.fmax(largest[r], weights[r])
            words.append(cute.recast_tensor(pair, Uint32)[0])
        for v in batch:
            swizzled = chunk ^ (columns[v] % SWIZZLE_ROWS)
            address = base + columns[v] * ROW_BYTES + swizzled * VECTOR_BYTES
            shared_vector(address, 1)[0] = words[v - first]
    return tuple(new), cute.arch.fmax(*largest)


@cute.jit
def clear_unseen(role, task, use, tile):
    """Clear what the consumer's V of a KV tile may not have where P is 0, as 0 times NaN is NaN: all codes of keys that
    no row sees, and NaN in those that some row does not see. As K is V, a NaN makes all of O NaN in every row that sees
    it, by its score. All QK of the tile is over. use: of its first unit."""
    first, last = ends_of(task)
    start = tile * role.config.tile_n
    clear_nan(role, use, cutlass.max(first - start, 0), cutlass.min(last - start, role.config.tile_n))
    clear_keys(role, use, last - start)


@cute.jit
def clear_nan(role, use, begin, end):
    """Zero NaN among the codes of the consumer's keys ``begin`` to ``end``, of which there are few."""
    words = role.config.heads.v // WORD_BYTES
    for number in cutlass.range(begin * words + role.thread, end * words, WARPGROUP_THREADS, unroll=1):
        key, word = number // words, number % words
        unit = role.unit_at(use + key // UNIT_KEYS)
        place = shared_vector(unit + key % UNIT_KEYS * KEY_BYTES + word * WORD_BYTES, 1)
        value = place[0]
        # Bit 7 of each byte that is NaN, whose magnitude is the largest, spread over the byte.
        marks = ((value & Uint32(MAGNITUDES)) + Uint32(ALL_BYTES)) & Uint32(SIGNS)
        place[0] = value & ~((marks >> 7) * Uint32(0xFF))


@cute.jit
def clear_keys(role, use, end):
    """Zero the codes of the consumer's keys from ``end`` on, a key by a warp at a time."""
    zeros = cute.make_rmem_tensor(VECTOR_BYTES // WORD_BYTES, Uint32)
    zeros.fill(0)
    warp, lane = role.thread // WARP_THREADS, role.thread % WARP_THREADS
    assert role.config.heads.v == WARP_THREADS * VECTOR_BYTES
    for half in cutlass.range_constexpr(UNITS):
        unit = role.unit_at(use + half) + lane * VECTOR_BYTES
        for first in cutlass.range_constexpr(0, UNIT_KEYS, WARPS):
            if half * UNIT_KEYS + first + warp >= end:
                place = unit + (first + warp) * KEY_BYTES
                cute.autovec_copy(zeros, shared_vector(place, VECTOR_BYTES // WORD_BYTES))
