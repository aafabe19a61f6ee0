"""Float arithmetic with every rounding mode of PTX, exact, on numpy arrays (PTX ISA 9.7.3).

f32 results are computed in float64, where products of f32 values are exact, and rounded to odd: the last bit records
that bits were discarded, so that a further rounding to 24 bits or fewer is correct in any mode. f64 results in the
directed modes are computed with exact rationals, lane by lane.

modes: rn (nearest, ties to even), rz (to zero), rm (down), rp (up).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import isfinite, isqrt

import numpy as np

from warpspec.sim.formats import FloatFormat, encode

MODES = ("rn", "rz", "rm", "rp")
F32_NAN = np.uint32(0x7FFFFFFF)
F64_NAN = np.uint64(0x7FFFFFFFFFFFFFFF)
F32_MIN_NORMAL = np.float32(2.0**-126)
F64_MANTISSA = 53
F64_MIN_EXPONENT = -1074  # exponent of the last bit of a subnormal
F64_MAX = float(np.finfo(np.float64).max)
# Quotients and roots are first cut to 26 bits: times a 24-bit divisor, or squared, that is still exact in
# float64.
_CUT_BITS = np.int64((1 << (F64_MANTISSA - 26)) - 1)


def flush(x: np.ndarray) -> np.ndarray:
    """.ftz: float32 subnormals become zero of the same sign."""
    return np.where(np.abs(x) < F32_MIN_NORMAL, np.copysign(np.float32(0), x), x)


def saturate(x: np.ndarray) -> np.ndarray:
    """.sat: clamped to [0, 1]; NaN and -0 become +0."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def round_f32(x: np.ndarray, mode: str) -> np.ndarray:
    """float64 values, exact or rounded to odd, as float32."""
    near = x.astype(np.float32)
    if mode == "rn":
        return near
    back = near.astype(np.float64)
    if mode == "rz":
        return np.where(np.abs(back) > np.abs(x), np.nextafter(near, np.float32(0)), near)
    if mode == "rm":
        return np.where(back > x, np.nextafter(near, np.float32(-np.inf)), near)
    return np.where(back < x, np.nextafter(near, np.float32(np.inf)), near)


def round_half(x: np.ndarray, fmt: FloatFormat, mode: str = "rn", relu: bool = False) -> np.ndarray:
    """float64 values, exact or rounded to odd, as codes of f16 or bf16."""
    cut = round_f32(x, "rz")
    sticky = np.isfinite(cut) & (cut.astype(np.float64) != x)
    odd = (cut.view(np.uint32) | sticky).view(np.float32)
    return encode(odd, fmt, mode, relu=relu)


def odd_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64 arrays, rounded to odd."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    even = (total.view(np.int64) & 1) == 0
    move = even & np.isfinite(total) & (error != 0)
    return np.where(move, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def odd_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b of float64 arrays that hold f32 values, rounded to odd at 26 bits or more."""
    quotient = a / b
    cut = (quotient.view(np.int64) & ~_CUT_BITS).view(np.float64)
    return _stick(quotient, cut, np.abs(cut * b), np.abs(a), np.isfinite(a) & np.isfinite(b) & (b != 0))


def odd_root(a: np.ndarray) -> np.ndarray:
    """sqrt(a) of a float64 array that holds f32 values, rounded to odd at 26 bits or more."""
    root = np.sqrt(a)
    cut = (root.view(np.int64) & ~_CUT_BITS).view(np.float64)
    return _stick(root, cut, cut * cut, a, np.isfinite(a) & (a > 0))


def _stick(near, cut, product, target, regular):
    """`cut` with a last bit that says on which side of it the exact result lies; `near` if not regular."""
    step = (product < target).astype(np.int64) - (product > target).astype(np.int64)
    stuck = (cut.view(np.int64) + step).view(np.float64)
    return np.where(regular & (near != 0), stuck, near)


def sum_f32(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a + b, given as float64 arrays of exact values (f32 values or products of two), as float32."""
    result = round_f32(odd_sum(a, b), mode)
    if mode == "rm":  # x - x is -0 when rounding down
        cancelled = (a == -b) & (np.signbit(a) != np.signbit(b)) & np.isfinite(a)
        result = np.where(cancelled, np.float32(-0.0), result)
    return result


# -- f64


def round_rational(value: Fraction, mode: str) -> float:
    """The float64 nearest to a rational in a mode; zero comes out as +0."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - F64_MANTISSA
    exponent = max(exponent, F64_MIN_EXPONENT)
    while True:
        scaled = magnitude / Fraction(2) ** exponent
        kept, rest = divmod(scaled.numerator, scaled.denominator)
        if kept < 1 << F64_MANTISSA:
            break
        exponent += 1
    half = Fraction(rest, scaled.denominator) - Fraction(1, 2)
    if mode == "rn":
        up = half > 0 or (half == 0 and kept & 1 == 1)
    else:
        up = rest > 0 and mode == ("rm" if value < 0 else "rp")
    kept += up
    sign = -1.0 if value < 0 else 1.0
    if Fraction(kept) * Fraction(2) ** exponent > Fraction(F64_MAX):
        away = mode == "rn" or mode == ("rm" if value < 0 else "rp")
        return sign * (np.inf if away else F64_MAX)
    return sign * float(Fraction(kept) * Fraction(2) ** exponent)


def exact_f64(operation: str, mode: str, *operands: np.ndarray) -> np.ndarray:
    """add, mul, fma, div or sqrt of float64 arrays in any rounding mode."""
    with np.errstate(all="ignore"):
        plain = _PLAIN[operation](*operands)
    result = plain.copy()
    for at in np.ndindex(plain.shape):
        values = [float(x[at]) for x in operands]
        if not all(map(isfinite, values)) or np.isnan(plain[at]) or (operation == "div" and values[1] == 0):
            continue
        if operation == "sqrt":
            result[at] = _root_f64(values[0], mode)
            continue
        exact = _EXACT[operation](*map(Fraction, values))
        if exact != 0:
            result[at] = round_rational(exact, mode)
        elif operation in ("add", "fma"):
            first = values[0] if operation == "add" else np.copysign(1.0, values[0]) * values[1]
            opposed = np.signbit(first) != np.signbit(values[-1])
            result[at] = (-0.0 if mode == "rm" else 0.0) if opposed else np.copysign(0.0, values[-1])
    return result


_PLAIN: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
    "sqrt": np.sqrt,
}
_EXACT: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
}


def _root_f64(value: float, mode: str) -> float:
    """sqrt of a finite non-negative float64.

    A root cut to more bits than needed, made odd when it is inexact.
    """
    if value == 0:
        return value
    exact = Fraction(value)
    shift = 2 * (F64_MANTISSA + 2 + max(0, -F64_MIN_EXPONENT))
    scaled = exact.numerator * (1 << shift) // exact.denominator  # exact: the denominator is a power of two
    root = isqrt(scaled)
    sticky = Fraction(int(root * root != scaled), 2)
    return round_rational((root + sticky) / Fraction(1 << (shift // 2)), mode)
