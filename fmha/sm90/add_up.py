"""States of pieces of a tile, which paired consumers leave in the workspace and add up along a binary tree.

A state lies in memory as in registers: each thread stores and loads 16 bytes at a time, beside those of its neighbours.
A thread of another piece finds its own rows and columns where the thread with its number left them. A CTA leaves at
most one state, to which it has added those of earlier pieces (``line.first_added``). For each consumer a counter in
global memory announces it; the one CTA that adds the state sets the counter back (``common.workspace``). Which states
are added, and in which order, follows from the lengths alone: the same call gives the same bits.

CTAs cannot wait for each other in a circle. A CTA waits only for states of earlier pieces of a tile, which CTAs with
lower numbers leave, of the same head if heads are in step. And it has left its own state before, unless that belongs to
the same tile: the piece that it leaves is the first that it works on (``device.line``). So the lowest of the CTAs that
have not finished waits for nobody. A launch has no more CTAs than run at
a time.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.device.wgmma import flat
from warpspec.common.hardware import WARPGROUP_THREADS
from warpspec.common.workspace import EMPTY
from warpspec.fmha.device.combine import finite
from warpspec.fmha.device.tile import select_integer
from warpspec.fmha.heads import PIECE_STATISTICS
from warpspec.fmha.line import PAIR_WORDS, first_added, next_added
from warpspec.fmha.sm90.config import SCORED_BARRIER
from warpspec.fmha.sm90.fragment import PAIR, THREAD_ROWS
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS
from warpspec.fmha.sm90.softmax import over_quad

VECTOR = 4  # fp32 numbers that a thread stores at a time; also those of a row's statistics
AHEAD = 8  # vectors in flight: O takes most registers
assert PAIR_WORDS * VECTOR <= PIECE_STATISTICS, "the statistics of both consumers lie after O"


def columns_of(work, operands, state) -> cute.Tensor:
    """(NUMBER, VECTOR): O of the thread in a state of the workspace. state: its number."""
    sizes = (VECTOR, WARPGROUP_THREADS, work.config.o_columns * WARPGROUP_ROWS // WARPGROUP_THREADS // VECTOR)
    whole = cute.make_layout((*sizes, work.config.column_parts))
    states = cute.make_tensor(operands.pieces[state, None, None].iterator, whole)
    return states[None, work.thread, None, work.part]


def statistics_of(work, operands, state) -> cute.Tensor:
    """(NUMBER, ROW): reference, maximum and sum of the rows of a state, after its O; each consumer has its own."""
    numbers = work.config.heads.v * WARPGROUP_ROWS + work.part * WARPGROUP_ROWS * VECTOR
    layout = cute.make_layout((VECTOR, WARPGROUP_ROWS))
    return cute.make_tensor(operands.pieces[state, None, None].iterator + numbers, layout)


def wait_for_threads(work) -> None:
    """A barrier of the consumer's threads."""
    cute.arch.barrier(barrier_id=SCORED_BARRIER + work.part, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def leave_piece(work, state, operands):
    """Leave the state of the thread's rows in the piece's place of the workspace, and announce it."""
    o, number = flat(work.mma.o), work.tile.piece.state
    target = columns_of(work, operands, number)
    for vector in cutlass.range_constexpr(cute.size(o) // VECTOR):
        cute.autovec_copy(cute.local_tile(o, (VECTOR,), (vector,)), target[None, vector])
    references, maxima, sums = state
    told = statistics_of(work, operands, number)
    for r in cutlass.range_constexpr(THREAD_ROWS):
        row, total = work.rows[r], over_quad(sums[r], lambda a, b: a + b)
        if row.member == 0:
            values = cute.make_rmem_tensor(VECTOR, Float32)
            values.fill(0.0)
            values[0], values[1], values[2] = references[r], maxima[r], total
            cute.autovec_copy(values, told[None, row.index])
    # A release is cumulative: one thread's covers what the others wrote before the barrier.
    wait_for_threads(work)
    if work.thread == 0:
        counter = operands.counters.iterator + (number * PAIR_WORDS + work.part)
        cute.arch.atomic_add(counter, Int64(1), sem="release", scope="gpu")


@cute.jit
def add_pieces(work, state, operands):
    """Add states of the tile's earlier pieces, one after another, to O and to the state; returns the state.

    Pieces of a tile have the numbers 1 to N. Piece n adds those of which n is the parent, and the last piece adds all
    roots that are left (``line.first_added``, ``line.next_added``).
    """
    piece = work.tile.piece
    before = Int32(piece.earlier)
    first = first_added(before + 1, piece.whole, select_integer)
    while before >= first:
        number = piece.state - 1 - piece.earlier + before
        if work.thread == 0:
            counter = operands.counters.iterator + (number * PAIR_WORDS + work.part)
            seen = Int64(EMPTY)
            while seen == EMPTY:
                seen = cute.arch.load(counter, Int64, sem="acquire", scope="gpu")
            operands.counters[number * PAIR_WORDS + work.part] = Int64(EMPTY)
        wait_for_threads(work)
        state = add_state(work, state, operands, number)
        before = next_added(before)
    return state


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
        highest = cute.arch.fmax(reference, other[0])
        own = cute.math.exp2(reference - finite(highest), fastmath=True)
        factor = cute.math.exp2(other[0] - finite(highest), fastmath=True)
        once = Float32(cutlass.select_(Boolean(row.member == 0), other[2] * factor, Float32(0.0)))
        new.append((highest, cute.arch.fmax(maximum, other[1]), total * own + once))
        kept.append(own)
        added.append(factor)
    for first in cutlass.range_constexpr(0, cute.size(o) // VECTOR, AHEAD):
        loaded = cute.make_rmem_tensor((VECTOR, AHEAD), Float32)
        for i in cutlass.range_constexpr(AHEAD):
            cute.autovec_copy(found[None, first + i], loaded[None, i])
        values = flat(loaded)
        for i in cutlass.range_constexpr(cute.size(values)):
            at, r = first * VECTOR + i, i // PAIR % THREAD_ROWS
            o[at] = o[at] * kept[r] + values[i] * added[r]
    return tuple(zip(*new, strict=True))
