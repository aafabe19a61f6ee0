"""From accumulators to outputs: global scales, bias, clamp, activation. One fp32 value at a time, in registers.

The activations are in ``moe/gate.py``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32


def scaled(pair, scales, biases) -> tuple[Float32, Float32]:
    """Two accumulators times their global scales, plus their biases in the same rounding, where there are any.

    So every choice of tiles gives the same bits; left to the compiler, a bias might be rounded once or twice.
    """
    if biases is None:
        return cute.arch.mul_packed_f32x2(pair, scales)
    return cute.arch.fma_packed_f32x2(pair, scales, biases)


def global_scales(config, operands, expert) -> tuple[Float32, Float32]:
    """The weights' global scales, of gate and of up; the same twice where there is one."""
    last = cutlass.const_expr(1 if config.gated else 0)
    return operands.global_scale[expert, 0], operands.global_scale[expert, last]
