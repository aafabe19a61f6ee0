"""Softmax over keys, which are rows of S^T: weights with references that lag, and what O^T is multiplied by where they
move. The score warpgroup's part that follows QK."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Uint32

from warpspec.common.device.wgmma import PAIR, QUAD, THREAD_ROWS, WARP_ROWS, flat, settle
from warpspec.common.device.words import load_shared, shared_vector
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS, WORD_BYTES
from warpspec.common.memory import ROW_BYTES
from warpspec.fmha.device.softmax import move_reference
from warpspec.fmha.heads import BLOCK
from warpspec.latent.gathered.raw.config import (
    FIRST_END,
    FIRST_TILE,
    FLAGS,
    LAST_END,
    MAXIMA_BARRIER,
    P_TURNS,
    SLOTS,
    SUMS_BARRIER,
    WEIGHTS_BARRIER,
)
from warpspec.latent.gathered.raw.record import write_row
from warpspec.latent.gathered.raw.values import half_of
from warpspec.latent.gathered.transposed.attend import (
    ALL_BYTES,
    MAGNITUDES,
    SIGNS,
    column_of_any,
    element,
    raise_to,
)
from warpspec.latent.gathered.transposed.maxima import (
    COLUMN_STEP,
    column_of,
    number_of,
    ordered,
    over_lanes,
)
from warpspec.latent.gathered.transposed.products import ROWS_APART

WARPS = WARPGROUP_THREADS // WARP_THREADS
BLOCK_WORDS = BLOCK // WORD_BYTES  # words of a key in a block of 64 columns
CHUNKS = BLOCK // VECTOR_BYTES

__all__ = ["clear_unseen", "hide", "leave_sums", "weigh"]


def barrier(number: int) -> None:
    """A barrier of the score warpgroup."""
    cute.arch.barrier(barrier_id=number, number_of_threads=WARPGROUP_THREADS)


def anew(number: Int32) -> Int32:
    """A number that the compiler takes for a new one: it keeps nothing that follows from it in registers while products
    take almost all of these."""
    words = cute.make_rmem_tensor(1, Int32)
    words[0] = number
    settle(words)
    return words[0]


def keys_of(role, number, use) -> tuple:
    """(first key of KV tile ``use``, ends of the keys that the first and last queries of task ``number`` see)."""
    words, slot = role.shared.record, number % SLOTS
    start = (words[FIRST_TILE, slot] + use) * role.config.tile_n
    return start, words[FIRST_END, slot], words[LAST_END, slot]


@cute.jit
def hide(role, number, use, here):
    """Set scores of keys that a column's query does not see to -inf, in KV tile ``use`` of all, which is one of task
    ``number``. here: whether the tile's page is there."""
    start, first_end, _ = keys_of(role, number, use)
    config, s, thread = role.config, flat(role.s), role.thread
    member, lane, warp = thread % QUAD, thread % WARP_THREADS, thread // WARP_THREADS
    for v in cutlass.range_constexpr(config.columns):
        end = first_end + column_of(v, member) // config.pack
        for r in cutlass.range_constexpr(THREAD_ROWS):
            key = start + warp * WARP_ROWS + lane // QUAD + r * ROWS_APART
            i = element(v, r)
            s[i] = Float32(cutlass.select_(here & Boolean(key < end), s[i], -Float32.inf))


@cute.jit
def weigh(role, number, place):
    """Turn S^T into P^T, in shared memory; returns the new place.

    P is computed with the references as they are, which lie at a place of shared memory. If that makes a weight of any
    thread too large, the flag says so, and all threads take the largest scores, move the references to the other place,
    leave the step's number and factors of O^T for the value warpgroups, and compute P again. WEIGHTS_BARRIER stands
    between the flag and its readers; MAXIMA_BARRIER between maxima, then references, and theirs. number: of the step.
    """
    config, shared = role.config, role.shared
    largest = exponentiate(role, number, place, False)
    flag = shared.flags[None, number % FLAGS]
    some = cute.arch.vote_any_sync(Boolean(largest > Float32(2.0**config.output.rescale_threshold)))
    if some & Boolean(role.thread % WARP_THREADS == 0):
        raise_to(flag.iterator.toint(), number)
    cute.arch.fence_view_async_shared()
    barrier(WEIGHTS_BARRIER)
    if flag[0] == number:
        tell_maxima(role)
        barrier(MAXIMA_BARRIER)
        move_references(role, number, place)
        place = 1 - place
        barrier(MAXIMA_BARRIER)
        exponentiate(role, number, place, True)
        cute.arch.fence_view_async_shared()
        barrier(WEIGHTS_BARRIER)
    return place


@cute.jit
def tell_maxima(role):
    """Raise the columns' maxima in shared memory to those of the warp's keys."""
    config, s, lane = role.config, flat(role.s), role.thread % WARP_THREADS
    values = [cute.arch.fmax(s[element(v, 0)], s[element(v, 1)]) for v in range(config.columns)]
    found, first = over_lanes(values, lane, cute.arch.fmax)
    for i in cutlass.range_constexpr(len(found)):
        column = column_of_any(first + i, lane % QUAD)
        raise_to(role.shared.maxima.iterator.toint() + column * WORD_BYTES, ordered(found[i]))


@cute.jit
def move_references(role, number, place):
    """Move the rows' references to the largest scores where these have outgrown them, a row a thread, and leave the
    factors of O^T."""
    config, shared, row, turn = role.config, role.shared, role.thread, number % P_TURNS
    if row < config.count:
        reference, factor, _ = move_reference(
            shared.references[row, place],
            number_of(shared.maxima[row]),
            role.unit,
            config.output.rescale_threshold,
        )
        shared.references[row, 1 - place] = reference
        shared.factors[row, turn] = factor
    if row == 0:
        shared.moved[0, turn] = number


def places_of_weights(config, shared, thread, turn) -> list:
    """Addresses of the word of the thread's first two columns in P; those of further pairs follow."""
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    g, member = lane // QUAD, lane % QUAD
    chunk = 2 * warp + half_of(g, g // QUAD)
    base = shared.p.toint() + turn * config.p_bytes + g % QUAD * WORD_BYTES
    columns = [column_of(v, member) for v in range(PAIR)]
    return [base + one * ROW_BYTES + (chunk ^ one) * VECTOR_BYTES for one in columns]


def load_sums(role, thread, turn) -> cute.Tensor:
    """(COLUMN): a thread's sums, of a step's turn."""
    config = role.config
    found, size = cute.make_rmem_tensor(config.columns, Float32), config.sums_vector
    for vector in range(config.columns // size):
        target = cute.local_tile(found, (size,), (vector,))
        cute.autovec_copy(role.shared.weights[None, thread, vector, turn], target)
    return found


def pairs_at(numbers: cute.Tensor, thread, first):
    """Address of the numbers of the thread's first two columns, in a row of numbers from number ``first`` on."""
    return numbers.iterator.toint() + (first + thread % QUAD * PAIR) * WORD_BYTES


def load_pairs(address, columns: range) -> list:
    """The numbers of the thread's columns, from ``pairs_at``."""
    found = []
    for v in range(columns.start, columns.stop, PAIR):
        pair = load_shared(address + v // PAIR * (COLUMN_STEP * WORD_BYTES), PAIR)
        found += [pair[i].bitcast(Float32) for i in range(PAIR)]
    return found


@cute.jit
def exponentiate(role, number, place, moved: cutlass.Constexpr) -> Float32:
    """Write P^T, of S^T and the references at a place, to shared memory, and the thread's sums with this step's
    weights. Returns the thread's largest weight. number: of the step. moved: whether references have moved in it.
    """
    config, shared, s = role.config, role.shared, flat(role.s)
    thread, turn, columns = role.thread, number % P_TURNS, range(config.columns)
    unit, largest = role.unit, [Float32(0.0)] * 2
    if cutlass.const_expr(moved):  # no product is kept for this
        unit = anew(unit.bitcast(Int32)).bitcast(Float32)
    places = places_of_weights(config, shared, thread, turn)
    # All loads come before stores: ptxas keeps them in order.
    offsets = load_pairs(pairs_at(shared.references, thread, place * config.count), columns)
    sums = load_sums(role, thread, 1 - turn)
    if cutlass.const_expr(moved):
        factors = load_pairs(pairs_at(shared.factors, thread, turn * config.count), columns)
        for v in cutlass.range_constexpr(config.columns):
            sums[v] = sums[v] * factors[v]
    for v in cutlass.range_constexpr(config.columns):
        weights = [
            cute.math.exp2(s[element(v, r)] * unit - offsets[v], fastmath=True) for r in range(THREAD_ROWS)
        ]
        sums[v] = sums[v] + (weights[0] + weights[1])
        pair = cute.make_rmem_tensor(THREAD_ROWS, Float16)
        for r in cutlass.range_constexpr(THREAD_ROWS):
            pair[r] = weights[r].to(Float16)
            largest[r] = cute.arch.fmax(largest[r], weights[r])
        address = places[v % PAIR] + v // PAIR * (COLUMN_STEP * ROW_BYTES)
        shared_vector(address, 1)[0] = cute.recast_tensor(pair, Uint32)[0]
    for vector in cutlass.range_constexpr(config.columns // config.sums_vector):
        own = cute.local_tile(sums, (config.sums_vector,), (vector,))
        cute.autovec_copy(own, shared.weights[None, thread, vector, turn])
    return cute.arch.fmax(*largest)


@cute.jit
def clear_unseen(role, number, use):
    """Clear what V of a KV tile may not have where P is 0, as ``transposed.attend.clear_unseen`` does."""
    start, first, last = keys_of(role, number, use)
    keys, thread = role.config.tile_n, role.thread
    words, base = role.config.heads.v // WORD_BYTES, role.unit_at(use)
    begin, end = cutlass.max(first - start, 0), cutlass.min(last - start, keys)
    for place_number in cutlass.range(begin * words + thread, end * words, WARPGROUP_THREADS, unroll=1):
        key, word = place_number // words, place_number % words
        # In a block of 64 columns the order does not matter.
        at = word // BLOCK_WORDS * (keys * BLOCK) + word % BLOCK_WORDS * WORD_BYTES
        place = shared_vector(base + key * BLOCK + at, 1)
        value = place[0]
        # Bit 7 of each byte that is NaN, whose magnitude is the largest, spread over the byte.
        marks = ((value & Uint32(MAGNITUDES)) + Uint32(ALL_BYTES)) & Uint32(SIGNS)
        place[0] = value & ~((marks >> 7) * Uint32(0xFF))
    warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
    zeros = cute.make_rmem_tensor(VECTOR_BYTES // WORD_BYTES, Uint32)
    zeros.fill(0)
    own = base + lane // CHUNKS * (keys * BLOCK) + lane % CHUNKS * VECTOR_BYTES
    for key in cutlass.range(cutlass.max(last - start, 0) + warp, keys, WARPS, unroll=1):
        cute.autovec_copy(zeros, shared_vector(own + key * BLOCK, VECTOR_BYTES // WORD_BYTES))


@cute.jit
def leave_sums(role, number, steps, place):
    """Leave what the value warpgroups need of a task's rows. number: of the task. steps: number of all so far. Produces
    rows_full."""
    config, shared, thread = role.config, role.shared, role.thread
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    own = load_sums(role, thread, (steps + 1) % P_TURNS)
    sums = [own[v] for v in range(config.columns)]
    found, first = over_lanes(sums, lane, lambda a, b: a + b)
    for i in cutlass.range_constexpr(len(found)):
        shared.sums[column_of_any(first + i, lane % QUAD), warp] = found[i]
    barrier(SUMS_BARRIER)
    if thread < config.count:
        total = Float32(0.0)
        for other in cutlass.range_constexpr(WARPS):
            total = total + shared.sums[thread, other]
        write_row(role, number, thread, shared.references[thread, place], total)
    role.channels["rows_full"].arrive_warp(number)


assert PAIR == 2 and COLUMN_STEP == ROW_BYTES // VECTOR_BYTES and BLOCK_WORDS * WORD_BYTES == BLOCK
