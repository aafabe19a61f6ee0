"""The mask inside kernels: it hides the scores of keys that a row does not see.

By selection, never by addition: what stands at a hidden key may be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.fmha.device.tree import Drafts

WORD_BITS = 32


def hide(
    scores: cute.Tensor,
    elements: Sequence[int],
    run: int,
    period: int,
    first,
    end,
    drafts: Drafts | None = None,
) -> None:
    """Scores of a row outside the keys [first, end), and the drafts' that it sees, become -inf.

    scores: (n) fp32 registers. elements: those of the row, in the order of their keys: of every ``period`` keys the
    row has the first ``run`` ones. first, end: keys counted from that of the first element; Int32, first None where
    rows are not bounded on that side. drafts: their keys counted likewise, or None.

    What a row sees is a word of bits, tested one after another: ptxas makes predicates of several at a time.
    """
    before_end, before_first = (
        None if key is None else elements_before(key, run, period) for key in (end, first)
    )
    for begin in range(0, len(elements), WORD_BITS):
        word = ones(before_end - begin)
        if before_first is not None:
            word = word & ~ones(before_first - begin)
        drafts_key, drafts_word = None, None
        for bit, i in enumerate(elements[begin : begin + WORD_BITS]):
            seen = Boolean(word & Int32(bit_value(bit)) != 0)
            if drafts is not None:
                key = (begin + bit) // run * period + (begin + bit) % run
                if key // WORD_BITS != drafts_key:
                    drafts_key = key // WORD_BITS
                    drafts_word = drafts.word(drafts_key * WORD_BITS)
                seen = seen | Boolean(drafts_word & Int32(bit_value(key % WORD_BITS)) != 0)
            scores[i] = Float32(cutlass.select_(seen, scores[i], -Float32.inf))


def elements_before(key, run: int, period: int) -> Int32:
    """How many elements have keys before ``key``; below 0, or more than there are, where it lies outside of them."""
    if run == period:
        return key
    whole = key >> (period.bit_length() - 1)
    return whole * run + cutlass.min(key & (period - 1), run)


def ones(count) -> Int32:
    """A word whose lowest ``count`` bits are set; of a count below 0 none, of more than 32 all."""
    some = (Int32(1) << cutlass.max(cutlass.min(count, WORD_BITS - 1), 0)) - 1
    return Int32(cutlass.select_(Boolean(count >= WORD_BITS), Int32(-1), some))


def bit_value(bit: int) -> int:
    """A bit as a signed word."""
    return (1 << bit) - ((1 << WORD_BITS) if bit == WORD_BITS - 1 else 0)
