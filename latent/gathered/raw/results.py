"""The end of a task in a value warpgroup: its columns of o, or of a piece's state in the workspace."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from warpspec.common.device.wgmma import QUAD, THREAD_ROWS
from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.device.results import of_split
from warpspec.fmha.heads import BLOCK
from warpspec.latent.gathered.raw.config import FACTOR, HALF, SLOTS
from warpspec.latent.gathered.raw.pieces import end_piece, row_of_state
from warpspec.latent.gathered.raw.record import is_alone, place_at, write_statistics
from warpspec.latent.gathered.transposed.attend import element
from warpspec.latent.gathered.transposed.maxima import column_of
from warpspec.latent.gathered.transposed.products import LANE_VALUES
from warpspec.latent.gathered.transposed.results import store_values


@cute.jit
def end_task(role, record, number):
    """Write what O^T of task ``number`` is for: results, or a state that is added to others."""
    config, slot = role.config, number % SLOTS
    if cutlass.const_expr(config.scheduler.adds_up):
        if is_alone(config, record.piece):
            write_results(role, record, slot)
            write_statistics(role, record, slot)
        else:
            leave_state(role, record, slot)
            end_piece(role, record, slot)
    else:
        write_results(role, record, slot)
        write_statistics(role, record, slot)


def first_value(role):
    """The first of the lane's eight value columns."""
    lane, warp = role.thread % WARP_THREADS, role.thread // WARP_THREADS
    return role.consumer * HALF + warp * BLOCK + lane // QUAD * LANE_VALUES


@cute.jit
def write_results(role, record, slot):
    """Write the thread's columns of O^T, which are rows of the task, times their factors to o."""
    scale = None if role.config.output.means else Float32(role.operands.kv_scale[0])
    for v in cutlass.range_constexpr(role.config.columns):
        row = column_of(v, role.thread % QUAD)
        place = place_at(role.shared, row, slot)
        if place.in_range:
            target = of_split(role.config, role.operands.o, record, place)
            store_values(target, first_value(role), own(role, v, slot, scale))


@cute.jit
def leave_state(role, record, slot):
    """Leave the thread's columns, times their factors, in the piece's place of the workspace."""
    for v in cutlass.range_constexpr(role.config.columns):
        row = column_of(v, role.thread % QUAD)
        target = row_of_state(role.config, role.operands, record.piece.state, row)
        store_values(target, first_value(role), own(role, v, slot, None))


def own(role, v: int, slot, scale) -> list:
    """The thread's v-th column times its factor, and times ``scale``, if it is not None."""
    factor, o = role.shared.rows[column_of(v, role.thread % QUAD), FACTOR, slot], role.mma.o
    factor = factor if scale is None else factor * scale
    return [o[i // THREAD_ROWS][element(v, i % THREAD_ROWS)] * factor for i in range(LANE_VALUES)]
