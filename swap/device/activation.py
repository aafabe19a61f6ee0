"""SiLU and SwiGLU in fp32."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = math.log2(math.e)


def silu(x) -> Float32:
    """x / (1 + exp(-x))."""
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))


def swiglu_pair(gates: list, ups: list) -> list:
    """``swiglu`` of two pairs with one reciprocal: 1 / a is b times 1 / (a b).

    exp(-x) is held at 2^62, so that the product of two is finite: where it is, silu is below 1e-17.
    """
    below = [1.0 + cute.math.exp2(cutlass.min(x * -LOG2_E, 62.0), fastmath=True) for x in gates]
    inverse = cute.arch.rcp_approx(below[0] * below[1])
    return [gates[i] * (inverse * below[1 - i]) * ups[i] for i in range(2)]


def swiglu(gate, up) -> Float32:
    return silu(gate) * up
