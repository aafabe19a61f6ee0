"""Additive bias on wgmma's register fragments: every thread reads its own pairs of keys from global memory.

Scores become logits in log2 units (``device.logits``).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from warpspec.common.device.wgmma import column, elements
from warpspec.fmha.device.bias import TYPES
from warpspec.fmha.device.logits import add_bias, map_score


@cute.jit
def add(
    config: cutlass.Constexpr,
    scores: cute.Tensor,
    r: cutlass.Constexpr,
    bias: cute.Tensor,
    first_key,
    numbers,
    masked: cutlass.Constexpr,
):
    """Turn scores of row r of the thread into logits in log2 units, in place; -inf where the bias is -inf.

    bias: the row (KEY). first_key: key of the thread's element 0. masked: the tile may reach past the keys; the caller
    hides the results there.
    """
    last = cute.size(bias) - 1
    start = bias.iterator + first_key
    for place, i in enumerate(elements(scores, r)):
        offset = column(i)
        value = cute.make_rmem_tensor(1, TYPES[config.logits.bias.dtype])
        value.fill(0.0)
        if cutlass.const_expr(not masked) or first_key + offset <= last:
            value[0] = start[offset]
        added = value[0].to(Float32)
        scores[i] = add_bias(map_score(config.logits, scores[i], numbers, place), added)
