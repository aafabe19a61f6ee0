"""Converts FP8 numbers to 16 bits in registers: exact, subnormal numbers, NaN and Inf included.

fp16 takes one conversion instruction for two numbers, on the unit that also does logic and shifts. bf16 takes four
instructions for two numbers: exponent and mantissa move to the low end of bf16's fields, where they represent the
number times a power of two, and one multiplication takes the power back. A code above the largest finite one gets the
exponent of NaN and Inf, in a branch that only such codes take.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Uint32

from warpspec.common.device.words import permute, scaled_pair

BYTES_LOW, BYTES_HIGH = 0x9180, 0xB3A2  # prmt selectors: two bytes, each below eight copies of its sign
BYTES_ALONE = (0x4140, 0x4342)  # two bytes, each below a byte of zeros
PAIR = 1 << 16 | 1  # times a 16-bit number: that number in both halves
ALL_BYTES = 0x01010101
MAGNITUDES, SIGNS = 0x7F * ALL_BYTES, 0x80 * ALL_BYTES
SIGN_BIT = 7  # position of the sign in a byte


@dataclass(frozen=True)
class Conversion:
    """Constants of the conversion of one FP8 format to bf16.

    shift: bits by which exponent and mantissa move up. fields: bits of the result that are right after that. factor:
    bits of the power of two that the multiplication takes back. beyond: added to a magnitude, it sets bit 7 for NaN and
    Inf. exponent: bits of the exponent of NaN and Inf.
    """

    shift: int
    fields: int
    factor: int
    beyond: int
    exponent: int


CONVERSIONS = {
    "e4m3": Conversion(4, 0x87F0, (127 + 120) << 7, 0x01, 0x7F80),
    "e5m2": Conversion(5, 0x8FE0, (127 + 112) << 7, 0x04, 0x7F80),
}


def widened(words: list, fmt: str, dtype: str) -> cute.Tensor:
    """Convert n words of four FP8 numbers to 2 n words of two 16-bit numbers.

    fmt: "e4m3" or "e5m2". dtype: "bfloat16" or "float16".
    """
    return to_bf16(words, fmt) if dtype == "bfloat16" else to_fp16(words, fmt)


def to_fp16(words: list, fmt: str) -> cute.Tensor:
    """``widened`` by the conversion instruction."""
    out = cute.make_rmem_tensor(2 * len(words), Uint32)
    for i, word in enumerate(words):
        out[2 * i], out[2 * i + 1] = cute.arch.inline_ptx(
            f"{{ .reg .b16 low; .reg .b16 high; mov.b32 {{low, high}}, {{$r0}}; cvt.rn.f16x2.{fmt}x2 {{$w0}}, low;"
            f" cvt.rn.f16x2.{fmt}x2 {{$w1}}, high; }}",
            write_only_types=[Uint32, Uint32],
            read_only_args=[word],
        )
    return out


@cute.jit
def to_bf16(words: cutlass.Constexpr, fmt: cutlass.Constexpr) -> cute.Tensor:
    """``widened`` by integer instructions and a multiplication."""
    how = CONVERSIONS[fmt]
    out = cute.make_rmem_tensor(2 * len(words), Uint32)
    marks = Uint32(0)
    for i in cutlass.range_constexpr(len(words)):
        marks = marks | marked(words[i], how)
        for half in cutlass.range_constexpr(2):
            spread = permute(words[i], BYTES_HIGH if half else BYTES_LOW)
            moved = (spread << how.shift) & Uint32(how.fields * PAIR)
            out[2 * i + half] = scaled_pair(moved, how.factor, "bf16x2")
    if Boolean((marks & Uint32(SIGNS)) != 0):
        for i in cutlass.range_constexpr(len(words)):
            beyond = (marked(words[i], how) & Uint32(SIGNS)) >> SIGN_BIT
            for half in cutlass.range_constexpr(2):
                out[2 * i + half] = out[2 * i + half] | (permute(beyond, BYTES_ALONE[half]) * how.exponent)
    return out


def marked(word: Uint32, how: Conversion) -> Uint32:
    """Bit 7 of each byte that is NaN or Inf; other bits may be set, too."""
    return (word & Uint32(MAGNITUDES)) + Uint32(how.beyond * ALL_BYTES)
