"""The map between S and P on the device (``fmha.logits``): scores to logits, and the map's derivative.

A soft cap is cap * tanh(x / cap) with tanh(y) = 1 - 2 / (exp(2 y) + 1): good to 1e-5, where the tanh instruction's
2**-11 would show in the weights. The special-function unit would then compute three results per score: two exponentials
and a reciprocal. Where this is the bottleneck, the idle multiply-add units compute the reciprocal: an estimate from the
number's bits, and two Newton steps. Small scores need none of these results: there tanh is a polynomial.
"""

from __future__ import annotations

import math

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
# Up to SMALL_ARGUMENT tanh(x) is x times a polynomial in x**2, with a relative error of 2.4e-7: its coefficients. Those
# of a polynomial of scores are normal numbers if the factor's magnitude is between the FACTORS.
SMALL_ARGUMENT = 0.45
TANH = (0.9999997567465688, -0.33329467206686664, 0.13236369131250664, -0.04602819371981982)
FACTORS = 2.0**-14, 2.0**14
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


def are_small(scores: cute.Tensor, numbers: LogitNumbers) -> Boolean:
    """Whether ``cap_small`` may cap scores (n); NaN is ignored."""
    chains = [cute.math.absf(scores[i]) for i in range(2)]
    for i in range(2, cute.size(scores)):
        chains[i % 2] = cute.arch.fmax(chains[i % 2], cute.math.absf(scores[i]))
    factor, (least, most) = cute.math.absf(numbers.factor), FACTORS
    exponent = cute.arch.fmax(chains[0], chains[1]) * factor
    suited = Boolean(factor >= least) & Boolean(factor <= most)
    return suited & Boolean(exponent <= 2 * LOG2_E * SMALL_ARGUMENT)


def was_large(reference: Float32, numbers: LogitNumbers) -> Boolean:
    """Whether a reference, in log2 units, says that a score was not small."""
    return Boolean(reference > numbers.cap * Float32(math.tanh(SMALL_ARGUMENT)))


def cap_small(scores: cute.Tensor, numbers: LogitNumbers) -> None:
    """Soft-cap small scores (n) in place, as ``cap_score`` does, without the special-function unit."""
    argument = numbers.factor * Float32(0.5 / LOG2_E)  # of a score of 1
    term, terms = numbers.cap * argument, []
    for coefficient in TANH:
        terms.append(term * Float32(coefficient))
        term = term * argument * argument
    for i in range(cute.size(scores)):
        square, total = scores[i] * scores[i], terms[-1]
        for term in reversed(terms[:-1]):
            total = total * square + term
        scores[i] = scores[i] * total


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
