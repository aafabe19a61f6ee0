"""The elements of 16-byte vectors as numbers; maxima and sums of a few. Device side, plain Python over registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from warpspec.softmax.vectors import WORDS

HIGH_HALF = -0x10000  # of a word
HALF_BITS = 16


def floats(words: cute.Tensor, dtype: str) -> list:
    """The elements of words (WORDS) Int32, as Float32."""
    values = []
    for i in range(WORDS):
        word = words[i]
        if dtype == "float32":
            values.append(word.bitcast(Float32))
        elif dtype == "bfloat16":
            values += [(word << HALF_BITS).bitcast(Float32), (word & HIGH_HALF).bitcast(Float32)]
        else:
            values += list(
                cute.arch.inline_ptx(
                    "{ .reg .b16 low_half, high_half; mov.b32 {low_half, high_half}, {$r0}; "
                    "cvt.f32.f16 {$w0}, low_half; cvt.f32.f16 {$w1}, high_half; }",
                    write_only_types=[Float32, Float32],
                    read_only_args=[word],
                )
            )
    return values


def largest(values: list) -> Float32:
    """Their maximum, NaN if there is one."""
    while len(values) > 1:
        pairs = [cute.arch.fmax(values[i], values[i + 1], nan=True) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


def total(values: list) -> Float32:
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]
