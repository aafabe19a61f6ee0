"""e2m1 codes to bf16, in registers: 11 integer instructions and 4 multiplications for 8 values.

A code's sign, exponent and mantissa at bits 15 and 8 to 6 are a bf16 number, subnormal ones included, 2**126 times too
small. Words hold four pairs of codes at the places of ``streamed.MAGNITUDE_BITS`` and ``SIGN_BITS``: two of them come
into place by one shift, two by one shift for magnitudes and one for signs. The multiplication by the scale is exact.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Uint32

from warpspec.common.hardware import THREAD_ROWS
from warpspec.moe.streamed import MAGNITUDE_BITS, SCALE_ONES, SIGN_BITS, VECTOR_WORDS

MAGNITUDE_BIT, SIGN_BIT = 6, 15  # where bf16 has them
MAGNITUDES, SIGNS = 0x01C001C0, 0x80008000
SCALE_SHIFT = 4
ZERO_BYTE = 4  # of prmt's two words, the second being 0
WORD_PAIRS = len(MAGNITUDE_BITS)
STEP_WORDS = 4  # of wgmma's fragment of 16 of K


def decode_chunk(words: cute.Tensor, scales: Uint32, chunk: int, out: cute.Tensor) -> None:
    """out (WORD): the fragments of a chunk's four wgmma, of words (VECTOR_WORDS), two a row, and the step's scales."""
    for r in range(THREAD_ROWS):
        factor = factor_of(scales, chunk * THREAD_ROWS + r)
        for c in range(VECTOR_WORDS // THREAD_ROWS):
            word = words[r * THREAD_ROWS + c]
            for j in range(WORD_PAIRS):
                # columns 8 c + 2 j and the next of the thread's 16: of wgmma 2 c + j // 2, its lower or upper half of K
                at = (2 * c + j // 2) * STEP_WORDS + r + THREAD_ROWS * (j % 2)
                out[at] = multiply(pair_of(word, j), factor)


def pair_of(word: Uint32, j: int) -> Uint32:
    """Two bf16: pair j of a word."""
    by_magnitude, by_sign = MAGNITUDE_BIT - MAGNITUDE_BITS[j], SIGN_BIT - SIGN_BITS[j]
    if by_magnitude == by_sign:
        return shifted(word, by_sign) & Uint32(MAGNITUDES | SIGNS)
    return (shifted(word, by_magnitude) & Uint32(MAGNITUDES)) | (shifted(word, by_sign) & Uint32(SIGNS))


def shifted(word: Uint32, bits: int) -> Uint32:
    """To the left, or to the right where bits are negative."""
    return word << bits if bits > 0 else word >> -bits if bits else word


def factor_of(scales: Uint32, byte: int) -> Uint32:
    """Two bf16 alike: a scale of the word."""
    order = byte | ZERO_BYTE << 4
    pair = cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {order | order << 8:#x};",
        write_only_types=[Uint32],
        read_only_args=[scales],
    )
    return (pair << SCALE_SHIFT) | Uint32(SCALE_ONES)


def multiply(pair: Uint32, factor: Uint32) -> Uint32:
    """Two bf16 times two bf16."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[pair, factor]
    )
