"""Converts NVFP4 to 16 bits in registers: e2m1 codes, and the e4m3 scales of blocks, by which they are multiplied.

Sign, exponent and mantissa of an e2m1 code, moved to the fields of an fp16 number, are the number times 2**-14,
subnormal ones included. So results are 2**-14 times the numbers that they stand for. A code times its scale has at most
6 significant bits, is below 2**12 and a multiple of 2**-10: fp16 holds it. A scale that is NaN makes NaN of its block.

In bf16, a code's exponent and mantissa at the low end of bf16's fields are the number times 2**-126; its scale comes
with a factor of 2**112, so that results have the same unit.
"""

from __future__ import annotations

from cutlass import BFloat16, Uint32, cute

from warpspec.common.device.nvfp4 import from_e4m3
from warpspec.common.device.words import interleave, multiply_bf16x2, permute

UNIT = 2.0**14  # what results are to be multiplied with
HALVES = (0x1010, 0x3232)  # prmt selectors: either half of a word twice
BYTES_OF_TWO = 0x0040  # prmt selector: byte 0 of two words
PAIRS = ((0, 4), (2, 6), (1, 5), (3, 7))  # codes of a word that end up together in one word of two fp16
FP16_FIELDS = 0x8E008E00  # the bits of two fp16 numbers that a code fills
EVEN_SIGNS, ODD_SIGNS = 0x40404040, 0x80808080  # bits of every byte
NIBBLES = 0x0F0F0F0F  # the lower ones of four bytes
# prmt selectors: byte j of two words, each below a byte of zeros, which is the sign of a byte below 0x80.
CODES_APART = (0xC480, 0xD591, 0xE6A2, 0xF7B3)
BF16_SHIFT, BF16_MAGNITUDES = 6, 0x01C001C0  # where a code's exponent and mantissa go
BF16_SIGN_SHIFT, BF16_SIGNS = 12, 0x80008000
BF16_FACTOR = 2.0**112  # power of two that scales include


def fp16_of_codes(word: Uint32) -> list:
    """Convert a word of eight codes to four words of two fp16, in the order PAIRS."""
    # The lower code of each byte gets its magnitude and sign at bits 0 and 6, the upper one at 1 and 7: as far apart
    # as in fp16. What is between them is masked after the shift.
    even = one_or_other(word, word << 3, EVEN_SIGNS)
    odd = one_or_other(word >> 3, word, ODD_SIGNS)
    shifted = (even << 9, even << 1, odd << 8, odd)
    return [masked(codes, FP16_FIELDS) for codes in shifted]


def masked(word: Uint32, mask: int) -> Uint32:
    """word & mask. It is inline PTX because the compiler repeats the DSL's operator after each shift of its result."""
    return cute.arch.inline_ptx(
        f"and.b32 {{$w0}}, {{$r0}}, {mask:#x};", write_only_types=[Uint32], read_only_args=[word]
    )


def one_or_other(a: Uint32, b: Uint32, mask: int) -> Uint32:
    """The bits of b where the mask has ones, else those of a, in one instruction."""
    return cute.arch.inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {mask:#x}, 0xD8;",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def fp16_pair(word: Uint32, fmt: str = "e4m3") -> Uint32:
    """A word of two fp16 of the lower two bytes."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low; .reg .b16 high; mov.b32 {low, high}, {$r0}; "
        f"cvt.rn.f16x2.{fmt}x2 {{$w0}}, low; }}",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


def scales_twice(word: Uint32, count: int) -> list:
    """The first ``count`` e4m3 scales of a word in fp16, each twice in a word."""
    found = []
    for first in range(0, count, 2):
        two = fp16_pair(word >> (8 * first) if first else word)
        found += [permute(two, half) for half in HALVES]
    return found[:count]


def scale_of_each(first: Uint32, second: Uint32) -> Uint32:
    """The e4m3 scales in byte 0 of two words, in fp16."""
    return fp16_pair(interleave(first, second, BYTES_OF_TWO))


def multiply_fp16x2(pair: Uint32, factor: Uint32) -> Uint32:
    """Multiply two pairs of fp16."""
    return cute.arch.inline_ptx(
        "mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[pair, factor]
    )


def bf16_scale_twice(code: Uint32) -> Uint32:
    """The e4m3 scale in byte 0, of which the others are 0, times BF16_FACTOR, in bf16, twice in a word."""
    scale = (from_e4m3(code) * BF16_FACTOR).to(BFloat16)
    pair = cute.make_rmem_tensor(2, BFloat16)
    pair[0], pair[1] = scale, scale
    return cute.recast_tensor(pair, Uint32)[0]


def bf16_pairs(word: Uint32, scale: Uint32) -> list:
    """Four words of two bf16, neighbours side by side, of eight codes of one block. scale: ``bf16_scale_twice``."""
    even, odd = word & Uint32(NIBBLES), (word >> 4) & Uint32(NIBBLES)
    pairs = []
    for order in CODES_APART:
        apart = interleave(even, odd, order)
        magnitudes = (apart << BF16_SHIFT) & Uint32(BF16_MAGNITUDES)
        pairs.append(multiply_bf16x2(magnitudes | (apart << BF16_SIGN_SHIFT) & Uint32(BF16_SIGNS), scale))
    return pairs
