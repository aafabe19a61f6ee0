"""The map between S and P on the device (``fmha.logits``): scores to logits, and the map's derivative.

A soft cap is cap * tanh(x / cap) with tanh(y) = 1 - 2 / (exp(2 y) + 1): good to 1e-5, where the tanh instruction's
2**-11 would show in the weights. The special-function unit would then compute three results per score: two exponentials
and a reciprocal. Where this is the bottleneck, the idle multiply-add units compute the reciprocal: an estimate from the
number's bits, and two Newton steps.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.logarithms import LOG2_E
from warpspec.fmha.logits import SMALLEST_SCALE, LogitNumbers

# RECIPROCAL_BITS minus the bits of x are those of 1 / x, but for 6%; each step y (c - x y) squares the error. The
# constants make the largest error smallest: 1.5e-3 after one step, 1.3e-6 after two.
RECIPROCAL_BITS = 0x7EF33770
RECIPROCAL_STEPS = (2.00149958, 2.00000104)
# From this exponent (log2) of its exponential on, tanh rounds to 1 in fp32; the exponential stays finite.
LARGEST_EXPONENT = 60.0
SMALLEST_NORMAL = 2.0**-126


def unit(logits, numbers: LogitNumbers):
    """log2 units per unit of a mapped score."""
    return Float32(1.0) if logits.in_powers else numbers.factor


def map_score(logits, score: Float32, numbers: LogitNumbers, place: int = 0) -> Float32:
    """The logit of a score without its bias, in log2 units. place: the score's number in its thread, which decides on
    which unit its reciprocal is computed."""
    return cap_score(logits, score, numbers, place) if logits.softcap else score * numbers.factor


def map_pair(logits, pair: tuple, numbers: LogitNumbers, place: int) -> tuple:
    """``map_score`` of two scores at neighbouring places, on architectures that multiply pairs."""
    if logits.curved:
        return tuple(map_score(logits, score, numbers, place + i) for i, score in enumerate(pair))
    return cute.arch.mul_packed_f32x2(pair, (numbers.factor, numbers.factor))


def with_factor(logits, numbers: LogitNumbers, factor: Float32) -> LogitNumbers:
    """The numbers of a map with another factor of scores, at least 0, that only the device knows."""
    if not logits.curved:
        factor = cute.arch.fmax(factor, SMALLEST_SCALE, nan=True)
    return numbers._replace(factor=factor)


def cap_score(logits, score: Float32, numbers: LogitNumbers, place: int) -> Float32:
    """Soft-cap a score, in log2 units; NaN stays NaN."""
    newton = logits.newton_every and place % logits.newton_every == 0
    exponent = score * numbers.factor
    if newton:
        exponent = cute.arch.fmin(exponent, LARGEST_EXPONENT, nan=True)
    denominator = cute.math.exp2(exponent, fastmath=True) + Float32(1.0)
    inverse = reciprocal(denominator) if newton else cute.arch.rcp_approx(denominator)
    return inverse * (numbers.cap * Float32(-2.0)) + numbers.cap


def reciprocal(x: Float32) -> Float32:
    """1 / x of a normal number x >= 1 on the multiply-add units, with a relative error of 1.3e-6."""
    estimate = (Int32(RECIPROCAL_BITS) - x.bitcast(Int32)).bitcast(Float32)
    for constant in RECIPROCAL_STEPS:
        estimate = estimate * (Float32(constant) - x * estimate)
    return estimate


def map_scores(logits, scores: cute.Tensor, places, numbers: LogitNumbers) -> None:
    """Turn scores (n) at these places into logits in log2 units, in place, by a map without bias."""
    for number, i in enumerate(places):
        scores[i] = map_score(logits, scores[i], numbers, number)


def negate_scores(logits, scores: cute.Tensor) -> None:
    """Give scores (n) the sign that a positive scale needs, in place."""
    if logits.negate:
        for i in range(cute.size(scores)):
            scores[i] = -scores[i]


def add_bias(logit: Float32, bias: Float32) -> Float32:
    """Add a bias in natural units to a logit in log2 units. If the bias is -inf, so is the sum, by selection, because
    the score may be NaN. The sum rounds toward zero, so the largest finite biases, often used as masks, stay finite."""
    total = cute.arch.inline_ptx(
        "fma.rz.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[bias, Float32(LOG2_E), logit],
    )
    return Float32(cutlass.select_(Boolean(bias == -Float32.inf), -Float32.inf, total))


def slope(weight: Float32, offset: Float32, numbers: LogitNumbers) -> Float32:
    """Derivative of a curved map, the soft cap, from a softmax weight: 1 - (y / cap)**2, with y the capped logit.

    The weight is 2**(y - offset), which gives y back, so y need not be kept. A weight of 0 has slope 1; the weight
    multiplies it by 0 anyway.
    """
    positive = cute.arch.fmax(weight, SMALLEST_NORMAL)
    ratio = (cute.math.log2(positive, fastmath=True) + offset) * cute.arch.rcp_approx(numbers.cap)
    return cute.arch.fmax(Float32(1.0) - ratio * ratio, Float32(0.0))
