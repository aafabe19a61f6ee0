"""Online softmax of one row held by one thread, in the base-2 domain (Milakov and Gimelshein 2018; the
rescale rule is FlashAttention-4's).

State: ``reference`` (raw score units, not scaled) and ``row_sum`` = sum of 2**(scale_log2 * (s - reference))
over the scores seen so far; O is accumulated in the same units. The reference need not be the maximum: any
value gives the same quotient O / row_sum. So it moves only when the maximum has outgrown it by more than a
threshold, and only then must O be rescaled. Before any score is seen both are -inf and 0.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def maximum(scores: cute.Tensor) -> Float32:
    """Largest of ``scores`` (n) fp32; NaN is passed over (it comes back through the exponential)."""
    chains = 4  # independent, so that one's latency hides under another's
    partial = [scores[i] for i in range(chains)]
    for i in range(chains, cute.size(scores)):
        partial[i % chains] = cute.arch.fmax(partial[i % chains], scores[i])
    return cute.arch.fmax(cute.arch.fmax(partial[0], partial[1]), cute.arch.fmax(partial[2], partial[3]))


def move_reference(reference, row_maximum, scale_log2, threshold):
    """-> (new reference, factor for O and row_sum, whether it moved).

    row_maximum: over all scores so far. The reference follows it only when it lags by more than ``threshold``
    powers of two. From -inf it moves as soon as there is a score, with factor 0: nothing was summed before.
    """
    lag = (row_maximum - reference) * scale_log2
    moved = Boolean(lag > threshold)  # -inf - -inf is NaN: not moved
    factor = Float32(cutlass.select_(moved, cute.math.exp2(-lag, fastmath=True), Float32(1.0)))
    return Float32(cutlass.select_(moved, row_maximum, reference)), factor, moved


def exponentiate(scores: cute.Tensor, reference, scale_log2) -> Float32:
    """scores (n) fp32 become 2**(scale_log2 * (s - reference)) in place; returns their sum.

    With reference -inf every score is -inf, and becomes 0.
    """
    offset = Float32(
        cutlass.select_(Boolean(reference == -Float32.inf), Float32(0.0), -reference * scale_log2)
    )
    sums = [(Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0))]
    for i in range(0, cute.size(scores), 2):
        low, high = cute.arch.fma_packed_f32x2(
            (scores[i], scores[i + 1]), (scale_log2, scale_log2), (offset, offset)
        )
        low, high = cute.math.exp2(low, fastmath=True), cute.math.exp2(high, fastmath=True)
        scores[i], scores[i + 1] = low, high
        chain = i // 2 % len(sums)
        sums[chain] = cute.arch.add_packed_f32x2(sums[chain], (low, high))
    low, high = cute.arch.add_packed_f32x2(sums[0], sums[1])
    return low + high


def scale_by(values: cute.Tensor, factor) -> None:
    """values (n) fp32 times ``factor``, in place."""
    for i in range(0, cute.size(values), 2):
        pair = (values[i], values[i + 1])
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2(pair, (factor, factor))


def log_sum(reference, row_sum, scale_log2) -> Float32:
    """ln(sum of exp(scale s)): natural log, -inf where there was no score."""
    return (reference * scale_log2 + cute.math.log2(row_sum, fastmath=True)) * LN_2


def sink_term(sink, reference, scale_log2) -> Float32:
    """What a logit with no value row, in natural units, adds to ``row_sum``."""
    return cute.math.exp2(sink * LOG2_E - reference * scale_log2, fastmath=True)
