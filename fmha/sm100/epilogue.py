"""The epilogue, on the softmax warps: O from tensor memory to global memory, and the row statistics."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from warpspec.common import tmem
from warpspec.fmha.sm100.config import HEAD_DIM
from warpspec.fmha.sm100.recompute import recompute, tainted
from warpspec.fmha.softmax import LN_2, log_sum, sink_term


@cute.jit
def epilogue(
    config: cutlass.Constexpr, channels: cutlass.Constexpr, row, place, span, state, o, operands, scale_log2
):
    """Write one row: o = O / (row_sum + sink), lse; or un-normalised o, row_max, row_sum.

    state: (reference, maximum, row_sum) from the softmax loop. o: TMEM pointer to O. operands: global
    tensors. Consumes the last pv_done. A row that sees no key writes zeros and -inf whatever O holds.
    """
    reference, row_maximum, row_sum = state
    values = cute.make_rmem_tensor(HEAD_DIM, Float32)  # (D)
    if span.count > 0:
        channels["pv_done"].wait(span.count - 1)
        tmem.fence_after_wait()
        tmem.load_row(o, values, row.thread)
        tmem.wait_loads()
    if config.band and place.in_range & tainted(values, row_sum):
        recompute(config, row, place, operands, reference, scale_log2, values)
    if place.in_range:
        empty = Boolean(row_sum == Float32(0.0))
        if cutlass.const_expr(config.normalize):
            total = row_sum
            if cutlass.const_expr(operands.sink is not None):
                total += sink_term(operands.sink[place.head].to(Float32), reference, scale_log2)
            factor = Float32(1.0) / total
        else:
            # From the reference that O was summed in to the row's true maximum.
            factor = cute.math.exp2((reference - row_maximum) * scale_log2, fastmath=True)
            operands.row_max[place.batch, place.head, place.query] = row_maximum * (scale_log2 * LN_2)
            operands.row_sum[place.batch, place.head, place.query] = Float32(
                cutlass.select_(empty, Float32(0.0), row_sum * factor)
            )
        scale_or_zero(values, factor, empty)
        if cutlass.const_expr(config.has_lse):
            operands.lse[place.batch, place.head, place.query] = log_sum(reference, row_sum, scale_log2)
        target = operands.o[place.batch, place.query, place.head, None]  # (D)
        converted = cute.make_rmem_tensor(HEAD_DIM, target.element_type)
        converted.store(values.load().to(target.element_type))
        cute.autovec_copy(converted, target)


def scale_or_zero(values: cute.Tensor, factor, empty) -> None:
    """values (D) times ``factor``; zeros where ``empty``, whatever stood there."""
    for i in range(HEAD_DIM):
        values[i] = Float32(cutlass.select_(empty, Float32(0.0), values[i] * factor))
