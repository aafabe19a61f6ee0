"""The map between S and P on the device (``fmha.logits``): scores to logits, and the map's derivative.

A soft cap is cap * tanh(x / cap) with tanh(y) = 1 - 2 / (exp(2 y) + 1): good to 1e-5, where the tanh instruction's
2**-11 would show in the weights. The exponential unit would then have three results to make for a score: two
exponentials, one reciprocal. Where that binds, the reciprocal is made on the multiply-add units, which have time: an
estimate from the bits of the number, and two of Newton's steps.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.logarithms import LOG2_E
from warpspec.fmha.logits import LogitNumbers

# RECIPROCAL_BITS minus the bits of x are those of 1 / x, but for 6%; each step y (c - x y) squares the error. The
# constants make the largest error smallest: 1.5e-3 after one step, 1.3e-6 after two.
RECIPROCAL_BITS = 0x7EF33770
RECIPROCAL_STEPS = (2.00149958, 2.00000104)
# tanh is 1 to the last bit of fp32 from here on, in powers of two of its exponential, which stays finite.
LARGEST_EXPONENT = 60.0
SMALLEST_NORMAL = 2.0**-126


def unit(logits, numbers: LogitNumbers):
    """Powers of two in one unit of a mapped score."""
    return Float32(1.0) if logits.in_powers else numbers.factor


def map_score(logits, score: Float32, numbers: LogitNumbers, place: int = 0) -> Float32:
    """The logit of a score without its bias, in powers of two. place: the score's number among those of a thread, which
    says where its reciprocal is made."""
    return cap_score(logits, score, numbers, place) if logits.softcap else score * numbers.factor


def cap_score(logits, score: Float32, numbers: LogitNumbers, place: int) -> Float32:
    """The soft cap of a score in powers of two; NaN where the score is."""
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
    """Scores at some places (n) become logits in powers of two, in place, under a map without bias."""
    for number, i in enumerate(places):
        scores[i] = map_score(logits, scores[i], numbers, number)


def negate_scores(logits, scores: cute.Tensor) -> None:
    """Scores (n) with the sign that a positive scale wants, in place."""
    if logits.negate:
        for i in range(cute.size(scores)):
            scores[i] = -scores[i]


def add_bias(logit: Float32, bias: Float32) -> Float32:
    """A logit in powers of two and its bias in natural units. The sum is -inf where the bias is, by selection, for the
    score may be NaN; it is rounded to zero: the largest finite biases, which masks like to be made of, stay finite."""
    total = cute.arch.inline_ptx(
        "fma.rz.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[bias, Float32(LOG2_E), logit],
    )
    return Float32(cutlass.select_(Boolean(bias == -Float32.inf), -Float32.inf, total))


def slope(weight: Float32, offset: Float32, numbers: LogitNumbers) -> Float32:
    """Derivative of the soft cap at a weight of softmax: 1 - (y / cap)**2, with y the capped logit.

    The weight is 2**(y - offset) in powers of two, so that y need not be kept beside it. A weight of 0 has slope 1:
    what is multiplied with it is 0.
    """
    positive = cute.arch.fmax(weight, SMALLEST_NORMAL)
    ratio = (cute.math.log2(positive, fastmath=True) + offset) * cute.arch.rcp_approx(numbers.cap)
    return cute.arch.fmax(Float32(1.0) - ratio * ratio, Float32(0.0))
