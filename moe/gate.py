"""The gated activations of ``moe/activations.py`` on the device, one fp32 value at a time, in registers.

NaN passes through the clamps, as in torch.
"""

from __future__ import annotations

from cutlass import Float32, cute

from warpspec.common.logarithms import LOG2_E
from warpspec.moe.activations import activation_named


def gated(config, gate, up, limit) -> Float32:
    """The activation of one gate and one up value. limit: used only if the configuration has one."""
    if config.has_limit:
        gate = cute.arch.fmin(gate, limit, nan=True)
        up = cute.arch.fmax(cute.arch.fmin(up, limit, nan=True), -limit, nan=True)
    form = activation_named(config.epilogue)
    weighted = gate * sigmoid(gate, form.slope)
    return weighted * (up + Float32(form.shift)) if form.shift else weighted * up


def sigmoid(x, slope: float) -> Float32:
    """1 / (1 + exp(-slope x))."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * Float32(-slope * LOG2_E), fastmath=True))
