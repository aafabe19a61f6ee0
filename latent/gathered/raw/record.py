"""What the score warpgroup tells the value warpgroups of a task: a record of it, and numbers of its rows.

The value warpgroups keep O in most of their registers; so they do not find tasks themselves, nor the places of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.fmha.device.results import statistics
from warpspec.fmha.device.tile import Piece, Place, Row
from warpspec.fmha.sm90.add_up import inverse
from warpspec.latent.gathered.raw.config import (
    COUNT,
    EARLIER,
    FACTOR,
    FIRST_END,
    FIRST_TILE,
    FULL,
    HEAD,
    LAST_END,
    LATER,
    LINE_HEAD,
    REFERENCE,
    SLOTS,
    SPLIT,
    STATE,
    TOKEN,
    TOTAL,
    WHOLE,
)
from warpspec.latent.gathered.transposed.attend import ends_of


class TaskRecord(NamedTuple):
    """A record as value warpgroups read it. count: KV tiles. split: number of the split. piece: the task's ``Piece``
    without its KV tiles, if work is cut by length."""

    count: Int32
    split: Int32
    piece: Piece | None

    @classmethod
    def read(cls, config, shared, slot) -> TaskRecord:
        words, piece = shared.record, None
        if config.scheduler.adds_up:
            whole, state, earlier, later = (words[at, slot] for at in (WHOLE, STATE, EARLIER, LATER))
            piece = Piece(Int32(0), words[COUNT, slot], whole != 0, state, earlier, later)
        return cls(words[COUNT, slot], words[SPLIT, slot], piece)


@cute.jit
def write_record(role, number, use, task, head):
    """Write the record of task ``number`` and the places of its rows, once there is room. use: number of KV tiles
    before it. head: of the line, where the task is found. Consumes task_empty; produces task_full."""
    words, slot, piece, thread = role.shared.record, number % SLOTS, task.piece, role.thread
    role.channels["task_empty"].wait_previous(number)
    if thread == 0:
        words[COUNT, slot] = task.span.count
        words[SPLIT, slot] = task.split
        words[FIRST_TILE, slot] = task.span.first - use
        first_end, last_end = ends_of(task)
        words[FIRST_END, slot], words[LAST_END, slot] = first_end, last_end
        full = cutlass.max(first_end, 0) // role.config.tile_n - task.span.first
        words[FULL, slot], words[LINE_HEAD, slot] = use + full, head
        if cutlass.const_expr(piece is not None):
            words[WHOLE, slot] = Int32(piece.whole)
            words[STATE, slot] = piece.state
            words[EARLIER, slot] = Int32(piece.earlier)
            words[LATER, slot] = Int32(piece.later)
    places = cute.recast_tensor(role.shared.rows, Int32)
    if thread < role.config.count:
        place = task.place(thread)
        places[thread, TOKEN, slot] = Int32(place.query)
        places[thread, HEAD, slot] = Int32(cutlass.select_(place.in_range, Int32(place.head), Int32(-1)))
    role.channels["task_full"].arrive_warp(number)


@cute.jit
def write_end(role, number):
    """Write the record that says that there are no more tasks."""
    words = role.shared.record
    role.channels["task_empty"].wait_previous(number)
    if role.thread == 0:
        words[COUNT, number % SLOTS] = Int32(-1)
    role.channels["task_full"].arrive_warp(number)


@cute.jit
def write_row(role, number, row, reference, total):
    """Write the numbers of a row of task ``number``: reference and sum over all keys, and O's factor."""
    rows, slot = role.shared.rows, number % SLOTS
    if cutlass.const_expr(role.config.divides):
        rows[row, FACTOR, slot] = inverse(total)
    else:
        rows[row, FACTOR, slot] = Float32(1.0)
    rows[row, REFERENCE, slot], rows[row, TOTAL, slot] = reference, total


@cute.jit
def write_statistics(role, record, slot):
    """Write what results the task's rows have besides O, by a thread each of the first value warpgroup."""
    config, row, rows = role.config, role.thread, role.shared.rows
    if (role.consumer == 0) & (row < config.count):
        reference, total = rows[row, REFERENCE, slot], rows[row, TOTAL, slot]
        empty = Boolean(total == Float32(0.0))
        reference = Float32(cutlass.select_(empty, -Float32.inf, reference))
        state, place = (reference, reference, total), place_at(role.shared, row, slot)
        statistics(config, Row(row, Int32(0)), place, record, state, role.operands, Float32(1.0), empty, None)


def is_alone(config, piece: Piece | None):
    """Whether a task is no piece of a larger one, so that its results are written at once."""
    return piece.whole & Boolean(Int32(piece.earlier) == 0) if config.scheduler.adds_up else True


def place_at(shared, row, slot) -> Place:
    """The place of a row's results."""
    places = cute.recast_tensor(shared.rows, Int32)
    token, head = places[row, TOKEN, slot], places[row, HEAD, slot]
    return Place(0, token, Int32(0), head, token, Boolean(head >= 0))
