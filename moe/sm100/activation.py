"""From accumulators to outputs: global scales, bias, clamp, activation. One fp32 value at a time, in registers.

The activations are those of ``moe/activations.py``. NaN goes through the clamps, as in torch.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from warpspec.moe.activations import activation_named

LOG2_E = math.log2(math.e)


def scaled(pair, scales, biases) -> tuple[Float32, Float32]:
    """Two accumulators times their global scales, plus their biases in the same rounding, where there are any.

    So every choice of tiles gives the same bits; left to the compiler, a bias might be rounded once or twice.
    """
    if biases is None:
        return cute.arch.mul_packed_f32x2(pair, scales)
    return cute.arch.fma_packed_f32x2(pair, scales, biases)


def gated(config, gate, up, limit) -> Float32:
    """The activation of one gate and one up. limit: read where the configuration has one."""
    if config.has_limit:
        gate = cute.arch.fmin(gate, limit, nan=True)
        up = cute.arch.fmax(cute.arch.fmin(up, limit, nan=True), -limit, nan=True)
    form = activation_named(config.epilogue)
    weighted = gate * sigmoid(gate, form.slope)
    return weighted * (up + Float32(form.shift)) if form.shift else weighted * up


def sigmoid(x, slope: float) -> Float32:
    """1 / (1 + exp(-slope x))."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * Float32(-slope * LOG2_E), fastmath=True))


def global_scales(config, operands, expert) -> tuple[Float32, Float32]:
    """The weights' global scales, of gate and of up; the same twice where there is one."""
    last = cutlass.const_expr(1 if config.gated else 0)
    return operands.global_scale[expert, 0], operands.global_scale[expert, last]
