"""NVFP4 in a kernel: turns blocks of 16 fp32 into e2m1 codes and an e4m3 scale, with the bits of ``nvfp4.quantize``.

Quotients are those of IEEE division, without the slow path of the division instruction: with y = fl(1/d), two steps of
q += y * (x - q d) from q = fl(x y) end at fl(x/d), because a fused multiply-add computes the remainder exactly
(Markstein 1990). ``nvfp4``'s floor of the global scale prevents underflow.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Uint32

from warpspec.common.nvfp4 import AMAX_TO_GLOBAL, E2M1_MAX, E4M3_MAX, MIN_GLOBAL_SCALE, NVFP4_BLOCK

CODES_PER_WORD = 8
BLOCK_WORDS = NVFP4_BLOCK // CODES_PER_WORD
BEYOND_MAX = 8.0  # where quotients may be larger, they are clamped to it; any value above E2M1_MAX would do


def largest_magnitude(values: cute.Tensor) -> Float32:
    """max of |values| (n) fp32, n >= 1; NaN if any value is NaN."""
    largest = absolute(values[0])
    for i in range(1, cute.size(values)):
        largest = cute.arch.fmax(largest, absolute(values[i]), nan=True)
    return largest


def absolute(x: Float32) -> Float32:
    """|x|, also of NaN."""
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def global_scale_of(amax: Float32) -> Float32:
    """The global scale of values whose largest magnitude is amax; NaN if amax is NaN or Inf."""
    # Inf * 0 is NaN; for all other values this adds 0.
    return cute.arch.fmax(divide(amax, Float32(AMAX_TO_GLOBAL)), MIN_GLOBAL_SCALE) + amax * 0.0


def quantize_block(
    values: cute.Tensor, amax: Float32, global_scale: Float32, *, bounded: cutlass.Constexpr = False
) -> tuple[Uint32, Uint32, Uint32]:
    """-> (e4m3 scale in the low byte, codes 0 to 7, codes 8 to 15; the first code is in the lowest nibble).

    values: (16) fp32, not modified. amax: their largest magnitude, NaN if one is NaN. global_scale: positive or NaN.
    bounded: global_scale was computed from values at least as large as these, so that no quotient can overflow.
    """
    scale, divisor = block_scale(amax, global_scale, bounded=bounded)
    empty = Boolean(divisor == 0.0)
    reciprocal = reciprocal_of(divisor)
    limit = BEYOND_MAX * divisor
    words = []
    for word in range(BLOCK_WORDS):
        quotients = []
        for i in range(word * CODES_PER_WORD, (word + 1) * CODES_PER_WORD, 2):
            pair = (values[i], values[i + 1])
            if cutlass.const_expr(not bounded):
                pair = tuple(cute.arch.fmax(cute.arch.fmin(x, limit), -limit) for x in pair)
            quotients.extend(divide_pair(pair, divisor, reciprocal))
        words.append(Uint32(cutlass.select_(empty, Uint32(0), to_e2m1(quotients))))
    return scale, *words


def block_scale(
    amax: Float32, global_scale: Float32, *, bounded: cutlass.Constexpr = False
) -> tuple[Uint32, Float32]:
    """-> (e4m3 scale of a block, divisor of its values: 0 if they all become +0).

    Arguments as in ``quantize_block``.
    """
    if cutlass.const_expr(bounded):
        quotient = divide(divide(amax, Float32(E2M1_MAX)), global_scale)
    else:
        quotient = divide_any(divide(amax, Float32(E2M1_MAX)), global_scale)
    scale = to_e4m3(cute.arch.fmin(quotient, E4M3_MAX, nan=True) + amax * 0.0)  # Inf * 0 is NaN
    return scale, from_e4m3(scale) * global_scale


def quantize_lane(x: Float32, divisor: Float32) -> Uint32:
    """The code of one value of a block that is spread over lanes, one value each. divisor: from ``block_scale``."""
    limit = BEYOND_MAX * divisor
    x = cute.arch.fmax(cute.arch.fmin(x, limit), -limit)
    quotient, _ = divide_pair((x, x), divisor, reciprocal_of(divisor))
    zero = Float32(0.0)
    code = to_e2m1([quotient, *(zero,) * (CODES_PER_WORD - 1)])
    return Uint32(cutlass.select_(divisor == 0.0, Uint32(0), code))


def divide_pair(pair, divisor: Float32, reciprocal: Float32):
    """fl(x / divisor) of two fp32; +0 for a zero of either sign. reciprocal: fl(1 / divisor)."""
    against, factor = (-divisor, -divisor), (reciprocal, reciprocal)
    quotient = cute.arch.mul_packed_f32x2(pair, factor)
    for _ in range(2):
        remainder = cute.arch.fma_packed_f32x2(quotient, against, pair)
        quotient = cute.arch.fma_packed_f32x2(remainder, factor, quotient)
    return quotient


def divide(x: Float32, divisor: Float32) -> Float32:
    """fl(x / divisor), if neither operand nor the quotient is near the ends of fp32's range."""
    quotient, _ = divide_pair((x, x), divisor, reciprocal_of(divisor))
    return quotient


def divide_any(x: Float32, divisor: Float32) -> Float32:
    """fl(x / divisor), for any operands."""
    return cute.arch.inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, divisor]
    )


def reciprocal_of(x: Float32) -> Float32:
    """fl(1 / x)."""
    return cute.arch.inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def to_e4m3(x: Float32) -> Uint32:
    """x >= 0 or NaN, rounded to e4m3, to nearest, ties to even; in the low byte."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 pair; .reg .b16 zero; mov.b16 zero, 0;"
        " cvt.rn.satfinite.e4m3x2.f32 pair, 0f00000000, {$r0}; mov.b32 {$w0}, {pair, zero}; }",
        write_only_types=[Uint32],
        read_only_args=[x],
    )


def from_e4m3(code: Uint32) -> Float32:
    """fp32 of the e4m3 code in the low byte; the other bytes are 0."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 pair; .reg .b16 rest; .reg .b32 halves; .reg .b16 low; .reg .b16 high;"
        " mov.b32 {pair, rest}, {$r0}; cvt.rn.f16x2.e4m3x2 halves, pair;"
        " mov.b32 {low, high}, halves; cvt.f32.f16 {$w0}, low; }",
        write_only_types=[Float32],
        read_only_args=[code],
    )


def to_e2m1(values) -> Uint32:
    """Round eight fp32 of at most 6 in magnitude to e2m1, to nearest, ties to even; NaN becomes +6.

    The first is lowest.
    """
    pairs = "".join(
        f" cvt.rn.satfinite.e2m1x2.f32 byte{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};"
        for i in range(CODES_PER_WORD // 2)
    )
    return cute.arch.inline_ptx(
        "{ .reg .b8 byte0; .reg .b8 byte1; .reg .b8 byte2; .reg .b8 byte3;"
        + pairs
        + " mov.b32 {$w0}, {byte0, byte1, byte2, byte3}; }",
        write_only_types=[Uint32],
        read_only_args=list(values),
    )
