"""mma.sync: products of single warps, of fragments in registers.

With g = lane / 4 and t = lane % 4, a lane has rows g and g + 8 of A [16, 16], column g of B [16, 8], and columns 2 t
and 2 t + 1 of rows g and g + 8 of C and D [16, 8]. PTX ISA: "Matrix Fragments for mma.m16n8k16 with floating point
type".
"""

from __future__ import annotations

from cutlass import Float32, Uint32, cute

MMA_ROWS, MMA_COLUMNS, MMA_DEPTH = 16, 8, 16  # M, N, K
C_WORDS = 4  # fp32 of a lane
KINDS = {"bfloat16": "bf16", "float16": "f16"}


def multiply(dtype: str, c: cute.Tensor, a: list, b: list) -> None:
    """C += A B in place. dtype: A's and B's. c (4) fp32: columns 2 t, 2 t + 1 of row g, then those of row g + 8. a:
    words of two numbers: columns 2 t, 2 t + 1 of rows g and g + 8, then columns 2 t + 8, 2 t + 9 of both. b: words with
    rows 2 t, 2 t + 1 of column g, then rows 2 t + 8, 2 t + 9."""
    kind = KINDS[dtype]
    d, a_words, b_words, c_words = (
        "{" + ", ".join(f"{{${role}{i}}}" for i in range(first, first + count)) + "}"
        for role, first, count in (("w", 0, C_WORDS), ("r", 0, 4), ("r", 4, 2), ("r", 6, C_WORDS))
    )
    found = cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {d}, {a_words}, {b_words}, {c_words};",
        write_only_types=[Float32] * C_WORDS,
        read_only_args=[*a, *b, *(c[i] for i in range(C_WORDS))],
    )
    for i in range(C_WORDS):
        c[i] = found[i]


def transpose(word: Uint32) -> Uint32:
    """Transpose an 8 x 8 matrix of 16-bit numbers whose row g has its columns 2 t and 2 t + 1 in one lane.

    Executed by a whole warp.
    """
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[word],
    )
