"""Online softmax of one row held by one thread, in the base-2 domain (Milakov and Gimelshein 2018; the
rescale rule is FlashAttention-4's).

State: ``reference`` (a logit in log2 units) and ``row_sum`` = sum of 2**(unit * s - reference) over the scores s seen
so far; O is accumulated in the same units. The reference need not be the maximum: any value gives the same quotient
O / row_sum. So it moves only when the maximum has outgrown it by more than a threshold, and only then must O be
rescaled. Before any score is seen both are -inf and 0.

The reference is a rounded product, unit * maximum, and is kept as that: every weight and every factor is relative to
the rounded number, so its rounding changes all weights of a row alike. The largest weight is then 2**e, with e up to
half the spacing of fp32 numbers near the reference: nearly 1 up to references of 2**23, and, with what the
reference lags, too large for P's dtype from 2**31 on (2**27 if that is fp16).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.logarithms import LN_2, LOG2_E

FP32_MANTISSA_BITS = 23
FP32_EXPONENT_BIAS = 127
EXP2_LOWEST = -127.0  # 2 to this has exponent field 0: the result becomes 0
HEAVY = 16.0  # what weighs less than a part of this of the weights before is light
MOST_LAG = 8.0  # powers of two that a reference lags behind a light maximum at most
EXPONENT_SHIFTER = 1.5 * 2.0**FP32_MANTISSA_BITS + FP32_EXPONENT_BIAS
# By degree, lowest power first: least largest relative error on [-0.5, 0.5], by Remez exchange
# (tests/fmha/test_exp2.py derives them). 7.5e-5 for degree 3, 26 times below bf16's rounding of 2**-9 but
# only 3 times below fp16's 2**-12; 2.6e-6 for degree 4.
EXP2_COEFFICIENTS = {
    3: (0.99992806, 0.693261, 0.24261113, 0.05517167),
    4: (0.9999993, 0.6931218, 0.24024745, 0.055917859, 0.009570102),
}


def maximum(scores: cute.Tensor) -> Float32:
    """Largest of ``scores`` (n) fp32; NaN is ignored (it reappears in the exponential)."""
    chains = 4  # independent chains, to hide latency
    partial = [scores[i] for i in range(chains)]
    for i in range(chains, cute.size(scores)):
        partial[i % chains] = cute.arch.fmax(partial[i % chains], scores[i])
    return cute.arch.fmax(cute.arch.fmax(partial[0], partial[1]), cute.arch.fmax(partial[2], partial[3]))


def move_reference(reference, row_maximum, unit, threshold):
    """-> (new reference, factor for O and row_sum, whether it moved).

    row_maximum: of all scores so far. The reference follows it only when it lags by more than ``threshold``
    powers of two. From -inf it moves as soon as there is a score, with factor 0: nothing was summed before.
    """
    highest = rounded_product(row_maximum, unit)
    lag = highest - reference
    moved = Boolean(lag > threshold)  # -inf - -inf is NaN: not moved
    factor = Float32(cutlass.select_(moved, cute.math.exp2(-lag, fastmath=True), Float32(1.0)))
    return Float32(cutlass.select_(moved, highest, reference)), factor, moved


def lag_of_light(total) -> Float32:
    """Powers of two that a reference may lag behind a maximum that weighs little: a part of HEAVY of ``total``, the
    weights before, at most."""
    lag = cute.math.log2(total * (1 / HEAVY), fastmath=True)  # -inf without weights
    return cute.arch.fmin(cute.arch.fmax(lag, Float32(0.0)), Float32(MOST_LAG))


def rounded_product(a, b) -> Float32:
    """a * b, rounded even where a sum follows, which a fused multiply-add would add to the unrounded product."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[Float32(a), Float32(b)]
    )


def less_product(a, b, c) -> Float32:
    """a - b * c, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[Float32(-b), Float32(c), Float32(a)],
    )


def offset_of(reference) -> Float32:
    """What is added to scores in log2 units: -reference, or 0 while there was no score: every score is then -inf."""
    return Float32(cutlass.select_(Boolean(reference == -Float32.inf), Float32(0.0), -reference))


def exponentiate(scores: cute.Tensor, reference, unit, polynomial_every: int = 0, degree: int = 4) -> Float32:
    """Turn scores (n) fp32 into 2**(unit * s - reference) in place; returns their sum.

    With reference -inf every score is -inf, and becomes 0. polynomial_every: one in this many pairs of scores (int or
    Fraction) uses ``exp2_polynomial`` of ``degree`` instead of the exponential unit; 0: none.
    """
    offset = offset_of(reference)
    sums = [(Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0))]
    for pair in range(cute.size(scores) // 2):
        i = 2 * pair
        powers = cute.arch.fma_packed_f32x2((scores[i], scores[i + 1]), (unit, unit), (offset, offset))
        if polynomial_every and (pair + 1) // polynomial_every > pair // polynomial_every:
            powers = exp2_polynomial(powers, degree)
        else:
            powers = tuple(cute.math.exp2(power, fastmath=True) for power in powers)
        scores[i], scores[i + 1] = powers
        chain = pair % len(sums)
        sums[chain] = cute.arch.add_packed_f32x2(sums[chain], powers)
    low, high = cute.arch.add_packed_f32x2(sums[0], sums[1])
    return low + high


def exp2_polynomial(pair, degree: int = 4):
    """2**x of two fp32 on the multiply-add units: 2**n * 2**f with n the nearest integer, |f| <= 0.5.

    degree: 3 (relative error 7.6e-5, enough for bf16) or 4 (2.8e-6). 0 below -126.5 (-inf included), NaN
    where x is NaN. x at most 127.
    """
    coefficients = EXP2_COEFFICIENTS[degree]
    pair = tuple(cute.arch.fmax(x, EXP2_LOWEST, nan=True) for x in pair)
    # Adding this number leaves n + 127, the exponent field of 2**n, in the low bits of the sum.
    shifted = cute.arch.add_packed_f32x2(pair, (EXPONENT_SHIFTER, EXPONENT_SHIFTER))
    whole = cute.arch.add_packed_f32x2(shifted, (-EXPONENT_SHIFTER, -EXPONENT_SHIFTER))
    fraction = cute.arch.sub_packed_f32x2(pair, whole)
    result = (Float32(coefficients[-1]),) * 2
    for coefficient in reversed(coefficients[:-1]):
        result = cute.arch.fma_packed_f32x2(result, fraction, (Float32(coefficient),) * 2)
    powers = tuple((x.bitcast(Int32) << FP32_MANTISSA_BITS).bitcast(Float32) for x in shifted)
    return cute.arch.mul_packed_f32x2(result, powers)


def scale_by(values: cute.Tensor, factor) -> None:
    """values (n) fp32 times ``factor``, in place."""
    for i in range(0, cute.size(values), 2):
        pair = (values[i], values[i + 1])
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2(pair, (factor, factor))


def log_sum(reference, row_sum) -> Float32:
    """ln(sum of exp(scale s)): natural log, -inf where there was no score."""
    return (reference + cute.math.log2(row_sum, fastmath=True)) * LN_2


def sink_term(sink, reference) -> Float32:
    """Contribution to ``row_sum`` of a logit, in natural units, that has no value row."""
    return cute.math.exp2(sink * LOG2_E - reference, fastmath=True)
