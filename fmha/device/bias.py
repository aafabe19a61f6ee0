"""Additive bias, what every kernel needs of it: element types, the unit of scores, a row in global memory.

With a bias, scores are powers of two: t = scale_log2 * s + log2(e) * bias. Everything after, from the row maximum to
the statistics, then works with a scale of 1 (``unit``). The sum is rounded to zero: the largest finite biases, which
masks like to be made of, stay finite.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from warpspec.fmha.device.softmax import LOG2_E

TYPES = {"bfloat16": cutlass.BFloat16, "float32": Float32}


def unit(config, scale_log2):
    """Powers of two in one unit of what the softmax loop calls a score."""
    return Float32(1.0) if config.bias else scale_log2


def power(score: Float32, bias: Float32, scale_log2) -> Float32:
    """One score with its bias; -inf where the bias is, by selection, for the score may be NaN."""
    total = cute.arch.inline_ptx(
        "fma.rz.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[bias, Float32(LOG2_E), score * scale_log2],
    )
    return Float32(cutlass.select_(Boolean(bias == -Float32.inf), -Float32.inf, total))


def row_of(config, bias: cute.Tensor, place) -> cute.Tensor:
    """The row of the bias (KEY) in global memory; idle rows get the last one there is."""
    batch = place.batch if config.bias_batches else 0
    head = cutlass.min(place.head, bias.shape[1] - 1) if config.bias_heads else 0
    return bias[batch, head, cutlass.min(place.query, bias.shape[2] - 1), None]
