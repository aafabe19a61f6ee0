"""The shortest rows, for example of a router with few experts: a few lanes sort what they hold. Device side.

Every lane sorts its SORTED_ELEMENTS candidates. Then lanes merge in pairs and keep only the larger half of their two
lists: the larger of the i-th of one and the i-th from the end of the other, sorted again. In the end every lane of the
row has the row's first SORTED_ELEMENTS candidates, and writes some of them.

A candidate of 16-bit logits fits 32 bits: the low bits of its key (``keys``) are all alike, which makes room for the
complement of the column. A candidate of fp32 logits has 64 bits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64

from warpspec.common.hardware import VECTOR_BYTES
from warpspec.softmax.online import exponential
from warpspec.softmax.topk.config import SORTED_ELEMENTS
from warpspec.softmax.topk.elements import exponentials, largest, total
from warpspec.softmax.topk.keys import (
    KEY_BITS,
    SIGN,
    candidate,
    candidate_column,
    candidate_key,
    key_of,
    logit_of,
)
from warpspec.softmax.vectors import PLAIN, WORDS, RowSpan, load_vector, unpack

LOW_BITS = 13  # low bits of a key that are all alike: in fp16; bf16 even has 16
LOW_MASK = (1 << LOW_BITS) - 1
HIGH_MASK = 0xFFFFFFFF ^ LOW_MASK


def network(count: int) -> list[tuple[int, int]]:
    """Compare-exchange pairs (i, j), i < j, that sort ``count`` numbers, a power of two: Batcher's odd-even merge
    sort."""
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
    """Compare-exchange pairs that sort a bitonic sequence of ``count`` numbers, a power of two."""
    pairs, step = [], count // 2
    while step:
        pairs += [(i, i + step) for i in range(count) if not i & step]
        step //= 2
    return pairs


def exchange(words: list, pairs: list) -> list:
    """The words after the compare-exchanges; the larger of a pair goes to its first place."""
    words = list(words)
    for i, j in pairs:
        if isinstance(words[i], Uint32):  # 32-bit words have max and min instructions
            words[i], words[j] = cutlass.max(words[i], words[j]), cutlass.min(words[i], words[j])
            continue
        first = Boolean(words[i] > words[j])
        words[i], words[j] = (
            Uint64(cutlass.select_(first, words[i], words[j])),
            Uint64(cutlass.select_(first, words[j], words[i])),
        )
    return words


def word_of(dtype: str, logit: Float32, column: Int32, present: Boolean):
    """The candidate of an element; 0, which is below all candidates, if it is not present."""
    if dtype == "float32":
        return Uint64(cutlass.select_(present, candidate(logit, column), Uint64(0)))
    high = Uint32(key_of(logit) ^ SIGN) & Uint32(HIGH_MASK)
    return Uint32(cutlass.select_(present, high | Uint32(LOW_MASK - column), Uint32(0)))


def logit_and_column(dtype: str, word) -> tuple[Float32, Int32]:
    """(logit, column) of a candidate."""
    if dtype == "float32":
        return logit_of(candidate_key(word)), candidate_column(word)
    key = Int32(word & Uint32(HIGH_MASK)) ^ SIGN
    return logit_of(key | ((key >> KEY_BITS) & LOW_MASK)), Int32(LOW_MASK) - Int32(word & Uint32(LOW_MASK))


@cute.jit
def row_sorted(config: cutlass.Constexpr, span: RowSpan, lane, row, probs: cute.Tensor, indices: cute.Tensor):
    """Compute and write a row's result by ``config.lanes`` adjacent lanes; lane: which of them this one is."""
    words = cute.make_rmem_tensor((WORDS, config.unroll), Int32)
    address = span.first + Int64(lane) * VECTOR_BYTES
    found = []
    for u in cutlass.range_constexpr(config.unroll):
        vector = lane + u * config.lanes
        present = Boolean(vector < span.vectors)
        load_vector(words[None, u], address, u * config.lanes * VECTOR_BYTES, present, config.dtype, PLAIN)
        values = [x for i in range(WORDS) for x in unpack(words[i, u], config.dtype)]
        for e in cutlass.range_constexpr(config.per_vector):
            column = vector * config.per_vector + e
            found.append((values[e], word_of(config.dtype, values[e], column, present)))
    best = exchange([word for _, word in found], network(SORTED_ELEMENTS))
    for step in cutlass.range_constexpr(config.lanes.bit_length() - 1):
        others = [cute.arch.shuffle_sync_bfly(word, 1 << step) for word in reversed(best)]
        best = [cutlass.max(a, b) for a, b in zip(best, others, strict=True)]
        best = exchange(best, bitonic(SORTED_ELEMENTS))

    logits, columns = zip(*(logit_and_column(config.dtype, word) for word in best), strict=True)
    maximum, k = logits[0], Int32(probs.shape[1])
    mine = []  # (weight, column) of the candidates that this lane writes: lane, lane + lanes, ...
    for first in cutlass.range_constexpr(0, SORTED_ELEMENTS, config.lanes):
        logit, column = logits[first], columns[first]
        for i in cutlass.range_constexpr(1, config.lanes):
            here = Boolean(lane == i)
            logit = Float32(cutlass.select_(here, logits[first + i], logit))
            column = Int32(cutlass.select_(here, columns[first + i], column))
        mine.append((exponential(logit - maximum, True), column))
    if cutlass.const_expr(config.renormalize):
        addends = []
        for i, (weight, _) in enumerate(mine):
            taken = Boolean(i * config.lanes + lane < k)
            addends.append(Float32(cutlass.select_(taken, weight, Float32(0.0))))
        divisor = cute.arch.warp_reduction_sum(total(addends), threads_in_group=config.lanes)
    else:
        values = [value for value, _ in found]
        divisor = cute.arch.warp_reduction_sum(
            exponentials(values, largest(values), maximum, config.dtype), threads_in_group=config.lanes
        )
    inverse = Float32(1.0) / divisor
    cute.arch.griddepcontrol_launch_dependents()
    for i, (weight, column) in enumerate(mine):
        place = i * config.lanes + lane
        if (place < k) & (row < probs.shape[0]):
            probs[row, place] = weight * inverse
            indices[row, place] = column
