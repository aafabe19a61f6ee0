"""Shortest rows, of a router with few experts: a few lanes sort what they hold. Device side.

Every lane sorts its SORTED_ELEMENTS candidates; then lanes merge with one another, and of two sorted lists only the
larger half is kept: the larger of each pair (i-th of one, i-th from the end of the other), put in order again. In the
end every lane of the row has its first SORTED_ELEMENTS candidates, and writes some of them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint64

from warpspec.common.hardware import VECTOR_BYTES
from warpspec.softmax.online import exponential
from warpspec.softmax.topk.config import SORTED_ELEMENTS
from warpspec.softmax.topk.elements import exponentials, largest, total
from warpspec.softmax.topk.keys import candidate, candidate_column, candidate_key, logit_of
from warpspec.softmax.vectors import PLAIN, WORDS, RowSpan, load_vector, unpack


def network(count: int) -> list[tuple[int, int]]:
    """Pairs (i, j), i < j, that sort ``count`` numbers, a power of two, when compared in order: Batcher's odd-even
    merge sort."""
    pairs = []
    p = 1
    while p < count:
        step = p
        while step >= 1:
            for first in range(step % p, count - step, 2 * step):
                for i in range(first, min(first + step, count - step)):
                    if i // (2 * p) == (i + step) // (2 * p):
                        pairs.append((i, i + step))
            step //= 2
        p *= 2
    return pairs


def bitonic(count: int) -> list[tuple[int, int]]:
    """Pairs that put a bitonic sequence of ``count`` numbers, a power of two, in order."""
    pairs, step = [], count // 2
    while step:
        pairs += [(i, i + step) for i in range(count) if not i & step]
        step //= 2
    return pairs


def exchange(words: list, pairs: list) -> list:
    """The words after the comparisons: the larger of a pair comes to its first place."""
    words = list(words)
    for i, j in pairs:
        first = Boolean(words[i] > words[j])
        words[i], words[j] = (
            Uint64(cutlass.select_(first, words[i], words[j])),
            Uint64(cutlass.select_(first, words[j], words[i])),
        )
    return words


@cute.jit
def row_sorted(config: cutlass.Constexpr, span: RowSpan, lane, row, probs: cute.Tensor, indices: cute.Tensor):
    """The row's result. By ``config.lanes`` lanes that follow one another; lane: which of them this one is."""
    words = cute.make_rmem_tensor((WORDS, config.unroll), Int32)
    address = span.first + Int64(lane) * VECTOR_BYTES
    found = []
    for u in cutlass.range_constexpr(config.unroll):
        vector = lane + u * config.lanes
        present = Boolean(vector < span.vectors)
        load_vector(words[None, u], address, u * config.lanes * VECTOR_BYTES, present, config.dtype, PLAIN)
        values = [x for i in range(WORDS) for x in unpack(words[i, u], config.dtype)]
        for e in cutlass.range_constexpr(config.per_vector):
            word = candidate(values[e], vector * config.per_vector + e)
            found.append((values[e], Uint64(cutlass.select_(present, word, Uint64(0)))))
    best = exchange([word for _, word in found], network(SORTED_ELEMENTS))
    for step in cutlass.range_constexpr(config.lanes.bit_length() - 1):
        others = [cute.arch.shuffle_sync_bfly(word, 1 << step) for word in reversed(best)]
        best = [cutlass.max(a, b) for a, b in zip(best, others, strict=True)]
        best = exchange(best, bitonic(SORTED_ELEMENTS))

    maximum = logit_of(candidate_key(best[0]))
    k = Int32(probs.shape[1])
    weights = [exponential(logit_of(candidate_key(word)) - maximum, True) for word in best]
    if cutlass.const_expr(config.renormalize):
        divisor = total(
            [
                Float32(cutlass.select_(Boolean(k > i), weight, Float32(0.0)))
                for i, weight in enumerate(weights)
            ]
        )
    else:
        values = [value for value, _ in found]
        divisor = cute.arch.warp_reduction_sum(
            exponentials(values, largest(values), maximum, config.dtype), threads_in_group=config.lanes
        )
    cute.arch.griddepcontrol_launch_dependents()
    for first in cutlass.range_constexpr(0, SORTED_ELEMENTS, config.lanes):
        weight, column = weights[first], candidate_column(best[first])
        for i in cutlass.range_constexpr(1, config.lanes):
            mine = Boolean(lane == i)
            weight = Float32(cutlass.select_(mine, weights[first + i], weight))
            column = Int32(cutlass.select_(mine, candidate_column(best[first + i]), column))
        if (first + lane < k) & (row < probs.shape[0]):
            probs[row, first + lane] = weight / divisor
            indices[row, first + lane] = column
