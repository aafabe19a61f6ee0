"""Online softmax on wgmma's register fragments: ``fmha.device.softmax``'s state for each row of a thread.

r: which of the thread's rows (``fragment``).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.fmha.device.logits import LogitNumbers, are_small, cap_small, map_scores, was_large
from warpspec.fmha.device.softmax import offset_of
from warpspec.fmha.sm90.fragment import THREAD_ROWS, elements


def over_quad(value, combine):
    """Reduce a row's values over the four threads that share it."""
    for distance in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, distance))
    return value


def maximum(scores: cute.Tensor, r: int) -> Float32:
    """Largest score of one row in this thread; NaN is ignored."""
    own = elements(scores, r)
    chains = [scores[i] for i in own[:2]]
    for n, i in enumerate(own[2:]):
        chains[n % 2] = cute.arch.fmax(chains[n % 2], scores[i])
    return cute.arch.fmax(chains[0], chains[1])


@cute.jit
def cap_scores(
    logits: cutlass.Constexpr, scores: cute.Tensor, numbers: LogitNumbers, references: cutlass.Constexpr
):
    """Soft-cap all scores of a KV tile that every row sees: by a polynomial if those of the warp are small. A score
    then takes one result of the special-function unit, not three. references: the rows'; once they say that some score
    was large, the warp does not look any more."""
    small = not cute.arch.vote_any_sync(was_large(cute.arch.fmax(*references), numbers))
    if small:
        small = cute.arch.vote_all_sync(are_small(scores, numbers))
    if small:
        cap_small(scores, numbers)
    else:
        for r in cutlass.range_constexpr(THREAD_ROWS):
            map_scores(logits, scores, elements(scores, r), numbers)


def exponentiate(scores: cute.Tensor, r: int, reference, unit) -> Float32:
    """Turn scores of one row into 2**(unit * s - reference) in place; returns this thread's sum."""
    offset = offset_of(reference)
    sums = [Float32(0.0), Float32(0.0)]
    for n, i in enumerate(elements(scores, r)):
        power = cute.math.exp2(scores[i] * unit + offset, fastmath=True)
        scores[i] = power
        sums[n % 2] = sums[n % 2] + power
    return sums[0] + sums[1]


def rounded_totals(words: cute.Tensor) -> tuple:
    """Sums of both rows' weights in words of two bf16, over the threads that share the rows."""
    totals = []
    for r in range(THREAD_ROWS):
        chains = [Float32(0.0)] * 4
        for n, word in enumerate(words[i] for i in range(r, cute.size(words), THREAD_ROWS)):
            low, high = (word << 16).bitcast(Float32), (word & Int32(-1 << 16)).bitcast(Float32)
            at = n % 2 * 2
            chains[at], chains[at + 1] = chains[at] + low, chains[at + 1] + high
        total = (chains[0] + chains[1]) + (chains[2] + chains[3])
        totals.append(over_quad(total, lambda a, b: a + b))
    return tuple(totals)


def scale_by(values: cute.Tensor, r: int, factor) -> None:
    """Multiply elements of one row by ``factor``, in place."""
    for i in elements(values, r):
        values[i] = values[i] * factor
