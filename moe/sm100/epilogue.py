"""The epilogue warps: accumulators from tensor memory through registers and shared memory to global memory."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device import tmem
from warpspec.moe.sm100.config import ACCUMULATORS
from warpspec.moe.sm100.epilogue_rows import rows_to_result
from warpspec.moe.sm100.epilogue_swapped import columns_to_result
from warpspec.moe.sm100.store import Accumulator


class EpilogueOperands(NamedTuple):
    """fp32 tensors of the epilogue, or None: row_scale [R]; global_scale [E, 1 or 2]; bias [E, N]; out_scale [E]."""

    row_scale: cute.Tensor | None
    global_scale: cute.Tensor
    bias: cute.Tensor | None
    out_scale: cute.Tensor | None


@cute.jit
def epilogue(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    records,
    operands,
    result,
    columns: cute.Pointer,
    staging: cute.Pointer,
    features,
    limit,
    rank,
):
    """Write a part of the result for every tile record.

    columns: first column in TMEM. staging: shared memory. features: rows N of an expert's weights. rank: this CTA's
    rank in its pair. Consumes record_full and accumulator_full. Produces record_empty, and accumulator_empty (in a
    pair, that of the first CTA) once the accumulator is in registers.
    """
    use = Int32(0)
    tile = records.read(use)
    while tile.rows > 0:
        channels["accumulator_full"].wait(use)
        tmem.fence_after_wait()
        accumulator = columns + use % ACCUMULATORS * config.accumulator_columns
        write = columns_to_result if cutlass.const_expr(config.swapped) else rows_to_result
        own = Accumulator(accumulator, channels["accumulator_empty"], use, tile, rank)
        write(config, own, operands, result, staging, features, limit)
        use += 1
        tile = records.read(use)
