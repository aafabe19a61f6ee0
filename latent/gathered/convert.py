"""Convert e4m3 to bf16 and multiply by a power of two, in registers: exact, also for subnormal numbers.

The exponent and mantissa of an e4m3 number, moved to the low end of bf16's fields, represent the number times 2**-120.
One multiplication by 2**(120 + k) corrects this and applies the block's scale 2**k. Above k = 7 bf16 has no such power,
and a second multiplication is needed. Code that converts many blocks checks all their scales first (``some_large``).
The cost is three integer instructions for two numbers; the conversion instruction runs at an eighth of their rate.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Uint32

from warpspec.common.device.words import multiply_bf16x2, permute

BYTES_LOW, BYTES_HIGH = 0x9180, 0xB3A2  # prmt selectors: two bytes, each below eight copies of its sign
EXPONENT_SHIFT = 4  # moves what the selectors leave to bf16's fields
FIELDS = 0x87F087F0  # mask of the sign, the lower four exponent bits and the upper three mantissa bits
EXPONENT_GAP = 120  # bf16's exponent bias less e4m3's
BF16_EXPONENT_BIT = 7
LARGEST_FIELD = 254  # exponent field of the largest finite power of two
FIELD_BIAS = 127
NAN_PAIR = 0x7FC07FC0
LOW_BITS, ONES, HIGH_BITS = 0x7F7F7F7F, 0x01010101, 0x80808080
SCALE_NAN = 255
SMALL = LARGEST_FIELD - EXPONENT_GAP  # the largest scale whose factor is one power of two
BELOW_LARGE = 0x7F - SMALL + 128  # added to (scale - 128), it sets bit 7 if the scale is too large


@cute.jit
def to_bf16(words: cutlass.Constexpr, scale: Uint32, small: cutlass.Constexpr = False) -> list:
    """Convert words of four e4m3, times 2**(scale - 127), to words of two bf16.

    scale: ue8m0, 255 for NaN. small: the scale is at most SMALL, so that one multiplication is enough. Any e4m3 NaN
    makes all numbers NaN, because its bits would otherwise be read as 480.
    """
    field = scale + EXPONENT_GAP
    most = field
    if cutlass.const_expr(not small):
        most = cutlass.min(field, Uint32(LARGEST_FIELD))
    factor, rest = pair_of(most), pair_of(field - most + FIELD_BIAS)
    marks = Uint32(0)
    for word in words:
        marks = marks | ((word & Uint32(LOW_BITS)) + Uint32(ONES))
    bad = Boolean((marks & Uint32(HIGH_BITS)) != 0)
    if cutlass.const_expr(not small):
        bad = bad | Boolean(scale == SCALE_NAN)
    factor = Uint32(cutlass.select_(bad, Uint32(NAN_PAIR), factor))
    out = cute.make_rmem_tensor(2 * len(words), Uint32)
    for i in cutlass.range_constexpr(len(words)):
        for half, order in enumerate((BYTES_LOW, BYTES_HIGH)):
            spread = permute(words[i], order)
            moved = (spread << EXPONENT_SHIFT) & Uint32(FIELDS)
            product = multiply_bf16x2(moved, factor)
            if cutlass.const_expr(not small):
                product = multiply_bf16x2(product, rest)
            out[2 * i + half] = product
    return [out[i] for i in range(2 * len(words))]


def some_large(scales: Uint32) -> Boolean:
    """Whether one of four scales is larger than SMALL."""
    marks = (scales & Uint32(LOW_BITS)) + Uint32(ONES * BELOW_LARGE)
    return Boolean((marks & scales & Uint32(HIGH_BITS)) != 0)


def pair_of(field: Uint32) -> Uint32:
    """A word of two bf16 powers of two with this exponent field."""
    return field * Uint32((1 << 16 | 1) << BF16_EXPONENT_BIT)
