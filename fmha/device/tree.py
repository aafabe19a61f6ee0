"""Trees of drafts in kernels (``fmha.tree``): the word of a row, and the keys that its bits stand for."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint64

from warpspec.fmha.tree import MOST_DRAFTS

LOW_WORD = 0xFFFFFFFF


class Drafts(NamedTuple):
    """The drafts whose keys a row sees: bit j of ``seen`` stands for key ``first`` + j."""

    seen: Uint64
    first: Int32

    def word(self, key) -> Int32:
        """Bits of the 32 keys from ``key`` on."""
        shift = key - self.first
        moved = shift_left(self.seen, cutlass.max(-shift, 0))
        return Int32(shift_right(moved, cutlass.max(shift, 0)) & Uint64(LOW_WORD))

    def counted_from(self, key) -> Drafts:
        """Count the drafts' keys from ``key``."""
        return self._replace(first=self.first - key)

    def sees(self, key) -> Boolean:
        """Whether the row sees a draft's key."""
        return Boolean(self.word(key) & 1 != 0)

    def end_after(self, end) -> Int32:
        """One past the last key that the row sees: a draft's, or ``end`` where it sees no draft."""
        last = self.first + MOST_DRAFTS - Int32(cute.arch.clz(self.seen))
        return Int32(cutlass.select_(Boolean(self.seen != Uint64(0)), last, Int32(end)))


def depth_of(word: Uint64) -> Int32:
    """Position of the row with this word, less that of draft 0."""
    return Int32(cute.arch.popc(word)) - 1


def drafts_between(word: Uint64, start, low, high) -> Drafts:
    """The drafts of a word whose keys lie within [low, high). start: draft 0's key."""
    inside = lowest_bits(high - start) & ~lowest_bits(low - start)
    return Drafts(word & inside, start)


@cute.jit
def drop_lowest(word, count) -> Uint64:
    """The word without its ``count`` lowest set bits."""
    for _ in cutlass.range(count, unroll=1):
        word = word & (word - Uint64(1))
    return word


def lowest_bits(count) -> Uint64:
    """A word whose lowest ``count`` bits are set; none for a count below 0, all for one above 64."""
    return shift_left(Uint64(1), cutlass.max(count, 0)) - Uint64(1)


def shift_left(word: Uint64, amount: Int32) -> Uint64:
    """The word shifted; 0 from an amount of 64 on."""
    return shift("shl.b64", word, amount)


def shift_right(word: Uint64, amount: Int32) -> Uint64:
    """The word shifted, zeros coming in; 0 from an amount of 64 on."""
    return shift("shr.u64", word, amount)


def shift(instruction: str, word: Uint64, amount: Int32) -> Uint64:
    """A shift instruction, which takes amounts past the width. The DSL's shifts do not."""
    return cute.arch.inline_ptx(
        f"{instruction} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint64],
        read_only_args=[Uint64(word), Int32(amount)],
    )
