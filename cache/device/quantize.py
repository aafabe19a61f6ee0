"""Quantise the numbers of a lane with the bits of ``cache.quantize``.

Codes are those of IEEE-754 quotients. For an ordinary divisor quotients are made of multiplications: with y = fl(1/d),
two steps of q += y * (x - q d) from q = fl(x y) end at fl(x/d), because a fused multiply-add computes the remainder
exactly (Markstein 1990). Quotients beyond the largest code are clamped first; those so small that the remainder could
underflow become 0 in any case.

If x has 16 bits, one step gives a quotient with the code of fl(x/d) in every format here. q differs from x/d by at most
two units u in its last place, and y from 1/d by 2^-24 of itself. So the step's exact result is within u/2^22 of x/d,
and fl(x/d) follows unless x/d lies so close to the middle between two fp32 numbers. That matters only if one of the two
is a border m between codes. Let d be in [1, 2) and m = M 2^e with M in 16..31 (borders have at most five bits). Then
x - d m is a multiple of 2^(e-23), for d has 24 bits and x at most 11; and it is 8 d times that, up to a 2^-21th. So 8 d
is almost a whole number, d is within eight units of a multiple of 1/8, and these units times M make up 8 d, which is at
most 16: M is 16, and d is 2 - 2^-23. There the step ends right: x = 2 m gives q = m (1 + 2^-23), as the division does.
"""

from __future__ import annotations

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Uint32

from warpspec.cache.device.rows import unpack
from warpspec.common.device.narrow import CODE_BITS, MAGNITUDE, SIGN_BIT, e2m1_codes, to_float8
from warpspec.common.device.nvfp4 import absolute, divide_any, from_e4m3, reciprocal_of, to_e4m3
from warpspec.common.device.words import interleave
from warpspec.common.nvfp4 import E2M1_MAX, E4M3_MAX

ORDINARY = 2.0**60  # divisors between its reciprocal and itself are ordinary
ORDINARY_SCALE = ORDINARY / 2.0**9  # e4m3 numbers lie between 2**-9 and 2**9
BEYOND = 2.0  # clamped quotients are this many times the largest code
CODES_PER_WORD = 4  # codes of 8 bits in a word
CODES_OF_NAN = 0x77777777  # e2m1 has no NaN: +6 stands in
PAIRS_PER_WORD = 4  # pairs of e2m1 codes in a word
# Midpoints between neighbouring e2m1 numbers, and half of the distance to the next fp32 number, negative where the
# midpoint itself rounds to the larger neighbour, whose code is even. The larger midpoints, 2.5, 3.5 and 5, are these
# times powers of two, and so are their distances.
E2M1_BORDERS = tuple((t, half * 2.0**-24) for t, half in ((0.25, 0.25), (0.75, -0.5), (1.25, 1), (1.75, -1)))
BF16_DOUBLE = 0x00800080  # added to a pair of ordinary bf16, doubles both
MAGNITUDES = 0x7FFF7FFF  # mask of the magnitudes of two 16-bit numbers
PAIRS = {"bfloat16": "bf16x2", "float16": "f16x2"}  # types of instructions
# Pairs; a whole number below 128, added to 128, stands in the low bits.
BF16_128, BF16_8 = (0x43004300, 0x41004100)
UPPER_HALF_TWICE, LOWER_BYTES_OF_HALVES = 0x3232, 0x6420  # prmt selectors


def bits_of(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


@cute.jit
def quotients(
    values: cutlass.Constexpr, divisor: Float32, reciprocal: Float32, largest: cutlass.Constexpr
) -> cute.Tensor:
    """(n) fp32: for each x of a list, a number with the code of x / divisor, as the module says. A quotient above
    ``largest`` may be any other number above it.

    values: 16-bit numbers. reciprocal: fl(1 / divisor).
    """
    out = cute.make_rmem_tensor(len(values), Float32)
    if is_ordinary(divisor):
        found = ordinary_quotients(values, divisor, reciprocal, largest)
        for i in cutlass.range_constexpr(len(values)):
            out[i] = found[i]
    else:
        for i in cutlass.range_constexpr(len(values)):
            out[i] = divide_any(values[i], divisor)
    return out


def ordinary_quotients(values: list, divisor: Float32, reciprocal: Float32, largest: float) -> list:
    """``quotients`` by an ordinary divisor."""
    limit, found = divisor * (BEYOND * largest), []
    for value in values:
        x = cute.arch.fmin(absolute(value), limit, nan=True)
        sign = value.bitcast(Uint32) & Uint32(1 << SIGN_BIT)  # also the sign of -0
        found.append((divided(x, divisor, reciprocal, 1).bitcast(Uint32) | sign).bitcast(Float32))
    return found


def is_ordinary(x: Float32, limit: float = ORDINARY) -> Boolean:
    """Whether x lies between 1 / limit and limit."""
    lowest, highest = bits_of(1 / limit), bits_of(limit)
    return Boolean(x.bitcast(Uint32) - Uint32(lowest) <= Uint32(highest - lowest))


def divided(x: Float32, divisor: Float32, reciprocal: Float32, steps: int = 2) -> Float32:
    """The quotient x / divisor of ordinary numbers, which is fl(x / divisor) after two steps. reciprocal: fl(1 /
    divisor). steps: as the module says."""
    quotient = x * reciprocal
    for _ in range(steps):
        quotient = fused(fused(-quotient, divisor, x), reciprocal, quotient)
    return quotient


def fused(x: Float32, y: Float32, z: Float32) -> Float32:
    """fl(x y + z)."""
    return fused_as("rn", x, y, z)


def fused_as(rounding: str, x: Float32, y: Float32, z: Float32) -> Float32:
    """x y + z, rounded once. rounding: "rn", to nearest, or "rm", down."""
    return cute.arch.inline_ptx(
        f"fma.{rounding}.f32 {{$w0}}, {{$r0}}, {{$r1}}, {{$r2}};",
        write_only_types=[Float32],
        read_only_args=[x, y, z],
    )


def float8_words(values: list, scale: Float32, reciprocal: Float32, name: str, largest: float) -> list:
    """Words of four codes, ``quantize_float8``. reciprocal: fl(1 / scale)."""
    found = quotients(values, scale, reciprocal, largest)
    numbers = [found[i] for i in range(len(values))]
    return [to_float8(numbers[i : i + CODES_PER_WORD], name) for i in range(0, len(numbers), CODES_PER_WORD)]


def nvfp4_words(
    words: cute.Tensor, dtype: str, scale: Float32, reciprocal: Float32, block_lanes: int
) -> tuple[list, Uint32]:
    """(words of eight codes, the block's scale in the low byte), ``quantize_nvfp4``.

    words: two numbers of ``dtype`` each, of one block, or of the lane's half of one if ``block_lanes`` is 2.
    reciprocal: fl(1 / scale).
    """
    pairs = [words[i] & Uint32(MAGNITUDES) for i in range(cute.size(words))]
    assert len(pairs) in (4, 8)
    while len(pairs) > 2:
        name = f"max.NaN.{PAIRS[dtype]}"
        pairs = [of_registers(name, a, b) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    two = cute.make_rmem_tensor(len(pairs), Uint32)
    for i, pair in enumerate(pairs):
        two[i] = pair
    amax, *others = unpack(two, dtype)
    for value in others:
        amax = cute.arch.fmax(amax, value, nan=True)
    if block_lanes == 2:
        amax = cute.arch.fmax(amax, Float32(cute.arch.shuffle_sync_bfly(amax, 1)), nan=True)
    code, divisor, found = block_codes(words, dtype, amax, scale, reciprocal)
    bad, empty = Boolean(divisor != divisor), Boolean(divisor == 0.0)
    chosen = []
    for i in range(cute.size(found)):
        word = Uint32(cutlass.select_(empty, Uint32(0), found[i]))
        chosen.append(Uint32(cutlass.select_(bad, Uint32(CODES_OF_NAN), word)))
    return chosen, code


@cute.jit
def block_codes(
    words: cute.Tensor, dtype: cutlass.Constexpr, amax: Float32, scale: Float32, reciprocal: Float32
) -> tuple:
    """(code of a block's scale, divisor of its numbers, words of their codes if the divisor is neither 0 nor NaN)."""
    out = cute.make_rmem_tensor(cute.size(words) // PAIRS_PER_WORD, Uint32)
    code, divisor = Uint32(0), Float32(0.0)
    # With such a scale, divisors are ordinary, too.
    if is_ordinary(scale, ORDINARY_SCALE) & (Boolean(amax == 0.0) | is_ordinary(amax)):
        sixth = divided(amax, Float32(E2M1_MAX), Float32(1 / E2M1_MAX))
        code = scale_code(divided(sixth, scale, reciprocal), amax)
        divisor = from_e4m3(code) * scale
        if cutlass.const_expr(dtype == "bfloat16"):
            bounds = thresholds(divisor)
            for i in cutlass.range_constexpr(cute.size(out)):
                first = i * PAIRS_PER_WORD
                out[i] = codes_between([words[first + n] for n in range(PAIRS_PER_WORD)], bounds)
        else:
            values = unpack(words, dtype)
            found = ordinary_quotients(values, divisor, reciprocal_of(divisor), E2M1_MAX)
            bounded_codes(values, found, out)
    else:
        code = scale_code(divide_any(divide_any(amax, Float32(E2M1_MAX)), scale), amax)
        divisor = from_e4m3(code) * scale
        values = unpack(words, dtype)
        bounded_codes(values, [divide_any(value, divisor) for value in values], out)
    return code, divisor, out


def scale_code(quotient: Float32, amax: Float32) -> Uint32:
    """The e4m3 code of a block's scale; NaN if amax is NaN or Inf."""
    return to_e4m3(cute.arch.fmin(quotient, E4M3_MAX, nan=True) + amax * 0.0)  # Inf * 0 is NaN


def bounded_codes(values: list, divided_values: list, out: cute.Tensor) -> None:
    """Write words of eight e2m1 codes."""
    for i in range(cute.size(out)):
        out[i] = e2m1_codes([bounded(values[n], divided_values[n]) for n in range(8 * i, 8 * i + 8)])


def thresholds(divisor: Float32) -> list:
    """The largest bf16 number whose code is lower, twice in a word, for each code but 0.

    fl(x / d) is at most t, or beyond t, where x is at most (t + h) d; h is half of the distance between t and the next
    fp32 number, and where a tie goes to the lower code the border is (t + h) d, else (t - h) d. Neither is a bf16
    number: t + h and t - h have 25 bits. So x is beyond the border where it is beyond the border rounded down to bf16.
    """
    found = []
    for t, half in E2M1_BORDERS:
        border = fused_as("rm", divisor, Float32(t), divisor * half)
        found.append(interleave(border.bitcast(Uint32), Uint32(0), UPPER_HALF_TWICE))
    found += [pair + Uint32(BF16_DOUBLE) for pair in found[2:]]
    return [*found, found[4] + Uint32(BF16_DOUBLE)]


def codes_between(words: list, bounds: list) -> Uint32:
    """Eight codes of four pairs of bf16: how many bounds each magnitude exceeds, and the sign of what is below 0."""
    pairs = []
    for word in words:
        magnitude = word & Uint32(MAGNITUDES)
        codes = Uint32(BF16_128)
        for bound in bounds:
            codes = of_registers("add.rn.bf16x2", codes, exceeds(magnitude, bound))
        below = exceeds(Uint32(0), word)
        pairs.append(of_registers("fma.rn.bf16x2", below, Uint32(BF16_8), codes))
    bytes_ = [interleave(a, b, LOWER_BYTES_OF_HALVES) for a, b in (pairs[:2], pairs[2:])]
    low, high = (word | word >> CODE_BITS for word in bytes_)
    return interleave(low, high, LOWER_BYTES_OF_HALVES)


def exceeds(a: Uint32, b: Uint32) -> Uint32:
    """Compare the bf16 halves of two words: each half of the result is 1.0 in bf16 where a > b, else 0."""
    return of_registers("set.gt.bf16x2.bf16x2", a, b)


def of_registers(name: str, *words) -> Uint32:
    """An instruction that takes no constants in its code."""
    names = ", ".join(f"word{i}" for i in range(len(words)))
    moves = "".join(f"mov.b32 word{i}, {{$r{i}}}; " for i in range(len(words)))
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 {names}; {moves}{name} {{$w0}}, {names}; }}",
        write_only_types=[Uint32],
        read_only_args=list(words),
    )


def bounded(x: Float32, quotient: Float32) -> Float32:
    """The quotient of x, of a magnitude of at most 6; +0 for a zero of either sign."""
    magnitude = (quotient.bitcast(Uint32) & Uint32(MAGNITUDE)).bitcast(Float32)
    magnitude = cute.arch.fmin(magnitude, E2M1_MAX)
    return Float32(cutlass.select_(x < 0.0, -magnitude, magnitude))
