"""Number formats of the tensor cores and of `cvt`, as bit patterns in numpy arrays.

`decode` and `encode` are exact for every input, NaN payloads aside. Codes stand in the low bits of unsigned
arrays; values are float32 (every format here embeds exactly in it). PTX ISA: "Alternate Floating-Point Data
Formats", `cvt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

F32_MANTISSA_BITS = 23
F32_BIAS = 127
F32_MAGNITUDE = np.uint32(0x7FFFFFFF)
F32_INFINITY = np.uint32(0x7F800000)
TF32_DROPPED_BITS = 13


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary floating-point format; codes are sign | exponent | mantissa in the low `bits` bits.

    max_code: magnitude code of the largest finite value. inf_code: None where the format has no infinity.
    nan_code: the code `cvt` writes for NaN; formats without NaN get the largest finite value instead.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    inf_code: int | None
    nan_code: int
    has_nan: bool = True
    signed: bool = True

    @property
    def sign_shift(self) -> int:
        return self.exponent_bits + self.mantissa_bits

    @property
    def dtype(self) -> np.dtype:
        """The unsigned array type codes come in."""
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32)


E2M1 = FloatFormat("e2m1", 4, 2, 1, 1, 0x7, None, 0x7, has_nan=False)
E2M3 = FloatFormat("e2m3", 6, 2, 3, 1, 0x1F, None, 0x1F, has_nan=False)
E3M2 = FloatFormat("e3m2", 6, 3, 2, 3, 0x1F, None, 0x1F, has_nan=False)
E4M3 = FloatFormat("e4m3", 8, 4, 3, 7, 0x7E, None, 0x7F)
E5M2 = FloatFormat("e5m2", 8, 5, 2, 15, 0x7B, 0x7C, 0x7F)
UE4M3 = FloatFormat("ue4m3", 7, 4, 3, 7, 0x7E, None, 0x7F, signed=False)
UE8M0 = FloatFormat("ue8m0", 8, 8, 0, 127, 0xFE, None, 0xFF, signed=False)
BF16 = FloatFormat("bf16", 16, 8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF)
F16 = FloatFormat("f16", 16, 5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF)
TF32 = FloatFormat("tf32", 19, 8, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF)

FORMATS = {f.name: f for f in (E2M1, E2M3, E3M2, E4M3, E5M2, UE4M3, UE8M0, BF16, F16, TF32)}

ROUNDINGS = ("rn", "rz", "rp", "rm", "rna")


@cache
def table(fmt: FloatFormat) -> np.ndarray:
    """float32[256]: the value of every 8-bit pattern; bits above the format's own are ignored. Read-only."""
    if fmt.bits > 8:
        raise ValueError(f"{fmt.name} is too wide for a table")
    code = np.arange(256) & ((1 << fmt.bits) - 1)
    magnitude = code & ((1 << fmt.sign_shift) - 1)
    mantissa = magnitude & ((1 << fmt.mantissa_bits) - 1)
    exponent = magnitude >> fmt.mantissa_bits
    if fmt is UE8M0:  # no zero and no subnormals: every code is a power of two
        values = np.ldexp(1.0, exponent - fmt.bias)
    else:
        significand = np.where(exponent > 0, mantissa + (1 << fmt.mantissa_bits), mantissa)
        scale = np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits
        values = np.ldexp(significand.astype(np.float64), scale)
    if fmt.inf_code is not None:
        values = np.where(magnitude == fmt.inf_code, np.inf, values)
    if fmt.has_nan:
        last = fmt.max_code if fmt.inf_code is None else fmt.inf_code
        values = np.where(magnitude > last, np.nan, values)
    if fmt.signed:
        values = np.copysign(values, np.where(code >> fmt.sign_shift, -1.0, 1.0))
    values = values.astype(np.float32)
    values.setflags(write=False)
    return values


def decode(codes: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    """The float32 values of an unsigned code array, same shape."""
    codes = np.asarray(codes)
    if fmt.bits <= 8:
        return table(fmt)[codes.astype(np.uint8, copy=False)]
    if fmt is F16:
        return codes.astype(np.uint16, copy=False).view(np.float16).astype(np.float32)
    if fmt is BF16:
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return (codes.astype(np.uint32) << np.uint32(TF32_DROPPED_BITS)).view(np.float32)


def encode(
    x: np.ndarray, fmt: FloatFormat, rounding: str = "rn", satfinite: bool = False, relu: bool = False
) -> np.ndarray:
    """Codes of float32 values, rounded as `cvt` does.

    rounding: rn (ties to even), rz, rp (up), rm (down), rna (ties away from zero).
    satfinite: magnitudes past the largest finite value, infinity included, become that value. Without it they
    become infinity (rz, and rp/rm towards zero, stop at the largest finite value), or NaN in a format with no
    infinity, or the largest finite value in a format with neither. NaN becomes `fmt.nan_code`.
    relu: negative values become +0. Unsigned formats take the magnitude.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding {rounding!r} is not one of {ROUNDINGS}")
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    magnitude = bits & F32_MAGNITUDE
    negative = (bits >> np.uint32(31)).astype(bool)
    nan = magnitude > F32_INFINITY

    exponent = (magnitude >> np.uint32(F32_MANTISSA_BITS)).astype(np.int32)
    significand = magnitude & np.uint32((1 << F32_MANTISSA_BITS) - 1)
    significand = np.where(exponent > 0, significand | np.uint32(1 << F32_MANTISSA_BITS), significand)
    unbiased = np.maximum(exponent, 1) - F32_BIAS
    smallest = 1 - fmt.bias  # exponent of the smallest normal number, shared by subnormals
    shift = (F32_MANTISSA_BITS - fmt.mantissa_bits) + np.maximum(smallest - unbiased, 0)
    shift = np.minimum(shift, 31).astype(np.uint32)

    kept = significand >> shift
    remainder = significand & ((np.uint32(1) << shift) - np.uint32(1))
    kept = kept + _increment(kept, remainder, shift, negative, rounding)
    code = kept.astype(np.int64) + (np.maximum(unbiased - smallest, 0).astype(np.int64) << fmt.mantissa_bits)
    if fmt is UE8M0:
        code = _encode_power_of_two(magnitude, rounding)

    overflow = (code > fmt.max_code) & ~nan
    if satfinite or (fmt.inf_code is None and not fmt.has_nan):
        limit = np.full(code.shape, fmt.max_code, np.int64)
    else:
        limit = np.full(code.shape, fmt.nan_code if fmt.inf_code is None else fmt.inf_code, np.int64)
        if fmt.inf_code is not None:
            towards_zero = {"rz": True, "rp": negative, "rm": ~negative}.get(rounding, False)
            limit = np.where(towards_zero & (magnitude != F32_INFINITY), fmt.max_code, limit)
    code = np.where(overflow, limit, code)
    if fmt.signed:
        code = np.where(negative, code | (1 << fmt.sign_shift), code)
    if relu:
        code = np.where(negative, 0, code)
    return np.where(nan, fmt.nan_code, code).astype(fmt.dtype)


def _increment(kept, remainder, shift, negative, rounding):
    """1 where rounding moves the magnitude up, else 0 (uint32)."""
    half = np.where(shift > 0, np.uint32(1) << (np.maximum(shift, 1) - np.uint32(1)), np.uint32(1))
    if rounding == "rn":
        up = (remainder > half) | ((remainder == half) & ((kept & np.uint32(1)) == 1))
    elif rounding == "rna":
        up = remainder >= half
    elif rounding == "rz":
        up = np.zeros(kept.shape, bool)
    else:
        up = (remainder > 0) & (negative if rounding == "rm" else ~negative)
    return up.astype(np.uint32)


def _encode_power_of_two(magnitude: np.ndarray, rounding: str) -> np.ndarray:
    """UE8M0 codes of float32 magnitudes: code c is 2**(c - 127); zero gives code 0, the smallest power."""
    mantissa = magnitude & np.uint32((1 << F32_MANTISSA_BITS) - 1)
    exponent = (magnitude >> np.uint32(F32_MANTISSA_BITS)).astype(np.int64)
    half = 1 << (F32_MANTISSA_BITS - 1)
    if rounding == "rp":  # 2**-127 is the subnormal with only the top mantissa bit set
        up = np.where(exponent > 0, mantissa > 0, mantissa > half)
    elif rounding == "rz":
        up = np.zeros(magnitude.shape, bool)
    else:
        raise ValueError(f"ue8m0 rounds rz or rp, not {rounding}")
    return exponent + up


def round_tf32(
    bits: np.ndarray, rounding: str = "rz", satfinite: bool = False, relu: bool = False
) -> np.ndarray:
    """float32 bit patterns (uint32) rounded to tf32, the 13 low bits zero. Tensor cores round operands rz."""
    if rounding == "rz" and not (satfinite or relu):
        return np.asarray(bits, np.uint32) & np.uint32(0xFFFFFFFF << TF32_DROPPED_BITS & 0xFFFFFFFF)
    code = encode(np.asarray(bits, np.uint32).view(np.float32), TF32, rounding, satfinite, relu)
    return code << np.uint32(TF32_DROPPED_BITS)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8[..., n] -> uint8[..., 2n]: 4-bit codes, low nibble first."""
    packed = np.asarray(packed, np.uint8)
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    out[..., 0::2] = packed & 0xF
    out[..., 1::2] = packed >> 4
    return out


def unpack_sextets(packed: np.ndarray) -> np.ndarray:
    """uint8[..., 3n] -> uint8[..., 4n]: 6-bit codes, least significant bits first."""
    packed = np.asarray(packed, np.uint8)
    triple = packed.reshape(*packed.shape[:-1], -1, 3).astype(np.uint32)
    word = triple[..., 0] | triple[..., 1] << 8 | triple[..., 2] << 16
    codes = (word[..., None] >> np.arange(0, 24, 6, dtype=np.uint32)) & 0x3F
    return codes.astype(np.uint8).reshape(*packed.shape[:-1], -1)
