"""The elements of 16-byte vectors as numbers; maxima and sums of a few. Device side, plain Python over registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.softmax.vectors import WORDS

HIGH_HALF = -0x10000  # of a word
HALF_BITS = 16


def unpack(word: Int32, dtype: str) -> list:
    """The one or two elements of a word, as Float32."""
    if dtype == "float32":
        return [word.bitcast(Float32)]
    if dtype == "bfloat16":
        return [(word << HALF_BITS).bitcast(Float32), (word & HIGH_HALF).bitcast(Float32)]
    return list(
        cute.arch.inline_ptx(
            "{ .reg .b16 low_half, high_half; mov.b32 {low_half, high_half}, {$r0}; "
            "cvt.f32.f16 {$w0}, low_half; cvt.f32.f16 {$w1}, high_half; }",
            write_only_types=[Float32, Float32],
            read_only_args=[word],
        )
    )


def floats(words: cute.Tensor, dtype: str) -> list:
    """The elements of words (WORDS) Int32, as Float32."""
    return [x for i in range(WORDS) for x in unpack(words[i], dtype)]


def largest(values: list) -> Float32:
    """Their maximum, NaN if there is one."""
    return _tree(values, lambda a, b: cute.arch.fmax(a, b, nan=True))


def total(values: list) -> Float32:
    return _tree(values, lambda a, b: a + b)


def largest_in(words: list, dtype: str) -> Float32:
    """The largest element of packed words, NaN if there is one: two at a time where they are 16 bits."""
    if dtype == "float32":
        return largest([word.bitcast(Float32) for word in words])
    suffix = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]

    def pairwise(a, b):
        return cute.arch.inline_ptx(
            f"max.NaN.{suffix} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[a, b]
        )

    return largest(unpack(_tree(words, pairwise), dtype))


def _tree(values: list, join):
    while len(values) > 1:
        pairs = [join(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]
