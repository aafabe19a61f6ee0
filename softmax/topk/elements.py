"""The elements of 16-byte vectors as numbers; their maxima and sums. Device side, plain Python over registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.logarithms import LN_2
from warpspec.softmax.online import (
    EXP2_BIAS,
    LOG2_E_HIGH,
    LOG2_E_LOW,
    exponential,
    reference_of,
)
from warpspec.softmax.vectors import PAIRS, WORDS, unpack

# The rounding of a maximum below this, times log2(e), is so small that its effect is linear (to 1e-9).
MOST_SCALED = 2.0**10


def floats(words: cute.Tensor, dtype: str) -> list:
    """The elements of words (WORDS) Int32, as Float32."""
    return [x for i in range(WORDS) for x in unpack(words[i], dtype)]


def largest(values: list) -> Float32:
    """The maximum of the values, NaN if one is NaN."""
    return _tree(values, lambda a, b: cute.arch.fmax(a, b, nan=True))


def total(values: list) -> Float32:
    return _tree(values, lambda a, b: a + b)


def largest_in(words: list, dtype: str) -> Float32:
    """The largest element of packed words, NaN if there is one; 16-bit elements are compared two at a time."""
    if dtype == "float32":
        return largest([word.bitcast(Float32) for word in words])

    def pairwise(a, b):
        return cute.arch.inline_ptx(
            f"max.NaN.{PAIRS[dtype]} {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Int32],
            read_only_args=[a, b],
        )

    return largest(unpack(_tree(words, pairwise), dtype))


def _tree(values: list, join):
    while len(values) > 1:
        pairs = [join(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


@cute.jit
def exponentials(values: list, highest: Float32, maximum: Float32, dtype: cutlass.Constexpr) -> Float32:
    """Sum of exp(x - maximum) over ``values`` of ``dtype``, none of which is above the maximum. highest: their largest.

    Computed as powers of two of x log2(e) - r, where r is maximum log2(e), rounded. This takes no more instructions
    than computing the difference first, and for fp32 has no error from log2(e), which is used in two parts. Two errors
    are corrected in the sum. The rounding of r is undone by a factor 1 - rounding ln(2); its exponential would
    have an error of its own, common to the whole row. The bias of the powers is removed from all terms but one
    maximum's, which is exactly 1. For a large maximum, the difference is computed first.
    """
    reference = reference_of(maximum)
    negative = -reference * LOG2_E_HIGH
    sum_ = Float32(0.0)
    if cute.arch.vote_all_sync(Boolean(cute.math.absf(reference) < MOST_SCALED)):
        powers = [cute.math.fma(x, LOG2_E_HIGH, negative) for x in [reference, *values]]
        if cutlass.const_expr(dtype == "float32"):
            powers = [
                cute.math.fma(x, LOG2_E_LOW, p) for x, p in zip([reference, *values], powers, strict=True)
            ]
        rounding, *powers = powers
        sum_ = total([cute.math.exp2(power, fastmath=True) for power in powers])
        others = Float32(cutlass.select_(Boolean(highest == maximum), cute.arch.fmax(sum_ - 1.0, 0.0), sum_))
        missing = cute.math.fma(sum_, rounding * -LN_2, others * EXP2_BIAS)
        sum_ += missing
    else:
        cute.arch.sync_warp()  # otherwise the compiler computes both sums and selects one
        sum_ = total([exponential(x - reference, dtype == "float32") for x in values])
    return sum_
