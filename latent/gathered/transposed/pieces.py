"""States of pieces of a task, which a CTA leaves in the workspace, as ``fmha.sm90.add_up`` has them for other kernels.

A state lies in memory as in registers: O in fp32, or as means, in fp16. Its statistics, of which each consumer has its
own, follow O.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from warpspec.common.device.wgmma import QUAD, THREAD_ROWS, flat
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.device.combine import common_reference
from warpspec.fmha.sm90.add_up import (
    AHEAD,
    VECTOR,
    add_earlier,
    announce,
    inverse,
    number_of,
    vector_of,
    wait_for_threads,
)
from warpspec.latent.gathered.transposed.attend import element
from warpspec.latent.gathered.transposed.config import CONSUMERS
from warpspec.latent.gathered.transposed.maxima import column_of
from warpspec.latent.gathered.transposed.results import write_results


@dataclass(frozen=True)
class PieceWork:
    """A consumer's task, as ``add_up`` asks for it. role: the ``Consumer``. has_rows: whether the thread's warp has
    something of some row."""

    role: object
    tile: object
    thread: Int32
    column_group: Int32
    has_rows: bool = True


@cute.jit
def end_piece(role, task, state):
    """End a piece of a task: if it is the last, add the states of earlier pieces and write the task's results; else
    leave its state. state: from ``results.add_sums``."""
    work = PieceWork(role, task, role.thread, role.consumer)
    if task.piece.whole:
        write_results(role, task, add_earlier(work, state, role.operands, add_state))
    else:
        leave_state(work, state)
        announce(work, role.operands)


def size_of(config) -> int:
    """Numbers of O that a thread stores at a time: 16 bytes, or all of a product."""
    return min(vector_of(config), config.count // 2)


def columns_of(role, number) -> cute.Tensor:
    """(NUMBER, VECTOR, PRODUCT): O of the thread in a state of the workspace. number: the state's."""
    vector, begin = size_of(role.config), role.operands.pieces[number, None, None].iterator
    vectors = role.config.count // 2 // vector
    sizes = (vector, WARPGROUP_THREADS, vectors, role.config.value_tiles, CONSUMERS)
    begin = cute.recast_ptr(begin, dtype=number_of(role.config))
    states = cute.make_tensor(begin, cute.make_layout(sizes))
    return states[None, role.thread, None, None, role.consumer]


def statistics_of(role, number) -> cute.Tensor:
    """(NUMBER, ROW): reference and sum of the rows of a state."""
    config = role.config
    begin = config.heads.v * config.count + role.consumer * (config.count * VECTOR)
    layout = cute.make_layout((VECTOR, config.count))
    return cute.make_tensor(role.operands.pieces[number, None, None].iterator + begin, layout)


@cute.jit
def leave_state(work, state):
    """Leave the state of the thread's columns in the piece's place of the workspace."""
    role, number = work.role, work.tile.piece.state
    config = role.config
    target, told = columns_of(role, number), statistics_of(role, number)
    lane, size, (references, totals) = role.thread % WARP_THREADS, size_of(config), state
    if cutlass.const_expr(config.leaves_means):
        factors = tuple(inverse(total) for total in totals)
    for tile in cutlass.range_constexpr(config.value_tiles):
        o = flat(role.mma.o[tile])
        if cutlass.const_expr(config.leaves_means):
            o = means_of(config, o, factors)
        for vector in cutlass.range_constexpr(cute.size(o) // size):
            cute.autovec_copy(cute.local_tile(o, (size,), (vector,)), target[None, vector, tile])
    if role.thread < QUAD:  # lanes that have all columns together
        for v in cutlass.range_constexpr(config.columns):
            values = cute.make_rmem_tensor(VECTOR, Float32)
            values.fill(0.0)
            values[0], values[1] = references[v], totals[v]
            cute.autovec_copy(values, told[None, column_of(v, lane)])
    # A release is cumulative: one thread's covers what the others wrote before the barrier.
    wait_for_threads(work)


def means_of(config, o: cute.Tensor, factors: tuple) -> cute.Tensor:
    """O (n) of a product in fp16, the thread's columns times their factors."""
    means = cute.make_rmem_tensor(cute.size(o), Float16)
    for v in range(config.columns):
        for r in range(THREAD_ROWS):
            means[element(v, r)] = (o[element(v, r)] * factors[v]).to(Float16)
    return means


@cute.jit
def add_state(work, state, operands, number):
    """Add a state of the workspace; returns the columns' new state."""
    role, lane = work.role, work.thread % WARP_THREADS
    config, found, told = role.config, columns_of(role, number), statistics_of(role, number)
    new, kept, added = [], [], []
    for v in cutlass.range_constexpr(config.columns):
        reference, total = (one[v] for one in state)
        other = cute.make_rmem_tensor(VECTOR, Float32)
        cute.autovec_copy(told[None, column_of(v, lane % QUAD)], other)
        highest, own, factor = common_reference(reference, other[0])
        new.append((highest, total * own + other[1] * factor))
        kept.append(own)
        added.append(other[1] * factor if config.leaves_means else factor)
    size = size_of(config)
    vectors = config.count // 2 // size
    ahead = min(AHEAD, vectors)
    for tile in cutlass.range_constexpr(config.value_tiles):
        o = flat(role.mma.o[tile])
        for first in cutlass.range_constexpr(0, vectors, ahead):
            loaded = cute.make_rmem_tensor((size, ahead), number_of(config))
            for i in cutlass.range_constexpr(ahead):
                cute.autovec_copy(found[None, first + i, tile], loaded[None, i])
            values = flat(loaded)
            for v in cutlass.range_constexpr(config.columns):
                for r in cutlass.range_constexpr(THREAD_ROWS):
                    at = element(v, r) - first * size
                    if cutlass.const_expr(0 <= at < cute.size(values)):
                        i = element(v, r)
                        o[i] = o[i] * kept[v] + values[at].to(Float32) * added[v]
    return tuple(zip(*new, strict=True))
