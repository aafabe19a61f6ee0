"""The epilogue, on the softmax warps: O from tensor memory to global memory, and the row statistics."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from warpspec.common import tmem
from warpspec.fmha.features import BLOCK
from warpspec.fmha.results import of_split, statistics
from warpspec.fmha.row_bias import unit
from warpspec.fmha.sm100.recompute import recompute, tainted


@cute.jit
def epilogue(
    config: cutlass.Constexpr, channels: cutlass.Constexpr, row, place, tile, state, o, operands, scale_log2
):
    """Write one row: o = O / (row_sum + sink), lse; or un-normalised o, row_max, row_sum.

    state: (reference, maximum, row_sum) from the softmax loop. o: TMEM pointer to O. operands: global
    tensors. Consumes the last pv_done. A row that sees no key writes zeros and -inf whatever O holds.
    """
    reference, _, row_sum = state
    if tile.span.count > 0:
        channels["pv_done"].wait(tile.span.count - 1)
        tmem.fence_after_wait()
    empty = Boolean(row_sum == Float32(0.0))
    factor = statistics(config, row, place, tile, state, operands, unit(config, scale_log2), empty)
    for part in cutlass.range_constexpr(config.o_columns // BLOCK):
        values = cute.make_rmem_tensor(BLOCK, Float32)  # (D block)
        if tile.span.count > 0:
            tmem.load_row(o + part * BLOCK, values, row.thread)
            tmem.wait_loads()
        block = row.half * (config.o_columns // BLOCK) + part
        if (config.band or config.bias is not None) and place.in_range & tainted(values, row_sum):
            recompute(config, row, place, operands, block, reference, scale_log2, values)
        if place.in_range:
            scale_or_zero(values, factor, empty)
            target = cute.local_tile(of_split(config, operands.o, tile, place), (BLOCK,), (block,))
            converted = cute.make_rmem_tensor(BLOCK, target.element_type)  # (D block)
            converted.store(values.load().to(target.element_type))
            cute.autovec_copy(converted, target)


def scale_or_zero(values: cute.Tensor, factor, empty) -> None:
    """values (n) times ``factor``; zeros where ``empty``, whatever stood there."""
    for i in range(cute.size(values)):
        values[i] = Float32(cutlass.select_(empty, Float32(0.0), values[i] * factor))
