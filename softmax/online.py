"""The online softmax's state of some elements: their maximum and the sum of their exponentials. Device side.

State of a set of elements: maximum m and sum s of exp(x - m), both fp32 (Milakov and Gimelshein 2018). The state
of no element, or of elements that are all -inf, is (-inf, 0). Two states join into that of the union, in any
grouping: m = max(m1, m2), s = s1 exp(m1 - m) + s2 exp(m2 - m). A NaN anywhere ends up in s, an element of +inf
too (inf - inf), and a row of all -inf ends with s NaN or 0: each makes the whole row NaN, as torch.softmax does.

Exponentials are powers of two: exp(x) = 2**(x log2 e), one instruction for the power.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.softmax.vectors import PAIRS, TYPES, as_float, unpack

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
# By so much of itself an H200's power of two is too small in the mean, where the exponent is below -1.
EXP2_BIAS = 5e-8
# Added to a number, it leaves a whole one in the lowest bits; FP32_ONE: 1.0's bits.
TO_WHOLE = 1.5 * 2.0**23
FP32_EXPONENT_BIT, FP32_ONE = 23, 0x3F800000
# log2 e in two fp32 numbers: what rounding it leaves.
LOG2_E_HIGH = 1.44269502162933349609375
LOG2_E_LOW = LOG2_E - LOG2_E_HIGH
# Below, an exponential is not a normal number of fp32, and counts as 0. -inf too.
LOWEST_EXPONENT = -126 * LN_2
# 16-bit numbers above are at least 2**12 apart. Below, rounding a number times log2 e leaves an exponent less than 1.
LARGE_REFERENCE = 2.0**23


def exponential(difference, accurate: bool) -> Float32:
    """exp(difference), difference <= 0 or NaN; about an ulp where ``accurate``.

    Otherwise the relative error grows with |difference|, as 6e-8 of it, from the one rounding of
    difference * log2(e): less than a rounding of the 16-bit types wherever the result is not 0.

    Accurate ones take the power of a fraction in 0..1 and scale it by the whole rest: below 0 the GPU's power of two
    has a bias, 2e-8 and more of it (see EXP2_BIAS), which sums of many would keep.
    """
    if not accurate:
        return cute.math.exp2(difference * LOG2_E, fastmath=True)
    shifted = fma_down(difference, LOG2_E_HIGH, TO_WHOLE)  # its lowest bits are a whole number
    whole = shifted - TO_WHOLE
    fraction = cute.math.fma(difference, LOG2_E_HIGH, -whole)
    fraction = cute.math.fma(difference, LOG2_E_LOW, fraction)
    scale = Int32((shifted.bitcast(Int32) << FP32_EXPONENT_BIT) + FP32_ONE).bitcast(Float32)
    power = cute.math.exp2(fraction, fastmath=True) * scale
    return Float32(cutlass.select_(Boolean(difference < LOWEST_EXPONENT), Float32(0.0), power))


def fma_down(a, b, c) -> Float32:
    """a b + c, rounded towards -inf."""
    return cute.arch.inline_ptx(
        "fma.rm.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[Float32(x) for x in (a, b, c)],
    )


def reference_of(maximum) -> Float32:
    """What exponents are taken against: the maximum, or 0 where that is -inf (-inf - -inf would be NaN)."""
    return Float32(cutlass.select_(Boolean(maximum == -Float32.inf), Float32(0.0), maximum))


def state_of(value, accurate: bool) -> tuple:
    """The state of one element."""
    return Float32(value), exponential(value - reference_of(value), accurate)


def join(first: tuple, second: tuple, accurate: bool) -> tuple:
    """The state of the union of two sets."""
    maximum = cute.arch.fmax(first[0], second[0])
    reference = reference_of(maximum)
    total = first[1] * exponential(first[0] - reference, accurate)
    return maximum, total + second[1] * exponential(second[0] - reference, accurate)


CHAINS = 4  # of dependent additions or maxima, side by side: one's latency hides under the others'


def largest(values: cute.Tensor, start) -> Float32:
    """Largest of ``start`` and fp32 ``values``; NaN is passed over (it comes back through the exponential)."""
    chains = [Float32(start)]
    for i in range(cute.size(values)):
        if i < CHAINS:
            chains.append(values[i])
        else:
            chains[1 + i % CHAINS] = cute.arch.fmax(chains[1 + i % CHAINS], values[i])
    while len(chains) > 1:
        chains.append(cute.arch.fmax(chains.pop(0), chains.pop(0)))
    return chains[0]


def exponentiate(values: cute.Tensor, reference, accurate: bool) -> Float32:
    """values become exp(values - reference), in place; returns their sum."""
    for i in range(cute.size(values)):
        values[i] = exponential(values[i] - reference, accurate)
    return sum_of(values)


@dataclass(frozen=True)
class Powers:
    """exp(x - reference) = 2**(x factor - offset) * correction, one instruction for the exponent. 16-bit data only.

    offset is reference * factor as rounded; the correction is what that rounding left. factor: log2 e; 1 where the
    reference is so large that numbers of 16 bits next to it are thousands away: then powers are 1 or 0.
    """

    reference: Float32
    factor: Float32
    offset: Float32

    @classmethod
    def against(cls, reference: Float32) -> Powers:
        large = Boolean(cute.math.absf(reference) >= LARGE_REFERENCE)
        factor = Float32(cutlass.select_(large, Float32(1.0), Float32(LOG2_E_HIGH)))
        return cls(reference, factor, reference * factor)

    def correction(self) -> Float32:
        rounding = cute.math.fma(self.reference, self.factor, -self.offset)
        return cute.math.exp2(-rounding, fastmath=True)

    def of(self, x: Float32) -> Float32:
        """The power of x, not corrected."""
        return cute.math.exp2(cute.math.fma(x, self.factor, -self.offset), fastmath=True)


def absorb(state: tuple, words: cute.Tensor, dtype: str) -> tuple:
    """The state of a set of elements and packed ``words`` (WORDS, ...) together."""
    values = as_float(words, dtype)
    if dtype == "float32":
        maximum = largest(values, state[0])
        reference = reference_of(maximum)
        total = exponentiate(values, reference, True)
        return maximum, state[1] * exponential(state[0] - reference, True) + total
    pair = words[0]
    for i in range(1, cute.size(words)):
        pair = cute.arch.inline_ptx(
            f"max.{PAIRS[dtype]} {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Int32],
            read_only_args=[pair, words[i]],
        )
    maximum = state[0]
    for value in unpack(pair, dtype):
        maximum = cute.arch.fmax(maximum, value)
    reference = reference_of(maximum)
    powers = Powers.against(reference)
    for i in range(cute.size(values)):
        values[i] = powers.of(values[i])
    total = sum_of(values) * powers.correction()
    return maximum, cute.math.fma(state[1], exponential(state[0] - reference, False), total)


def sum_of(values: cute.Tensor) -> Float32:
    """The sum of fp32 ``values``, by a few chains of additions side by side."""
    chains = []
    for i in range(cute.size(values)):
        if i < CHAINS:
            chains.append(values[i])
        else:
            chains[i % CHAINS] += values[i]
    while len(chains) > 1:
        chains.append(chains.pop(0) + chains.pop(0))
    return chains[0]


def scale(words: cute.Tensor, maximum, inverse, dtype: str) -> None:
    """Packed elements x become exp(x - maximum) * inverse, in place. maximum: of their row."""
    values = as_float(words, dtype)
    if dtype == "float32":
        for i in range(cute.size(values)):
            values[i] = exponential(values[i] - maximum, True) * inverse
    else:
        powers = Powers.against(maximum)
        factor = inverse * powers.correction()
        for i in range(cute.size(values)):
            values[i] = powers.of(values[i]) * factor
    cute.recast_tensor(words, TYPES[dtype]).store(values.load().to(TYPES[dtype]))
