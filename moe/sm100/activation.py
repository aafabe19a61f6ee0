"""Turn accumulators into outputs: global scales, bias, clamp, activation. One fp32 value at a time, in registers.

``moe/gate.py`` has the activations.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32


def scaled(pair, scales, biases) -> tuple[Float32, Float32]:
    """Multiply two accumulators by their global scales and add their biases, if any, with one rounding.

    All choices of tiles thus give the same bits. The compiler, left to itself, might round once or twice.
    """
    if biases is None:
        return cute.arch.mul_packed_f32x2(pair, scales)
    return cute.arch.fma_packed_f32x2(pair, scales, biases)


def global_scales(config, operands, expert) -> tuple[Float32, Float32]:
    """The weights' global scales of gate and of up; the same value twice if there is only one."""
    last = cutlass.const_expr(1 if config.gated else 0)
    return operands.global_scale[expert, 0], operands.global_scale[expert, last]
