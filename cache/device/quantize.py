"""Quantise the numbers of a lane with the bits of ``cache.quantize``.

Quotients are those of IEEE-754 division. For an ordinary divisor they are made of multiplications: with y = fl(1/d),
two steps of q += y * (x - q d) from q = fl(x y) end at fl(x/d), because a fused multiply-add computes the remainder
exactly (Markstein 1990). Quotients beyond the largest code are clamped first; those so small that the remainder could
underflow become 0 in any case.
"""

from __future__ import annotations

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Uint32

from warpspec.common.device.narrow import MAGNITUDE, SIGN_BIT, e2m1_codes, to_float8
from warpspec.common.device.nvfp4 import absolute, divide_any, from_e4m3, reciprocal_of, to_e4m3
from warpspec.common.nvfp4 import E2M1_MAX, E4M3_MAX

ORDINARY = 2.0**60  # divisors between its reciprocal and itself are ordinary
BEYOND = 2.0  # clamped quotients are this many times the largest code
CODES_PER_WORD = 4  # of 8 bits
CODES_OF_NAN = 0x77777777  # e2m1 has no NaN: +6 stands in


def bits_of(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


@cute.jit
def quotients(values: cutlass.Constexpr, divisor: Float32, largest: cutlass.Constexpr) -> cute.Tensor:
    """(n) fp32: x / divisor of a list of numbers; where it exceeds ``largest``, any number that also does."""
    out = cute.make_rmem_tensor(len(values), Float32)
    lowest, highest = bits_of(1 / ORDINARY), bits_of(ORDINARY)
    if divisor.bitcast(Uint32) - Uint32(lowest) <= Uint32(highest - lowest):
        limit, reciprocal = divisor * (BEYOND * largest), reciprocal_of(divisor)
        for i in cutlass.range_constexpr(len(values)):
            x = cute.arch.fmin(absolute(values[i]), limit, nan=True)
            quotient = x * reciprocal
            for _ in range(2):
                quotient = fused(fused(-quotient, divisor, x), reciprocal, quotient)
            sign = values[i].bitcast(Uint32) & Uint32(1 << SIGN_BIT)  # that of -0, too
            out[i] = (quotient.bitcast(Uint32) | sign).bitcast(Float32)
    else:
        for i in cutlass.range_constexpr(len(values)):
            out[i] = divide_any(values[i], divisor)
    return out


def fused(x: Float32, y: Float32, z: Float32) -> Float32:
    """fl(x y + z)."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[x, y, z]
    )


def float8_words(values: list, scale: Float32, name: str, largest: float) -> list:
    """Words of four codes, ``quantize_float8``."""
    found = quotients(values, scale, largest)
    numbers = [found[i] for i in range(len(values))]
    return [to_float8(numbers[i : i + CODES_PER_WORD], name) for i in range(0, len(numbers), CODES_PER_WORD)]


def nvfp4_words(values: list, scale: Float32, block_lanes: int) -> tuple[list, Uint32]:
    """(words of eight codes, the block's scale in the low byte), ``quantize_nvfp4``.

    values: of one block, or of the lane's half of one if ``block_lanes`` is 2.
    """
    amax = absolute(values[0])
    for value in values[1:]:
        amax = cute.arch.fmax(amax, absolute(value), nan=True)
    if block_lanes == 2:
        amax = cute.arch.fmax(amax, Float32(cute.arch.shuffle_sync_bfly(amax, 1)), nan=True)
    quotient = divide_any(divide_any(amax, Float32(E2M1_MAX)), scale)
    code = to_e4m3(cute.arch.fmin(quotient, E4M3_MAX, nan=True) + amax * 0.0)  # Inf * 0 is NaN
    divisor = from_e4m3(code) * scale
    found = quotients(values, divisor, E2M1_MAX)
    bad, empty = Boolean(divisor != divisor), Boolean(divisor == 0.0)
    words = []
    for first in range(0, len(values), 8):
        numbers = [bounded(values[i], found[i]) for i in range(first, first + 8)]
        word = Uint32(cutlass.select_(empty, Uint32(0), e2m1_codes(numbers)))
        words.append(Uint32(cutlass.select_(bad, Uint32(CODES_OF_NAN), word)))
    return words, code


def bounded(x: Float32, quotient: Float32) -> Float32:
    """The quotient of x, of a magnitude of at most 6; +0 for a zero of either sign."""
    magnitude = (quotient.bitcast(Uint32) & Uint32(MAGNITUDE)).bitcast(Float32)
    magnitude = cute.arch.fmin(magnitude, E2M1_MAX)
    return Float32(cutlass.select_(x < 0.0, -magnitude, magnitude))
