"""e2m1 codes to bf16, in registers: 16 integer instructions and 8 multiplications for 16 values.

A code's sign, exponent and mantissa at bits 15 and 8 to 6 are a bf16 number, subnormal ones included, 2**126 times too
small. Two words hold eight pairs of codes where ``streamed.PAIRS`` says; six of them come into place by a shift at
most, two by one of a mixture of both words. The multiplication by the scale is exact.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Uint32

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

CODES = 0x81C081C0  # signs and magnitudes of two bf16
SELECT = 0xE4  # lop3's table of: where the third has a one the first, else the second
SCALE_SHIFT = 4
ZERO_BYTE = 4  # of prmt's two words, the second being 0
STEP_WORDS = 4  # of wgmma's fragment of 16 of K


def decode_chunk(words: cute.Tensor, scales: Uint32, chunk: int, out: cute.Tensor) -> None:
    """out (WORD): the fragments of a chunk's four wgmma, of words (VECTOR_WORDS), two a row, and the step's scales."""
    for r in range(THREAD_ROWS):
        factor = factor_of(scales, chunk * THREAD_ROWS + r)
        sources = {FIRST: words[2 * r], SECOND: words[2 * r + 1]}
        moved = sources[SECOND] << MIXED_SHIFT
        sources[MIXTURE] = mixed(sources[FIRST], moved)
        for pair, (source, right) in enumerate(PAIRS):
            # columns 2 pair and the next of the thread's 16: of wgmma pair // 2, its lower or upper half of K
            at = pair // 2 * STEP_WORDS + r + THREAD_ROWS * (pair % 2)
            out[at] = multiply_bf16x2(turned(sources[source], right) & Uint32(CODES), factor)


def turned(word: Uint32, right: int) -> Uint32:
    """Turned to the right; to the left, where bits are negative and no wanted one is lost, shifted."""
    if right <= 0:
        return word << -right if right else word
    return cute.arch.inline_ptx(
        f"shf.r.wrap.b32 {{$w0}}, {{$r0}}, {{$r0}}, {right};",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


def mixed(first: Uint32, second: Uint32) -> Uint32:
    """Bits of the first where MIXED has ones, else of the second, by one instruction."""
    return cute.arch.inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {MIXED:#x}, {SELECT:#x};",
        write_only_types=[Uint32],
        read_only_args=[first, second],
    )


def factor_of(scales: Uint32, byte: int) -> Uint32:
    """Two bf16 alike: a scale of the word."""
    order = byte | ZERO_BYTE << 4
    pair = permute(scales, order | order << 8)
    return (pair << SCALE_SHIFT) | Uint32(SCALE_ONES)
