"""Splits of pages of codes as means of values, and the kernel that combines them.

A split's o is divided by its row's sum and stored in fp16, which takes half of the memory traffic of fp32. It is a mean
of codes, 448 at most but for the rounding of weights, which fp16 holds with a factor of 146 to spare. It is rounded by
2**-11 of itself at most, an eighth of the rounding of the results; below 2**-14 to a multiple of 2**-24, a 2**15th of
the least code: means of 131,072 such codes of random signs are off by 0.4%. The scale of all codes, for which fp16 has
no range, comes in when splits are combined.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from warpspec.common.device.host import host_function
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.common.operands import BFLOAT16, FLOAT16, FLOAT32, Operand, fakes
from warpspec.fmha.combine import CombineConfig, Results
from warpspec.fmha.device.combine import combine_row, launch_on_rows, write_row


class CombineMeansOperands(NamedTuple):
    """Arguments of ``CombineOperands`` (fmha.combine), except partial_o, which is fp16, and kv_scale: fp32 [1]."""

    partial_o: Annotated[Any, Operand(FLOAT16, 5, lambda c: c.head_dim, TMA_ALIGNMENT)]
    partial_max: Annotated[Any, Operand(FLOAT32, 4)]
    partial_sum: Annotated[Any, Operand(FLOAT32, 4)]
    kv_scale: Annotated[Any, Operand(FLOAT32, 1)]
    o: Annotated[Any, Operand(BFLOAT16, 4, lambda c: c.columns, TMA_ALIGNMENT)]
    lse: Annotated[Any, Operand(FLOAT32, 3, when="has_lse")]


class CombineMeans:
    """``device.combine.Combine`` of means."""

    def __init__(self, config: CombineConfig):
        self.config = config
        assert config.normalize and not (config.has_sink or config.packed)

    @host_function(CombineMeansOperands)
    def __call__(self, operands: CombineMeansOperands, stream: CUstream):
        """Launch the kernel."""
        launch_on_rows(self, operands, stream)

    @cute.kernel
    def kernel(self, operands, row_segments: Int32):
        partial = operands.partial_o, operands.partial_max, operands.partial_sum
        found = combine_row(self.config, *partial, None, None, row_segments)
        writes, place, column, maximum, total, values, _ = found
        scale = operands.kv_scale[0]
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] * scale
        results = Results(None, operands.o, operands.lse, None, None)
        write_row(self.config, writes, place, column, maximum, total, values, None, results)


def combine_arguments(config: CombineConfig) -> tuple:
    """The host function of a configuration and its arguments without the stream."""
    return (CombineMeans(config), *fakes(CombineMeansOperands, config))
