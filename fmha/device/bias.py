"""Additive bias in kernels: element types, and a row in global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

TYPES = {"bfloat16": cutlass.BFloat16, "float32": Float32}


def row_of(config, bias: cute.Tensor, place) -> cute.Tensor:
    """The row of the bias (KEY) in global memory; idle rows get the last row."""
    batch = place.batch if config.logits.bias.batches else 0
    head = cutlass.min(place.head, bias.shape[1] - 1) if config.logits.bias.heads else 0
    return bias[batch, head, cutlass.min(place.query, bias.shape[2] - 1), None]
