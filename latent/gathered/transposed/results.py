"""The end of a task: row sums over all warps, then o with its statistics."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.device.wgmma import QUAD, THREAD_ROWS
from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.device.results import of_split, statistics
from warpspec.fmha.device.tile import Row
from warpspec.fmha.heads import BLOCK
from warpspec.latent.gathered.transposed.attend import barrier, column_of_any, element
from warpspec.latent.gathered.transposed.config import CONSUMERS, SUMS_BARRIER
from warpspec.latent.gathered.transposed.maxima import column_of, over_lanes
from warpspec.latent.gathered.transposed.products import LANE_VALUES


@cute.jit
def add_sums(role, state):
    """Add up the columns' sums over all keys; returns (references, sums) of the thread's columns."""
    config, shared, lane = role.config, role.shared, role.thread % WARP_THREADS
    member = lane % QUAD
    place, sums = state
    references = tuple(shared.references[column_of(v, member), place] for v in range(config.columns))
    found, first = over_lanes(list(sums), lane, lambda a, b: a + b)
    own = shared.sums[None, role.number // WARP_THREADS]
    for i in cutlass.range_constexpr(len(found)):
        own[column_of_any(first + i, member)] = found[i]
    barrier(config, SUMS_BARRIER)
    totals = []
    for v in cutlass.range_constexpr(config.columns):
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(config.consumer_warps):
            total = total + shared.sums[column_of(v, member), warp]
        totals.append(total)
    return references, tuple(totals)


@cute.jit
def write_results(role, task, state):
    """Write the thread's columns, which are rows of the task: o = O / row_sum and lse; or un-normalised o, row_max and
    row_sum. A row that sees no key writes zeros and -inf. state: from ``add_sums``."""
    config, operands, mma = role.config, role.operands, role.mma
    lane, warp = role.thread % WARP_THREADS, role.thread // WARP_THREADS
    references, totals = state
    values = role.consumer * (config.heads.v // CONSUMERS) + warp * BLOCK + lane // QUAD * LANE_VALUES
    teller = Boolean(lane < QUAD) & Boolean(role.number < WARP_THREADS)
    member = Int32(cutlass.select_(teller, Int32(0), Int32(1)))
    for v in cutlass.range_constexpr(config.columns):
        column = column_of(v, lane % QUAD)
        place = task.place(column)
        empty = Boolean(totals[v] == Float32(0.0))
        reference = Float32(cutlass.select_(empty, -Float32.inf, references[v]))
        row, row_state = Row(column, member), (reference, reference, totals[v])
        factor = statistics(config, row, place, task, row_state, operands, Float32(1.0), empty, None)
        if cutlass.const_expr(not config.output.means):
            factor = factor * role.key_scale
        if place.in_range:
            target = of_split(config, operands.o, task, place)
            own = [
                Float32(
                    cutlass.select_(
                        empty, Float32(0.0), mma.o[i // THREAD_ROWS][element(v, i % THREAD_ROWS)] * factor
                    )
                )
                for i in range(LANE_VALUES)
            ]
            store_values(target, values, own)


def store_values(row: cute.Tensor, first, values: list) -> None:
    """Store neighbouring numbers of a row (D), in its dtype, 16 bytes at a time."""
    dtype = row.element_type
    step = 4 if dtype is Float32 else 8
    for begin in range(0, len(values), step):
        vector = cute.make_rmem_tensor(step, dtype)
        for i in range(step):
            vector[i] = values[begin + i].to(dtype)
        cute.autovec_copy(vector, cute.local_tile(row, (step,), (first // step + begin // step,)))
