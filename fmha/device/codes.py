"""Conversion of codes of K and V to mma.sync fragments and 16-bit tiles: one class per kind of code.

A word of codes of one row becomes pairs of fp16; ``PAIRS`` lists which numbers form a pair. Words of two rows become
pairs of one number from each row in the same column, in the order ``COLUMNS``. ``scale``: for NVFP4, the scales of the
pair's numbers (``common.device.float4``); else None.
"""

from __future__ import annotations

from typing import ClassVar

from cutlass import Uint32

from warpspec.common.device.float4 import (
    PAIRS,
    bf16_pairs,
    bf16_scale_twice,
    fp16_of_codes,
    multiply_fp16x2,
    scales_twice,
)
from warpspec.common.device.float8 import widened
from warpspec.common.device.words import interleave

NUMBERS = 8  # 16-bit numbers in a chunk of 16 bytes
# Selectors of prmt: bytes of two words in turn, of their lower and upper halves.
BYTES_OF_PAIRS = (0x5140, 0x7362)
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # prmt selectors: halves of two words


class Codes:
    """WORD: codes in a word. PAIRS: numbers of a chunk that form pairs in fragments, two pairs per MMA step. COLUMNS:
    columns of a word of codes, in the order in which ``columns`` returns them."""

    WORD: ClassVar[int]
    PAIRS: ClassVar[tuple]
    COLUMNS: ClassVar[tuple]

    def row(self, word: Uint32, scale) -> list:
        """Convert one word to pairs."""

    def columns(self, first: Uint32, second: Uint32, scale) -> list:
        """Convert a word of each of two rows to pairs."""
        mixed = [interleave(first, second, order) for order in BYTES_OF_PAIRS]
        return [pair for word in mixed for pair in self.row(word, scale)]

    def in_order(self, words: list, scale) -> list:
        """Convert words of one row and one block to pairs of neighbours."""

    def scale_pair(self, code: Uint32) -> Uint32:
        """The scale argument of ``in_order``, from a block's scale in byte 0. Only for NVFP4."""


class Float8Codes(Codes):
    """e4m3 or e5m2."""

    WORD = 4
    PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
    COLUMNS = (0, 1, 2, 3)

    def __init__(self, fmt: str, dtype: str):
        self.fmt, self.dtype = fmt, dtype

    def row(self, word: Uint32, scale) -> list:
        return self.in_order([word], scale)

    def in_order(self, words: list, scale) -> list:
        pairs = widened(words, self.fmt, self.dtype)
        return [pairs[i] for i in range(2 * len(words))]


class NVFP4Codes(Codes):
    """e2m1 in blocks; results are ``float4.UNIT`` times smaller than what they stand for."""

    WORD = 8
    PAIRS = PAIRS
    COLUMNS = (0, 2, 1, 3, 4, 6, 5, 7)

    def row(self, word: Uint32, scale) -> list:
        return self.scaled(fp16_of_codes(word), scale)

    def columns(self, first: Uint32, second: Uint32, scale) -> list:
        halves = (interleave(first, second, half) for half in (LOW_HALVES, HIGH_HALVES))
        return [pair for word in halves for pair in self.row(word, scale)]

    def in_order(self, words: list, scale) -> list:
        found = []
        for word in words:
            pairs = self.row(word, scale)
            for half in (LOW_HALVES, HIGH_HALVES):
                found += [interleave(pairs[i], pairs[i + 2], half) for i in range(2)]
        return found

    def scale_pair(self, code: Uint32) -> Uint32:
        return scales_twice(code, 1)[0]

    @staticmethod
    def scaled(pairs: list, scale) -> list:
        """Multiply pairs by their scales."""
        return [multiply_fp16x2(pair, scale) for pair in pairs]


class NVFP4InBf16(NVFP4Codes):
    """e2m1 in blocks, converted to bf16 tiles; there are no mma.sync fragments in bf16."""

    def in_order(self, words: list, scale) -> list:
        return [pair for word in words for pair in bf16_pairs(word, scale)]

    def scale_pair(self, code: Uint32) -> Uint32:
        return bf16_scale_twice(code)

    row = columns = None


def codes_of(config, dtype: str) -> Codes:
    """The codes of a configuration's keys or values. dtype: that of the tiles or fragments."""
    if config.format.kv_block > 0:
        return NVFP4Codes() if dtype == "float16" else NVFP4InBf16()
    return Float8Codes(config.format.kv_format, dtype)


def paired(words, pairs: tuple) -> list:
    """Pairs of 16-bit numbers of a chunk. words: the chunk's words, with numbers in order. pairs: ``Codes.PAIRS``."""
    found = []
    for a, b in pairs:
        if b == a + 1:
            found.append(words[a // 2])
        else:
            assert a % 2 == b % 2
            found.append(interleave(words[a // 2], words[b // 2], HIGH_HALVES if a % 2 else LOW_HALVES))
    return found
