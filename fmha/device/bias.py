"""Additive bias, what every kernel needs of it: element types, the unit of scores, a row in global memory.

With a bias, scores are powers of two: t = scale_log2 * s + log2(e) * bias. Everything after, from the row maximum to
the statistics, then works with a scale of 1 (``unit``).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

TYPES = {"bfloat16": cutlass.BFloat16, "float32": Float32}


def unit(config, scale_log2):
    """Powers of two in one unit of what the softmax loop calls a score."""
    return Float32(1.0) if config.bias else scale_log2


def row_of(config, bias: cute.Tensor, place) -> cute.Tensor:
    """The row of the bias (KEY) in global memory; idle rows get the last one there is."""
    batch = place.batch if config.bias_batches else 0
    head = cutlass.min(place.head, bias.shape[1] - 1) if config.bias_heads else 0
    return bias[batch, head, cutlass.min(place.query, bias.shape[2] - 1), None]
