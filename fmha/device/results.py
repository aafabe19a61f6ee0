"""The row statistics that an epilogue writes besides O, and the place of O."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from warpspec.common.logarithms import LN_2
from warpspec.fmha.device.partitions import write_unused
from warpspec.fmha.device.softmax import less_product, log_sum, sink_term


def of_split(config, o: cute.Tensor, tile, place) -> cute.Tensor:
    """The row (D) of o [B, Sq, Hq, D], which has a first dimension for splits if partial results are written."""
    row = (place.batch, place.query, place.head, None)
    return o[(tile.split, *row)] if config.output.splits else o[row]


def sink_of(sink: cute.Tensor | None, head) -> Float32 | None:
    """A head's sink, or None if there are none. An idle row, whose head may lie past the end, gets the last one."""
    return None if sink is None else sink[cutlass.min(head, cute.size(sink) - 1)].to(Float32)


@cute.jit
def statistics(
    config: cutlass.Constexpr, row, place, tile, state, operands, unit, empty, sink: cutlass.Constexpr
) -> Float32:
    """Write lse, or row_max and row_sum, once per row; returns the factor of O. sink: ``sink_of`` its head."""
    reference, _, row_sum = state
    index = (place.batch, place.head, place.query)
    if cutlass.const_expr(config.output.splits):
        index = (tile.split, *index)
    writes = place.in_range & Boolean(row.member == 0)
    factor = Float32(1.0)
    if cutlass.const_expr(config.output.normalize):
        total = row_sum
        if cutlass.const_expr(sink is not None):
            total += sink_term(sink, reference)
        factor = Float32(1.0) / total
    else:
        factor, maximum, total = unnormalised(state, unit, empty)
        if cutlass.const_expr(config.output.means):
            factor = Float32(1.0) / row_sum
        if writes:
            operands.row_max[index] = maximum
            operands.row_sum[index] = total
            if cutlass.const_expr(config.queues_partitions):
                write_unused(config, tile, index[1:], operands)
    if cutlass.const_expr(config.output.has_lse):  # noqa: SIM102  (a run-time condition in a compile-time one)
        if writes:
            operands.lse[index] = log_sum(reference, row_sum)
    return factor


def unnormalised(state, unit, empty) -> tuple:
    """(factor of O, row_max, row_sum) of a row's state, the statistics in natural units."""
    reference, row_maximum, row_sum = state
    # Rescale from the reference of O's sum to the row's true maximum.
    factor = cute.math.exp2(less_product(reference, row_maximum, unit), fastmath=True)
    total = Float32(cutlass.select_(empty, Float32(0.0), row_sum * factor))
    return factor, row_maximum * (unit * LN_2), total


@cute.jit
def piece_statistics(config: cutlass.Constexpr, row, target: cute.Tensor, state, unit, empty) -> Float32:
    """Write the maximum and sum of a piece's row after its columns; returns the factor of O. target: the row (D + 8) of
    the workspace."""
    factor, maximum, total = unnormalised(state, unit, empty)
    if row.member == 0:
        target[config.heads.v_state] = maximum
        target[config.heads.v_state + 1] = total
    return factor
