"""What an epilogue writes of a row besides O itself, and where O goes."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from warpspec.fmha.device.softmax import LN_2, log_sum, sink_term


def of_split(config, o: cute.Tensor, tile, place) -> cute.Tensor:
    """The row of o (D): [B, Sq, Hq, D], with splits in front where partial results are written."""
    row = (place.batch, place.query, place.head, None)
    return o[(tile.split, *row)] if config.splits else o[row]


@cute.jit
def statistics(config: cutlass.Constexpr, row, place, tile, state, operands, scale_log2, empty) -> Float32:
    """Write lse, or row_max and row_sum, once a row; returns what O is multiplied with."""
    reference, row_maximum, row_sum = state
    index = (place.batch, place.head, place.query)
    if cutlass.const_expr(config.splits):
        index = (tile.split, *index)
    writes = place.in_range & Boolean(row.member == 0)
    factor = Float32(1.0)
    if cutlass.const_expr(config.normalize):
        total = row_sum
        if cutlass.const_expr(operands.sink is not None):
            head = cutlass.min(place.head, cute.size(operands.sink) - 1)  # idle rows may lie past the end
            total += sink_term(operands.sink[head].to(Float32), reference, scale_log2)
        factor = Float32(1.0) / total
    else:
        # From the reference that O was summed in to the row's true maximum.
        factor = cute.math.exp2((reference - row_maximum) * scale_log2, fastmath=True)
        if writes:
            operands.row_max[index] = row_maximum * (scale_log2 * LN_2)
            operands.row_sum[index] = Float32(cutlass.select_(empty, Float32(0.0), row_sum * factor))
    if cutlass.const_expr(config.has_lse):  # noqa: SIM102  (a run-time condition in a compile-time one)
        if writes:
            operands.lse[index] = log_sum(reference, row_sum, scale_log2)
    return factor
