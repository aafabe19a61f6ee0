"""Converts NVFP4 to 16 bits in registers: e2m1 codes, and the e4m3 scales of blocks, by which they are multiplied.

Sign, exponent and mantissa of an e2m1 code, moved to the fields of an e5m2 byte, are the number times 2**-14, subnormal
ones included, and an e5m2 byte is the upper half of an fp16 number. So results are 2**-14 times the numbers that they
stand for. A code times its scale has at most 6 significant bits, is below 2**12 and a multiple of 2**-10: fp16 holds
it. A scale that is NaN makes NaN of its block.

Half of the bytes become fp16 by byte permutations, half by the conversion instruction: different units of an SM. In
bf16, a code's exponent and mantissa at the low end of bf16's fields are the number times 2**-126; its scale comes with
a factor of 2**112, so that results have the same unit.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Uint32

from warpspec.common.device.nvfp4 import from_e4m3
from warpspec.common.device.words import interleave, multiply_bf16x2, permute

UNIT = 2.0**14  # what results are to be multiplied with
MAGNITUDES, SIGNS = 0x0E0E0E0E, 0x80808080  # fields of four e5m2 bytes that a code fills
UPPER_BYTES = 0x1404  # prmt selector: bytes 0 and 1 of a word, each above a byte of zeros
HALVES = (0x1010, 0x3232)  # prmt selectors: either half of a word twice
BYTES_OF_TWO = 0x0040  # prmt selector: byte 0 of two words
NIBBLES = 0x0F0F0F0F  # the lower ones of four bytes
# prmt selectors: byte j of two words, each below a byte of zeros, which is the sign of a byte below 0x80.
CODES_APART = (0xC480, 0xD591, 0xE6A2, 0xF7B3)
BF16_SHIFT, BF16_MAGNITUDES = 6, 0x01C001C0  # where a code's exponent and mantissa go
BF16_SIGN_SHIFT, BF16_SIGNS = 12, 0x80008000
BF16_FACTOR = 2.0**112  # of scales


def even_codes(word: Uint32) -> Uint32:
    """Codes 0, 2, 4 and 6 of eight as e5m2 bytes."""
    return ((word << 1) & Uint32(MAGNITUDES)) | ((word << 4) & Uint32(SIGNS))


def odd_codes(word: Uint32) -> Uint32:
    """Codes 1, 3, 5 and 7."""
    return ((word >> 3) & Uint32(MAGNITUDES)) | (word & Uint32(SIGNS))


def fp16_pairs(word: Uint32) -> tuple:
    """Two words of two fp16 of four e5m2 bytes that are finite."""
    return permute(word, UPPER_BYTES), fp16_pair(word >> 16, "e5m2")


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
