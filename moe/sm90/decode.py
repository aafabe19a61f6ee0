"""Convert e2m1 codes to bf16 in registers: 16 integer instructions and 8 multiplications for 16 values.

A code whose sign is at bit 15 and whose exponent and mantissa are at bits 8 to 6 is a bf16 number that is 2**126 times
too small, also if it is subnormal. Two words hold eight pairs of codes, as ``streamed.PAIRS`` says. Six pairs get into
place by at most one shift, two by a shift of a mixture of both words. The multiplication by the scale is exact.
"""

from __future__ import annotations

from cutlass import Uint32, cute

from warpspec.common.device.words import multiply_bf16x2, permute
from warpspec.common.hardware import THREAD_ROWS
from warpspec.moe.streamed import (
    FIRST,
    MIXED,
    MIXED_SHIFT,
    MIXTURE,
    PAIRS,
    SCALE_ONES,
    SECOND,
)

CODES = 0x81C081C0  # mask of the signs and magnitudes of two bf16
SELECT = 0xE4  # lop3's table of: the first operand's bit where the third has a one, else the second's
SCALE_SHIFT = 4
ZERO_BYTE = 4  # number of a zero byte among prmt's two words, of which the second is 0
STEP_WORDS = 4  # words of wgmma's fragment of 16 along K


def decode_chunk(words: cute.Tensor, scales: Uint32, chunk: int, out: cute.Tensor) -> None:
    """Decode a chunk to out (WORD), the fragments of its four wgmma.

    words: (VECTOR_WORDS), two for each row. scales: the word of the step's scales.
    """
    for r in range(THREAD_ROWS):
        factor = factor_of(scales, chunk * THREAD_ROWS + r)
        sources = {FIRST: words[2 * r], SECOND: words[2 * r + 1]}
        moved = sources[SECOND] << MIXED_SHIFT
        sources[MIXTURE] = mixed(sources[FIRST], moved)
        for pair, (source, right) in enumerate(PAIRS):
            # columns 2 pair and 2 pair + 1 of the thread's 16 go to wgmma pair // 2, to the lower or upper half of its
            # K
            at = pair // 2 * STEP_WORDS + r + THREAD_ROWS * (pair % 2)
            out[at] = multiply_bf16x2(turned(sources[source], right) & Uint32(CODES), factor)


def turned(word: Uint32, right: int) -> Uint32:
    """Rotate a word to the right; if bits is negative, shift it to the left, which loses no wanted bit."""
    if right <= 0:
        return word << -right if right else word
    return cute.arch.inline_ptx(
        f"shf.r.wrap.b32 {{$w0}}, {{$r0}}, {{$r0}}, {right};",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


def mixed(first: Uint32, second: Uint32) -> Uint32:
    """Bits of the first word where MIXED has ones, otherwise of the second, by one instruction."""
    return cute.arch.inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {MIXED:#x}, {SELECT:#x};",
        write_only_types=[Uint32],
        read_only_args=[first, second],
    )


def factor_of(scales: Uint32, byte: int) -> Uint32:
    """A scale of the word, as two equal bf16."""
    order = byte | ZERO_BYTE << 4
    pair = permute(scales, order | order << 8)
    return (pair << SCALE_SHIFT) | Uint32(SCALE_ONES)
