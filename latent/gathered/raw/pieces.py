"""States of pieces of a task, which CTAs leave in the workspace and add up, as ``fmha.sm90.add_up`` has them for other
kernels: all leave their states, then all but the first share out the rows.

A row of a state has O in the workspace's order, in fp32 or as means in fp16, and behind it a reference and a sum for
each value warpgroup.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.device.wgmma import flat
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.device.combine import finite
from warpspec.fmha.device.results import of_split, statistics
from warpspec.fmha.device.tile import Row
from warpspec.fmha.sm90.add_up import (
    ALL,
    NONE,
    VECTOR,
    announce,
    finish_share,
    number_of,
    take_task,
    wait_for_threads,
)
from warpspec.latent.gathered.raw.config import HALF, REFERENCE, TOTAL
from warpspec.latent.gathered.raw.record import place_at
from warpspec.latent.gathered.transposed.results import store_values

NUMBERS = HALF // WARP_THREADS  # of a row that a lane adds up
TOLD = 2  # numbers of a row and value warpgroup behind O
# (Parts of a warp's rows, one of which is in flight; pieces of which it is) of a task with two pieces, with more, with
# many, of which a share is a row or two of each warp.
OF_TWO, OF_MORE, OF_MANY, MANY = (2, 2), (8, 4), (16, 8), 10
WARPS = WARPGROUP_THREADS // WARP_THREADS


@dataclass(frozen=True)
class PieceWork:
    """A value warpgroup's piece, as ``add_up`` asks for it. tile: the ``TaskRecord``."""

    tile: object
    thread: Int32
    column_group: Int32


def row_of_state(config, operands, state, row) -> cute.Tensor:
    """(D): a row of O in a state of the workspace."""
    begin = cute.recast_ptr(operands.pieces[state, row, None].iterator, dtype=number_of(config))
    return cute.make_tensor(begin, cute.make_layout(config.heads.v))


def told_of(config, operands, state, row, consumer) -> cute.Tensor:
    """(NUMBER): reference and sum of a row of a state, which are the value warpgroup's own."""
    begin = operands.pieces[state, row, None].iterator + (config.heads.v + consumer * VECTOR)
    return cute.make_tensor(begin, cute.make_layout(TOLD))


@cute.jit
def end_piece(role, record, slot):
    """Tell the other pieces that this one's state is there, and add up a share of the rows of all."""
    config, shared, operands, piece = role.config, role.shared, role.operands, record.piece
    work = PieceWork(record, role.thread, role.consumer)
    if role.thread < config.count:
        values = cute.make_rmem_tensor(TOLD, Float32)
        values[0], values[1] = (
            shared.rows[role.thread, REFERENCE, slot],
            shared.rows[role.thread, TOTAL, slot],
        )
        cute.autovec_copy(values, told_of(config, operands, piece.state, role.thread, role.consumer))
    wait_for_threads(work)  # a release is cumulative: one thread's covers what the others wrote before
    if piece.earlier == 0:
        announce(work, operands)
    else:
        if role.thread == 0:
            shared.share[0, role.consumer] = take_task(work, operands)
        wait_for_threads(work)
        task, begin, step = shared.share[0, role.consumer], piece.earlier - 1, piece.earlier + piece.later
        begin = Int32(cutlass.select_(Boolean(task == ALL), Int32(0), begin))
        step = Int32(cutlass.select_(Boolean(task == ALL), Int32(1), step))
        groups = Int32(cutlass.select_(Boolean(task == NONE), Int32(0), Int32(config.count // WARPS)))
        others = piece.earlier + piece.later
        if others == 1:
            add_share(role, record, slot, (begin, groups, step), OF_TWO)
        elif others < MANY:
            add_share(role, record, slot, (begin, groups, step), OF_MORE)
        else:
            add_share(role, record, slot, (begin, groups, step), OF_MANY)
        finish_share(work, operands)


@cute.jit
def add_share(role, record, slot, share, ahead: cutlass.Constexpr):
    """Add up a share of the rows over all pieces. share: groups of four rows, one a warp: number of the first, end of
    all, from one to the next. ahead: what is in flight."""
    begin, end, step = share
    rows = max(role.config.count // WARPS // ahead[0], 1)
    for group in cutlass.range(begin, end, step * rows, unroll=1):
        add_rows(role, record, slot, group, step, (rows, ahead[1]))


@cute.jit
def add_rows(role, record, slot, group, step, most: cutlass.Constexpr):
    """Add up the warp's rows of some groups over all pieces, and write their results. group, step: as in ``add_share``.
    most: rows and pieces whose states are in flight."""
    config, operands, piece = role.config, role.operands, record.piece
    lane, warp = role.thread % WARP_THREADS, role.thread // WARP_THREADS
    count, (ahead, pieces) = piece.earlier + piece.later + 1, most
    numbers = [group + i * step for i in range(ahead)]
    rows = [cutlass.min(number, config.count // WARPS - 1) * WARPS + warp for number in numbers]
    sums = cute.make_rmem_tensor((NUMBERS, ahead), Float32)
    sums.fill(0.0)
    told = cute.make_rmem_tensor((2, ahead), Float32)
    for i in cutlass.range_constexpr(ahead):
        told[0, i], told[1, i] = -Float32.inf, Float32(0.0)
    for first in cutlass.range(0, count, pieces, unroll=1):
        loaded = cute.make_rmem_tensor((NUMBERS, pieces, ahead), number_of(config))
        others = cute.make_rmem_tensor((TOLD, pieces, ahead), Float32)
        for i in cutlass.range_constexpr(ahead):
            for j in cutlass.range_constexpr(pieces):
                state = piece.state_of(cutlass.min(first + j, count - 1))
                source = cute.local_tile(
                    row_of_state(config, operands, state, rows[i]),
                    (NUMBERS,),
                    (role.consumer * WARP_THREADS + lane,),
                )
                cute.autovec_copy(source, loaded[None, j, i])
                cute.autovec_copy(
                    told_of(config, operands, state, rows[i], role.consumer), others[None, j, i]
                )
        for i in cutlass.range_constexpr(ahead):
            add_batch(config, flat(sums[None, i]), told, loaded, others, i, count - first, pieces)
    for i in cutlass.range_constexpr(ahead):
        place, total, reference = place_at(role.shared, rows[i], slot), told[1, i], told[0, i]
        empty = Boolean(total == Float32(0.0))
        place_in = Boolean(place.in_range & Boolean(numbers[i] < config.count // WARPS))
        teller = (
            Boolean(lane == 0) & Boolean(role.consumer == 0) & Boolean(numbers[i] < config.count // WARPS)
        )
        member = Int32(cutlass.select_(teller, Int32(0), Int32(1)))
        state = (reference, reference, total)
        factor = statistics(
            config, Row(rows[i], member), place, record, state, operands, Float32(1.0), empty, None
        )
        factor = Float32(cutlass.select_(empty, Float32(0.0), factor * Float32(operands.kv_scale[0])))
        if place_in:
            values = [sums[n, i] * factor for n in range(NUMBERS)]
            target = of_split(config, operands.o, record, place)
            store_values(target, role.consumer * HALF + lane * NUMBERS, values)


def add_batch(config, sums, told, loaded, others, i: int, left, pieces: int) -> None:
    """Add a batch of pieces to the i-th row's sums (n) and told (reference and sum, ROW). left: pieces that there
    are."""
    references = []
    for j in range(pieces):
        inside = Boolean(left > j)
        references.append(Float32(cutlass.select_(inside, others[0, j, i], -Float32.inf)))
    highest = told[0, i]
    for reference in references:
        highest = cute.arch.fmax(highest, reference)
    own = cute.math.exp2(told[0, i] - finite(highest), fastmath=True)
    total = told[1, i] * own
    for n in range(NUMBERS):
        sums[n] = sums[n] * own
    for j in range(pieces):
        factor = cute.math.exp2(references[j] - finite(highest), fastmath=True)
        weight = others[1, j, i] * factor
        total = total + weight
        factor = weight if config.leaves_means else factor
        for n in range(NUMBERS):
            sums[n] = sums[n] + loaded[n, j, i].to(Float32) * factor
    told[0, i], told[1, i] = highest, total
