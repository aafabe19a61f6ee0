"""Online softmax on wgmma's register fragments: ``fmha.softmax``'s state for two rows a thread.

Element i of a fragment (n) belongs to row i // 2 % 2 of the thread and to column 8 (i // 4) + 2 (lane % 4) + i % 2.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from warpspec.fmha.sm90.rows import ROW_HALVES

PAIR = 2  # neighbouring columns of a thread
COLUMNS = 8  # columns that the four threads of a row share, two each


def elements(fragment: cute.Tensor, half: int) -> list[int]:
    """The elements of a fragment that belong to one of the thread's rows, in order of columns."""
    return [i for i in range(cute.size(fragment)) if i // PAIR % ROW_HALVES == half]


def column(i: int) -> int:
    """Column of element i in the thread with lane % 4 = 0."""
    return i // (PAIR * ROW_HALVES) * COLUMNS + i % PAIR


def hide(scores: cute.Tensor, half: int, first, end) -> None:
    """Scores of one row outside [first, end), counted from column 0 of the thread, become -inf."""
    for i in elements(scores, half):
        seen = Boolean(end > column(i))
        if first is not None:
            seen = seen & Boolean(first <= column(i))
        scores[i] = Float32(cutlass.select_(seen, scores[i], -Float32.inf))


def over_quad(value, combine):
    """A row's value from those of the four threads that share it."""
    for distance in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, distance))
    return value


def maximum(scores: cute.Tensor, half: int) -> Float32:
    """Largest score of one row in this thread; NaN is passed over."""
    own = elements(scores, half)
    chains = [scores[i] for i in own[:2]]
    for n, i in enumerate(own[2:]):
        chains[n % 2] = cute.arch.fmax(chains[n % 2], scores[i])
    return cute.arch.fmax(chains[0], chains[1])


def exponentiate(scores: cute.Tensor, half: int, reference, scale_log2) -> Float32:
    """Scores of one row become 2**(scale_log2 * (s - reference)) in place; returns this thread's sum of them."""
    offset = Float32(
        cutlass.select_(Boolean(reference == -Float32.inf), Float32(0.0), -reference * scale_log2)
    )
    sums = [Float32(0.0), Float32(0.0)]
    for n, i in enumerate(elements(scores, half)):
        power = cute.math.exp2(scores[i] * scale_log2 + offset, fastmath=True)
        scores[i] = power
        sums[n % 2] = sums[n % 2] + power
    return sums[0] + sums[1]


def scale_by(values: cute.Tensor, half: int, factor) -> None:
    """Elements of one row times ``factor``, in place."""
    for i in elements(values, half):
        values[i] = values[i] * factor
