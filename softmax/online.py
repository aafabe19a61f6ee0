"""The online softmax's state of a set of elements: their maximum and the sum of their exponentials. Device side.

The state is the maximum m and the sum s of exp(x - m), both fp32 (Milakov and Gimelshein 2018). The state of no
element, or of elements that are all -inf, is (-inf, 0). The states of two sets join into that of their union, in any
grouping: m = max(m1, m2), s = s1 exp(m1 - m) + s2 exp(m2 - m). A NaN anywhere ends up in s, and so does an element of
+inf (inf - inf). A row of all -inf ends with s NaN or 0. Each of these makes the whole row NaN, as in torch.softmax.

Exponentials are powers of two: exp(x) = 2**(x log2 e), where the power takes one instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.logarithms import LOG2_E
from warpspec.softmax.vectors import PAIRS, TYPES, as_float, unpack

# Mean relative error by which an H200's power of two is too small, for exponents below -1.
EXP2_BIAS = 5e-8
# Adding TO_POWER to a number leaves an integer in the lowest bits, with the bias of an fp32 exponent added.
FP32_EXPONENT_BIT, FP32_BIAS = 23, 127
TO_POWER = 1.5 * 2.0**23 + FP32_BIAS
# log2 e as the sum of two fp32 numbers; the second is the rounding error of the first.
LOG2_E_HIGH = 1.44269502162933349609375
LOG2_E_LOW = LOG2_E - LOG2_E_HIGH
# Above it, 16-bit numbers are at least 2**12 apart. Below it, rounding a number times log2 e changes an exponent by
# less than 1.
LARGE_REFERENCE = 2.0**23


def exponential(difference, accurate: bool) -> Float32:
    """exp(difference), for difference <= 0 or NaN; if ``accurate``, to about an ulp.

    Otherwise the relative error is 6e-8 times |difference|, from the one rounding of difference * log2(e). That is less
    than a rounding of the 16-bit types wherever the result is not 0.

    The accurate version takes the power of a fraction in 0..1 and scales it by the integer part. Below 0 the GPU's
    power of two has a bias of 2e-8 and more (see EXP2_BIAS), which would remain in the sum of many. An exponential that
    is no normal fp32 number, also that of -inf, counts as 0: its scale has the exponent of 0.
    """
    if not accurate:
        return cute.math.exp2(difference * LOG2_E, fastmath=True)
    shifted = cute.arch.fmax(fma_down(difference, LOG2_E_HIGH, TO_POWER), Float32(TO_POWER - FP32_BIAS))
    whole = shifted - TO_POWER
    fraction = cute.math.fma(difference, LOG2_E_HIGH, -whole)
    fraction = cute.math.fma(difference, LOG2_E_LOW, fraction)
    scale = Int32(shifted.bitcast(Int32) << FP32_EXPONENT_BIT).bitcast(Float32)
    return cute.math.exp2(fraction, fastmath=True) * scale


def fma_down(a, b, c) -> Float32:
    """a b + c, rounded towards -inf."""
    return cute.arch.inline_ptx(
        "fma.rm.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[Float32(x) for x in (a, b, c)],
    )


def reference_of(maximum) -> Float32:
    """The number that exponents are relative to: the maximum, or 0 if that is -inf (-inf - -inf would be NaN)."""
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


CHAINS = 4  # dependent additions or maxima are done in this many independent chains, to hide their latency


def largest(values: cute.Tensor, start) -> Float32:
    """Largest of ``start`` and fp32 ``values``; ignores NaN, which the exponential will bring back."""
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
    """Replace values by exp(values - reference), in place; returns their sum."""
    for i in range(cute.size(values)):
        values[i] = exponential(values[i] - reference, accurate)
    return sum_of(values)


@dataclass(frozen=True)
class Powers:
    """exp(x - reference) = 2**(x factor - offset) * correction, with one instruction for the exponent. 16-bit data
    only.

    offset is reference * factor, rounded; the correction undoes this rounding. factor is log2 e, or 1 if the reference
    is so large that 16-bit numbers next to it are thousands away: powers are then 1 or 0.
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
        """The power of x, without the correction."""
        return cute.math.exp2(cute.math.fma(x, self.factor, -self.offset), fastmath=True)


def absorb(state: tuple, words: cute.Tensor, dtype: str) -> tuple:
    """The joint state of a set of elements and of packed ``words`` (WORDS, ...)."""
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
    """The sum of fp32 ``values``, in a few independent chains of additions."""
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
    """Replace packed elements x by exp(x - maximum) * inverse, in place. maximum: that of their row."""
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
