"""The mask in kernels: it hides the scores of keys that a row does not see.

It selects, never adds, because the score of a hidden key may be NaN.
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
    pattern: cute.Tensor | None = None,
    hidden: float = -Float32.inf,
) -> None:
    """Set a row's scores to ``hidden`` outside the keys [first, end) and the drafts it sees.

    scores: (n) fp32 registers. elements: the row's registers, in the order of their keys: the first ``run`` of every
    ``period`` keys. first, end: Int32, counted from the first element's key; first is None if rows are unbounded on
    that side, end if they are unbounded on both. drafts: with keys counted likewise, or None. pattern: words (KEY /
    32) of further bits, one a key, counted likewise; None: all ones.

    Visibility is a word of bits, tested one after another: ptxas turns several at a time into predicates.
    """
    before_end, before_first = (
        None if key is None else elements_before(key, run, period) for key in (end, first)
    )
    for begin in range(0, len(elements), WORD_BITS):
        word = Int32(-1) if before_end is None else ones(before_end - begin)
        if before_first is not None:
            word = word & ~ones(before_first - begin)
        of_keys = pattern
        if pattern is not None and run == period:  # bits of elements are bits of keys
            word, of_keys = word & pattern[begin // WORD_BITS], None
        drafts_key, drafts_word = None, None
        for bit, i in enumerate(elements[begin : begin + WORD_BITS]):
            key = (begin + bit) // run * period + (begin + bit) % run
            seen = Boolean(word & Int32(bit_value(bit)) != 0)
            if of_keys is not None:
                own = Boolean(of_keys[key // WORD_BITS] & Int32(bit_value(key % WORD_BITS)) != 0)
                seen = own if before_end is None else seen & own
            if drafts is not None:
                if key // WORD_BITS != drafts_key:
                    drafts_key = key // WORD_BITS
                    drafts_word = drafts.word(drafts_key * WORD_BITS)
                seen = seen | Boolean(drafts_word & Int32(bit_value(key % WORD_BITS)) != 0)
            scores[i] = Float32(cutlass.select_(seen, scores[i], Float32(hidden)))


def keys_of(config, row, step, origin, rule=None) -> tuple:
    """((first, end), pattern of the tile's keys) of ``hide`` for the KV tile of visit ``step``. row: ``Row``. origin:
    key of the row's first element. rule: that of the block, with lists of blocks; None: it is read."""
    first, end = row.first, row.end
    if not config.mask.has_blocks:
        return (first - origin if config.mask.has_left else None, end - origin), None
    if rule is None:
        rule = row.blocks.span.visit(step).rule
    pattern = row.blocks.words(step, rule, config.tile_n) if config.mask.has_patterns else None
    if not (config.mask.band or config.mask.has_ranges):
        # But for patterns, a row sees the same keys in all blocks.
        whole = pattern is not None and not config.requests.ends_in_tile  # patterns end with the keys
        return (None, None if whole else row.blocks.length - origin), pattern
    first, end = row.blocks.interval(rule, first, end)
    return (first - origin if config.mask.has_left else None, end - origin), pattern


def shifted(pattern: cute.Tensor, keys) -> cute.Tensor:
    """A pattern's words without its first bits, fewer than a word has: bit i for key ``keys`` + i. Only bits that stay
    in their word are right."""
    words = cute.make_rmem_tensor(cute.size(pattern), Int32)
    for i in range(cute.size(pattern)):
        words[i] = pattern[i] >> keys
    return words


def elements_before(key, run: int, period: int) -> Int32:
    """How many elements have keys before ``key``; negative or more than there are if it lies outside of them."""
    if run == period:
        return key
    whole = key >> (period.bit_length() - 1)
    return whole * run + cutlass.min(key & (period - 1), run)


def ones(count) -> Int32:
    """A word whose lowest ``count`` bits are set; none if count is negative, all if it exceeds 32."""
    some = (Int32(1) << cutlass.max(cutlass.min(count, WORD_BITS - 1), 0)) - 1
    return Int32(cutlass.select_(Boolean(count >= WORD_BITS), Int32(-1), some))


def bit_value(bit: int) -> int:
    """A bit as a signed word."""
    return (1 << bit) - ((1 << WORD_BITS) if bit == WORD_BITS - 1 else 0)
