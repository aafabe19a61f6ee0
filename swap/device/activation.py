"""SiLU and SwiGLU in fp32."""

from __future__ import annotations

from cutlass import Float32, cute

from warpspec.common.logarithms import LOG2_E


def silu(x) -> Float32:
    """x / (1 + exp(-x))."""
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))


def swiglu(gate, up) -> Float32:
    return silu(gate) * up
