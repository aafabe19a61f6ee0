"""cvt and cvt.pack as functions on arrays of bit patterns (PTX ISA 9.7.9.21, 9.7.9.22)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.float_alu import HALF_FORMATS, UNSIGNED, WIDTH, Form, load, store
from warpspec.sim.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    UE8M0,
    FloatFormat,
    decode,
    encode,
    round_tf32,
)
from warpspec.sim.integer_alu import clamp, exact, integer_type, signed, wrap
from warpspec.sim.rounding import flush, round_f32, round_half, round_rational, saturate

INTEGER_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
FLOAT_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
FLOAT_TYPES = ("f16", "bf16", "f32", "f64")
SMALL_FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2, "ue8m0": UE8M0}
FIXED_POINT, FIXED_POINT_ONE = "s2f6", 64.0  # a signed byte with six fraction bits
SCALED = "scaled::n2::ue8m0"  # each value has its own power-of-two scale
F32_MANTISSA_BITS = 23
F32_MAGNITUDE = np.uint32(0x7FFFFFFF)
F32_INFINITY = np.uint32(0x7F800000)
# Bits of each operand's random number in cvt.rs, and their place in `rbits`, for the operands in order.
RANDOM_BITS = {"f16": (13, (16, 0)), "bf16": (16, (16, 0)), "f8f6": (16, (16, 16, 0, 0))}
# e2m1x4: a, b take the upper byte of each half of rbits, e, f the lower one, upper half first.
RANDOM_BYTES_E2M1 = ((24, 8), (24, 8), (16, 0), (16, 0))


# -- integers


def float_to_integer(value: np.ndarray, rounding: str, width: int, is_signed: bool, nan: int) -> np.ndarray:
    """float64 values rounded to integers and clamped to the type; NaN becomes the bit pattern `nan`."""
    rounded = INTEGER_ROUNDINGS[rounding](value)
    low, high = (-(2.0 ** (width - 1)), 2.0 ** (width - 1)) if is_signed else (0.0, 2.0**width)
    inside = (rounded >= low) & (rounded < high)
    bits = np.where(inside, rounded, 0).astype(np.int64 if is_signed else np.uint64).view(np.uint64)
    top = (1 << (width - 1 if is_signed else width)) - 1
    bits = np.where(rounded >= high, np.uint64(top), bits)
    bits = np.where(rounded < low, np.uint64((1 << (width - 1)) if is_signed else 0), bits)
    return np.where(np.isnan(value), np.uint64(nan), bits).astype(UNSIGNED[width])


def nan_as_integer(from_: str, width: int) -> int:
    """The result for NaN: 0, or 1 << (width - 1) for .f64 sources and 64-bit results."""
    return 1 << (width - 1) if from_ == "f64" or width == 64 else 0


def integer_to_float(bits: np.ndarray, is_signed: bool, to: str, mode: str) -> np.ndarray:
    """Integers as bit patterns of a float type."""
    values = signed(bits) if is_signed else bits
    near = values.astype(np.float64)
    if to == "f64":
        if bits.dtype.itemsize < 8 or mode == "rn":
            return near.view(np.uint64)
        rounded = [round_rational(int(v), mode) for v in values]
        return np.array(rounded, np.float64).view(np.uint64)
    if bits.dtype.itemsize == 8:
        near = _odd_from_integer(exact(bits, is_signed))
    return from_wide(near, to, mode)


def _odd_from_integer(values: np.ndarray) -> np.ndarray:
    """64-bit integers as float64, rounded to odd: one more rounding to 24 bits or fewer is exact."""
    magnitude = np.abs(values)
    low = np.array([int(v) & 0x7FF for v in magnitude])
    high = np.array([int(v) >> 11 << 11 for v in magnitude], np.float64)  # at most 53 bits: exact
    odd = np.where(low != 0, (high.view(np.int64) | 1).view(np.float64), high)
    # Below 2**53 the value itself is exact.
    small = np.array([int(v) < 1 << 53 for v in magnitude])
    odd = np.where(small, np.array([float(int(v) % (1 << 53)) for v in magnitude]), odd)
    return np.where(np.array([v < 0 for v in values]), -odd, odd)


def from_wide(value: np.ndarray, to: str, mode: str, relu: bool = False) -> np.ndarray:
    """float64 values, exact or rounded to odd, as bit patterns of f32, f16 or bf16."""
    if to == "f32":
        return store(round_f32(value, mode), "f32")
    if mode == "rna":
        raise UnsupportedInstruction(f"cvt.rna to .{to}")
    return round_half(value, HALF_FORMATS[to], mode, relu)


# -- floats


def float_to_float(from_: str, to: str, mode: str, flags: frozenset[str]) -> Callable:
    """f16, bf16, f32, f64 among each other, rounding to integral values included."""
    integral = next((INTEGER_ROUNDINGS[f] for f in flags if f in INTEGER_ROUNDINGS), None)

    def function(bits):
        with np.errstate(all="ignore"):
            value = load(bits, from_, "ftz" in flags and from_ == "f32").astype(np.float64)
            if integral is not None:
                value = np.copysign(integral(value), value)
            if "sat" in flags:
                value = saturate(value)
            if to == "f64":
                return store(value, "f64")
            if "satfinite" in flags:
                limit = _largest(to)
                value = np.where(np.isnan(value), value, np.clip(value, -limit, limit))
            result = from_wide(value, to, mode, "relu" in flags)
            if "ftz" in flags and to == "f32":
                result = flush(result.view(np.float32)).view(np.uint32)
            return result

    return function


def _largest(kind: str) -> float:
    if kind == "f32":
        return float(np.finfo(np.float32).max)
    fmt = HALF_FORMATS[kind]
    return float(decode(np.array([fmt.max_code], np.uint16), fmt)[0])


def to_tf32(mode: str, flags: frozenset[str]) -> Callable:
    """cvt.rna/.rn/.rz.tf32.f32: f32 bits with 13 low bits cleared after rounding."""
    return lambda bits: round_tf32(bits, mode, "satfinite" in flags, "relu" in flags)


# -- packed formats


def pack(codes: list[np.ndarray], field: int, width: int) -> np.ndarray:
    """Codes into fields of `field` bits, the first one uppermost."""
    total = np.zeros(codes[0].shape, np.uint64)
    for code in codes:
        total = total << np.uint64(field) | code.astype(np.uint64)
    return total.astype(UNSIGNED[width])


def unpack(word: np.ndarray, field: int, count: int) -> list[np.ndarray]:
    """Split words into fields of `field` bits, the uppermost first: the inverse of pack."""
    shifts = [field * (count - 1 - i) for i in range(count)]
    mask = word.dtype.type((1 << field) - 1)
    return [word >> word.dtype.type(s) & mask for s in shifts]


def encode_small(value: np.ndarray, fmt: FloatFormat, mode: str, flags: frozenset[str]) -> np.ndarray:
    return encode(value, fmt, mode, satfinite="satfinite" in flags, relu="relu" in flags)


def stochastic(bits: np.ndarray, fmt: FloatFormat, random: np.ndarray, random_bits: int, flags) -> np.ndarray:
    """Codes of f32 bit patterns, rounded .rs: away from zero if the discarded bits plus `random` carry.

    The `random_bits` are aligned right below the last bit kept, like the discarded bits; results that are subnormal in
    the format discard more bits, of which only the uppermost are added.
    """
    magnitude = bits & F32_MAGNITUDE
    finite = magnitude < F32_INFINITY
    exponent = np.maximum(magnitude >> np.uint32(F32_MANTISSA_BITS), 1).astype(np.int64)
    significand = (magnitude & np.uint32((1 << F32_MANTISSA_BITS) - 1)).astype(np.uint64)
    normal = magnitude >> np.uint32(F32_MANTISSA_BITS) > 0
    significand = np.where(normal, significand | np.uint64(1 << F32_MANTISSA_BITS), significand)
    below = np.maximum(1 - fmt.bias - (exponent - 127), 0)
    cut = np.minimum(F32_MANTISSA_BITS - fmt.mantissa_bits + below, 40).astype(np.uint64)
    # The last bit kept is bit 16: up to 16 random bits below it.
    aligned = significand << np.uint64(16) >> cut
    carry = (aligned & np.uint64(0xFFFF)) + (
        random.astype(np.uint64) << np.uint64(16 - random_bits)
    ) >> np.uint64(16)
    kept = (significand >> cut) + np.where(finite, carry, np.uint64(0))
    # Rebuild an f32 that the format represents exactly, so that encode only saturates.
    scale = (exponent - 127 - F32_MANTISSA_BITS + cut.astype(np.int64)).astype(np.int32)
    value = np.ldexp(kept.astype(np.float64), scale)
    value = np.where(finite, value, magnitude.view(np.float32).astype(np.float64))
    value = np.where(bits >> np.uint32(31) == 1, -value, value)
    with np.errstate(over="ignore"):
        return encode_small(value.astype(np.float32), fmt, "rz" if fmt.inf_code is None else "rn", flags)


def _random(rbits: np.ndarray, kind: str, position: int) -> tuple[np.ndarray, int]:
    """(random number, its bits) of the operand at `position`."""
    if kind == "e2m1":
        high, low = RANDOM_BYTES_E2M1[position]
        byte = np.uint32(0xFF)
        number = (rbits >> np.uint32(high) & byte) << np.uint32(8) | rbits >> np.uint32(low) & byte
        return number, 16
    bits, shifts = RANDOM_BITS.get(kind, RANDOM_BITS["f8f6"])
    return rbits >> np.uint32(shifts[position]) & np.uint32((1 << bits) - 1), bits


def _field(name: str) -> int:
    """Bits per value of the format in a packed word: 6-bit formats are padded to 8."""
    return 4 if name == "e2m1" else 16 if name in HALF_FORMATS else 8


def _format(name: str) -> FloatFormat | None:
    return SMALL_FORMATS.get(name) or HALF_FORMATS.get(name)


def packed_form(opcode: str, to: str, from_: str, mode: str, flags: frozenset[str]) -> Form:
    """cvt to or from x2 and x4 types; the first operand, or the upper part, goes to the upper field."""
    name, count = (to[:-2], int(to[-1])) if to[-2:] in ("x2", "x4") else (to, 0)
    fmt = _format(name)
    if from_ == "f32" and count and fmt is not None:
        field = _field(name)
        width = max(field * count, 8)
        if "rs" in flags:

            def rounded(*operands):
                rbits = operands[-1]
                codes = [
                    stochastic(bits, fmt, *_random(rbits, name, position), flags)
                    for position, bits in enumerate(operands[:-1])
                ]
                return pack(codes, field, width)

            return Form(rounded, (32,) * (count + 1))
        return Form(
            lambda *operands: pack(
                [encode_small(load(b, "f32"), fmt, mode, flags) for b in operands], field, width
            ),
            (32,) * count,
        )
    source = from_[:-2] if from_.endswith("x2") else None
    known = source == FIXED_POINT or _format(source) is not None
    scaled = SCALED in flags
    if source is None or count != 2 or fmt is None or not known or (scaled and name != "bf16"):
        raise UnsupportedInstruction(f"`{opcode}` is not a conversion the simulator executes")
    source_field, field = _field(source), _field(name)
    width = max(2 * field, 8)

    def convert(word, scales=None):
        values = [_value(code, source) for code in unpack(word, source_field, 2)]
        if scaled:
            factors = [decode(code, UE8M0) for code in unpack(scales, 8, 2)]
            values = [v * f.astype(np.float64) for v, f in zip(values, factors, strict=True)]
        return pack([encode_small(v, fmt, mode, flags) for v in values], field, width)

    return Form(convert, (max(2 * source_field, 8), *((16,) if scaled else ())))


def _value(codes: np.ndarray, name: str) -> np.ndarray:
    """Codes of a packed format's element as numbers."""
    if name == FIXED_POINT:
        return codes.astype(np.uint8).view(np.int8) / FIXED_POINT_ONE
    return decode(codes, _format(name))


# -- from opcode to function


def convert_form(opcode: str, sources: int) -> Form:
    """The form of a cvt opcode; raises UnsupportedInstruction."""
    parts = opcode.split(".")
    if parts[1] == "pack":
        return _pack_form(parts, sources)
    to, from_ = parts[-2:]
    modifiers = parts[1:-2]
    mode = next((f for f in modifiers if f in FLOAT_ROUNDINGS), "rn")
    flags = frozenset(modifiers) - {mode}
    if to == "tf32" and from_ == "f32":
        return Form(to_tf32(mode, flags), (32,))
    into, source = integer_type(to), integer_type(from_)
    if into and source:
        return _integer_form(into, source, "sat" in flags)
    if into and from_ in FLOAT_TYPES:
        return _float_to_integer_form(into, from_, flags, opcode)
    if source and to in FLOAT_TYPES:
        width, is_signed = source

        def function(bits):
            if "sat" in flags:
                bits = (np.clip(signed(bits), 0, 1) if is_signed else np.minimum(bits, 1)).astype(bits.dtype)
            return integer_to_float(bits, is_signed, to, mode)

        return Form(function, (width,))
    if to in FLOAT_TYPES and from_ in FLOAT_TYPES:
        return Form(float_to_float(from_, to, mode, flags), (WIDTH[from_],))
    return packed_form(opcode, to, from_, mode, flags)


def _integer_form(into: tuple[int, bool], source: tuple[int, bool], sat: bool) -> Form:
    width, is_signed = into
    have, from_signed = source

    def function(bits):
        if sat:
            return clamp(exact(bits, from_signed), width, is_signed)
        wide = signed(bits).astype(np.int64).view(np.uint64) if from_signed else bits.astype(np.uint64)
        return wide.astype(UNSIGNED[width])

    return Form(function, (have,), is_signed)


def _float_to_integer_form(into: tuple[int, bool], from_: str, flags: frozenset[str], opcode: str) -> Form:
    width, is_signed = into
    rounding = next((f for f in flags if f in INTEGER_ROUNDINGS), None)
    if rounding is None:
        raise UnsupportedInstruction(f"`{opcode}` lacks an integer rounding mode")

    def function(bits):
        with np.errstate(all="ignore"):
            value = load(bits, from_, "ftz" in flags and from_ == "f32").astype(np.float64)
            return float_to_integer(value, rounding, width, is_signed, nan_as_integer(from_, width))

    return Form(function, (WIDTH[from_],), is_signed)


def _pack_form(parts: list[str], sources: int) -> Form:
    """cvt.pack.sat.type.s32[.b32] d, a, b[, c]: a above b in the low bits, the low bits of c above both."""
    into = parts[3]
    size, is_signed = int(into[1:]), into[0] == "s"
    low, high = (-(1 << (size - 1)), (1 << (size - 1)) - 1) if is_signed else (0, (1 << size) - 1)

    def function(a, b, c=None):
        fields = [np.clip(signed(x).astype(np.int64), low, high).astype(object) for x in (b, a)]
        total = (fields[0] & ((1 << size) - 1)) | (fields[1] & ((1 << size) - 1)) << size
        if c is not None:
            total = total | c.astype(object) << (2 * size)
        return wrap(total, 32)

    return Form(function, (32,) * sources)
