"""Additive bias on wgmma's register fragments: every thread reads its own pairs of keys from global memory.

Scores become powers of two (``device.bias``).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from warpspec.common.device.wgmma import column, elements
from warpspec.fmha.device.bias import TYPES, power


@cute.jit
def add(
    config: cutlass.Constexpr,
    scores: cute.Tensor,
    r: cutlass.Constexpr,
    bias: cute.Tensor,
    first_key,
    scale_log2,
    masked: cutlass.Constexpr,
):
    """Scores of row r of the thread become scale_log2 * s + log2(e) * bias, in place; -inf where the bias is.

    bias: the row (KEY). first_key: key of the thread's element 0. masked: the tile may reach past the keys; what is
    made of those, the caller hides.
    """
    last = cute.size(bias) - 1
    start = bias.iterator + first_key
    for i in elements(scores, r):
        offset = column(i)
        value = cute.make_rmem_tensor(1, TYPES[config.bias])
        value.fill(0.0)
        if cutlass.const_expr(not masked) or first_key + offset <= last:
            value[0] = start[offset]
        scores[i] = power(scores[i], value[0].to(Float32), scale_log2)
