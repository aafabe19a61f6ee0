"""Reductions that bulk copies, tensor copies and `red.async` apply to a destination array.

PTX ISA 9.7.9.25.4.2 (cp.reduce.async.bulk), 9.7.9.27.1.3 (cp.reduce.async.bulk.tensor), 9.7.13.7 (red.async).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from warpspec.sim.errors import UnsupportedInstruction

OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
INTEGERS = {"u32": "<u4", "s32": "<i4", "u64": "<u8", "s64": "<i8", "b32": "<u4", "b64": "<u8"}
HALF_NAN = np.uint16(0x7FFF)
F32_SIGN = np.uint32(0x80000000)
F32_EXPONENT = np.uint32(0x7F800000)
F32_NAN = np.uint32(0x7FFFFFFF)
BITWISE_TYPES = ("u32", "s32", "u64", "b32", "b64")
ALIASES = {"tf32": "f32", "tf32.ftz": "f32.ftz"}  # a reduction does not round to tf32


@cache
def combine(operation: str, element: str) -> Callable[[np.ndarray, np.ndarray], None]:
    """The function that reduces `source` into `destination`, uint8 arrays whose last dimension is contiguous.

    operation: add, min, max, inc, dec, and, or, xor. element: a PTX type name (u32, s64, b32, f16, bf16).
    Raises UnsupportedInstruction for a pair that the ISA does not have.
    """
    element = ALIASES.get(element, element)
    if operation in BITWISE and element in BITWISE_TYPES:
        function = BITWISE[operation]
    elif element in ("f16", "bf16") and operation in ("add", "min", "max"):
        function = partial(_half, operation, element)
        return partial(_apply, np.dtype("<u2"), function)
    elif element in FLOAT_ADD and operation == "add":
        function = FLOAT_ADD[element]
    elif element in ("u32", "s32", "u64") and operation == "add":
        function = np.add
    elif element in ("u32", "s32", "u64", "s64") and operation in ("min", "max"):
        function = np.minimum if operation == "min" else np.maximum
    elif element == "u32" and operation in ("inc", "dec"):
        function = _increment if operation == "inc" else _decrement
    else:
        raise UnsupportedInstruction(f"bulk reduction .{operation} of .{element}")
    dtype = np.dtype(INTEGERS.get(element, "<f8" if element == "f64" else "<f4"))
    return partial(_apply, dtype, function)


def _apply(dtype: np.dtype, function, destination: np.ndarray, source: np.ndarray) -> None:
    # A view with another item size needs a contiguous last dimension, which is what callers guarantee.
    target = destination.view(dtype)
    with np.errstate(all="ignore"):
        target[...] = function(target, np.ascontiguousarray(source).view(dtype))


def _increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, np.uint32(0), old + np.uint32(1))


def _decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - np.uint32(1))


def _flush(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return np.where(bits & F32_EXPONENT, bits, bits & F32_SIGN).view(np.float32)


def _add_f64(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    # A NaN stays as it is, signalling or not.
    return np.where(np.isnan(old), old, np.where(np.isnan(new), new, old + new))


def _add_f32(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    total = old + new
    return np.where(np.isnan(total), F32_NAN.view(np.float32), total)


def _add_f32_ftz(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return _flush(_add_f32(_flush(np.ascontiguousarray(old)), _flush(new)))


def _widen(bits: np.ndarray, element: str) -> np.ndarray:
    if element == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrow(values: np.ndarray, element: str) -> np.ndarray:
    """float32 to 16-bit patterns, to nearest even, NaN as 0x7fff."""
    if element == "f16":
        bits = values.astype(np.float16).view(np.uint16)
    else:
        wide = values.view(np.uint32).astype(np.uint64)
        bits = (wide + 0x7FFF + (wide >> 16 & 1) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), HALF_NAN, bits)


def _half(operation: str, element: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """f16 and bf16 in float32, whose precision is more than twice theirs: rounding again changes nothing."""
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
    a, b = _widen(old, element), _widen(new, element)
    if operation == "add":
        return _narrow(a + b, element)
    # min and max return the operand that is a number; -0 is below +0.
    less = (a < b) | ((a == b) & np.signbit(a) & ~np.signbit(b))
    first = less if operation == "min" else ~less
    picked = np.where(first, old, new)
    picked = np.where(np.isnan(a), new, np.where(np.isnan(b), old, picked))
    return np.where(np.isnan(a) & np.isnan(b), HALF_NAN, picked)


FLOAT_ADD = {"f32": _add_f32, "f32.ftz": _add_f32_ftz, "f64": _add_f64}
