"""Float instructions as functions on arrays of bit patterns (PTX ISA 9.7.3 to 9.7.5).

`float_form(opcode)` gives the function of one opcode: it takes and returns unsigned arrays of the type's
width; predicates are bool arrays. NaN results are the canonical NaN of their type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.formats import BF16, F16, decode
from warpspec.sim.rounding import (
    F32_MIN_NORMAL,
    F32_NAN,
    F64_NAN,
    MODES,
    exact_f64,
    flush,
    odd_quotient,
    odd_root,
    odd_sum,
    round_f32,
    round_half,
    saturate,
    sum_f32,
)

PRED = 1
HALF_FORMATS = {"f16": F16, "bf16": BF16}
PACKED = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "f32x2": 64, "pred": PRED}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@dataclass(frozen=True, slots=True)
class Form:
    """The computation of one opcode.

    function: arrays of `sources` bits each (1: bool arrays) -> one array of the result's bits, or a tuple
    of arrays when the instruction writes two destinations. signed: the result is sign-extended into a
    wider register. carry_in, carry_out: the condition code is one more source, or one more result, as a
    bool array.
    """

    function: Callable
    sources: tuple[int, ...]
    signed: bool = False
    carry_in: bool = False
    carry_out: bool = False


@dataclass(frozen=True, slots=True)
class Modifiers:
    """The rounding mode and flags of a float opcode."""

    mode: str
    flags: frozenset[str]

    def has(self, flag: str) -> bool:
        return flag in self.flags


def load(bits: np.ndarray, kind: str, ftz: bool = False) -> np.ndarray:
    """Bit patterns as float values: float64 arrays for f64, float32 otherwise."""
    if kind == "f64":
        return bits.view(np.float64)
    value = bits.view(np.float32) if kind == "f32" else decode(bits, HALF_FORMATS[kind])
    if not ftz:
        return value
    if kind == "f16":
        return np.where(np.abs(value) < 2.0**-14, np.copysign(np.float32(0), value), value)
    return flush(value)


def store(value: np.ndarray, kind: str) -> np.ndarray:
    """float32 (f32) or float64 (f64) values as bit patterns, NaN canonical."""
    if kind == "f64":
        return np.where(np.isnan(value), F64_NAN, value.view(np.uint64))
    return np.where(np.isnan(value), F32_NAN, value.view(np.uint32))


def finish(value: np.ndarray, kind: str, mods: Modifiers) -> np.ndarray:
    """A float64 result, exact or rounded to odd, as bits of `kind` with .ftz, .sat and .relu applied."""
    if kind == "f32":
        return _store_f32(round_f32(value, mods.mode), mods)
    fmt = HALF_FORMATS[kind]
    if mods.has("sat"):
        value = np.where(value > 0, np.minimum(value, 1.0), 0.0)
    codes = round_half(value, fmt, mods.mode, relu=mods.has("relu"))
    if mods.has("ftz"):  # as in _flush_tiny
        tiny = np.abs(value) < 2.0 ** (1 - fmt.bias)
        codes = np.where(tiny, codes & 0x8000, codes).astype(np.uint16)
    return codes


def _store_f32(value: np.ndarray, mods: Modifiers) -> np.ndarray:
    if mods.has("ftz"):
        value = flush(value)
    if mods.has("sat"):
        value = saturate(value)
    if mods.has("relu"):
        value = np.where(value < 0, np.float32(0), value)
    return store(value, "f32")


# -- add, sub, mul, fma, div, sqrt, rcp


def _wide(values) -> list[np.ndarray]:
    return [v.astype(np.float64) for v in values]


def _flush_tiny(exact: np.ndarray, rounded: np.ndarray, mods: Modifiers) -> np.ndarray:
    """.ftz tests the exact value (float64), as an H200 does: a value that would round up to the least normal becomes
    zero."""
    if not mods.has("ftz"):
        return rounded
    return np.where(np.abs(exact) < F32_MIN_NORMAL, np.copysign(np.float32(0), rounded), rounded)


def _add(kind: str, mods: Modifiers, a, b):
    if kind == "f64":
        return exact_f64("add", mods.mode, a, b)
    a, b = _wide((a, b))
    return sum_f32(a, b, mods.mode) if kind == "f32" else odd_sum(a, b)


def _mul(kind: str, mods: Modifiers, a, b):
    if kind == "f64":
        return exact_f64("mul", mods.mode, a, b)
    a, b = _wide((a, b))
    return _flush_tiny(a * b, round_f32(a * b, mods.mode), mods) if kind == "f32" else a * b


def _fma(kind: str, mods: Modifiers, a, b, c):
    if kind == "f64":
        return exact_f64("fma", mods.mode, a, b, c)
    a, b, c = _wide((a, b, c))
    exact = odd_sum(a * b, c)
    return _flush_tiny(exact, sum_f32(a * b, c, mods.mode), mods) if kind == "f32" else exact


def _div(kind: str, mods: Modifiers, a, b):
    if kind == "f64":
        return exact_f64("div", mods.mode, a, b)
    return round_f32(odd_quotient(*_wide((a, b))), mods.mode)


def _sqrt(kind: str, mods: Modifiers, a):
    if kind == "f64":
        return exact_f64("sqrt", mods.mode, a)
    return round_f32(odd_root(a.astype(np.float64)), mods.mode)


def _sub(kind: str, mods: Modifiers, a, b):
    return _add(kind, mods, a, -b)


def _rcp(kind: str, mods: Modifiers, a):
    return _div(kind, mods, np.ones_like(a), a)


_ARITHMETIC = {
    "add": (_add, 2), "sub": (_sub, 2), "mul": (_mul, 2), "fma": (_fma, 3), "mad": (_fma, 3),
    "div": (_div, 2), "sqrt": (_sqrt, 1), "rcp": (_rcp, 1),
}  # fmt: skip
_HALF_ARITHMETIC = ("add", "sub", "mul", "fma")


def _arithmetic(name: str, kind: str, mods: Modifiers) -> Callable:
    operation, _ = _ARITHMETIC[name]
    ftz = mods.has("ftz")

    def function(*bits):
        with np.errstate(all="ignore"):
            values = [load(b, kind, ftz) for b in bits]
            result = operation(kind, mods, *values)
            if kind == "f64":
                return store(result, "f64")
            if kind == "f32":
                return _store_f32(result, mods)
            return finish(result, kind, mods)

    return function


def _mixed(name: str, kind: str, mods: Modifiers) -> Callable:
    """add, sub, fma .f32.f16/.bf16: the multiplicands are halves, the addend and the result f32."""

    def function(*bits):
        with np.errstate(all="ignore"):
            narrow = [load(b, kind) for b in bits[:-1]]
            result = _ARITHMETIC[name][0]("f32", mods, *narrow, load(bits[-1], "f32"))
            return _store_f32(result, mods)

    return function


# -- approximations: the nearest float is within every documented error


def _approximate(function: Callable, kind: str, mods: Modifiers) -> Callable:
    def apply(bits):
        with np.errstate(all="ignore"):
            value = load(bits, kind, mods.has("ftz")).astype(np.float64)
            if kind == "f64":  # rcp and rsqrt.approx.ftz.f64: the upper 32 bits of the result count
                result = store(function(value), "f64")
                return result & np.uint64(0xFFFFFFFF00000000)
            return finish(function(value), kind, mods)

    return apply


_APPROXIMATE = {
    "rcp": lambda x: 1.0 / x,
    "rsqrt": lambda x: np.where(np.signbit(x) & (x == 0), -np.inf, 1.0 / np.sqrt(x)),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "ex2": np.exp2,
    "tanh": np.tanh,
}


# -- sign, minimum and maximum, comparisons


def _sign_bit(width: int) -> np.unsignedinteger:
    return UNSIGNED[width](1 << (width - 1))


def _negate(kind: str, mods: Modifiers) -> Callable:
    sign = _sign_bit(WIDTH[kind])
    return _quiet(kind, mods, lambda bits: bits ^ sign)


def _absolute(kind: str, mods: Modifiers) -> Callable:
    sign = _sign_bit(WIDTH[kind])
    return _quiet(kind, mods, lambda bits: bits & ~sign)


def _quiet(kind: str, mods: Modifiers, change: Callable) -> Callable:
    """A change of sign, with .ftz applied before."""
    if not mods.has("ftz"):
        return change
    mantissa_bits = 10 if kind == "f16" else 7 if kind == "bf16" else 23
    sign = _sign_bit(WIDTH[kind])
    exponent = UNSIGNED[WIDTH[kind]](int(~sign) & ((1 << WIDTH[kind]) - 1) & -(1 << mantissa_bits))
    return lambda bits: change(np.where((bits & exponent) == 0, bits & sign, bits))


def _extremum(name: str, kind: str, mods: Modifiers) -> Callable:
    """min and max: -0 < +0; a NaN loses against a number unless .NaN; .xorsign.abs compares magnitudes."""
    width = WIDTH[kind]
    sign = _sign_bit(width)
    nan_code = F64_NAN if kind == "f64" else F32_NAN if kind == "f32" else HALF_FORMATS[kind].nan_code
    pick_smaller = name == "min"

    def two(a, b):
        product = (a ^ b) & sign
        if mods.has("abs"):
            a, b = a & ~sign, b & ~sign
        x, y = load(a, kind), load(b, kind)
        less = (x < y) | ((x == y) & np.signbit(x) & ~np.signbit(y))
        nan_x, nan_y = np.isnan(x), np.isnan(y)
        chosen = np.where(nan_x, b, np.where(nan_y | (less == pick_smaller), a, b))
        if mods.has("xorsign"):
            chosen = (chosen & ~sign) | product
        nan = nan_x | nan_y if mods.has("NaN") else nan_x & nan_y
        return np.where(nan, nan_code, chosen).astype(a.dtype)

    flush_input = _quiet(kind, mods, lambda bits: bits)

    def function(*operands):
        operands = [flush_input(o) for o in operands]
        result = two(operands[0], operands[1])
        for other in operands[2:]:
            result = two(result, other)
        if mods.has("relu"):  # a negative result becomes +0; NaN stays
            negative = ((result & sign) != 0) & ~np.isnan(load(result, kind))
            result = np.where(negative, 0, result).astype(result.dtype)
        return result

    return function


def _testp(test: str, kind: str) -> Callable:
    mantissa_bits = 52 if kind == "f64" else 23
    exponent_mask = (1 << (WIDTH[kind] - 1 - mantissa_bits)) - 1

    def function(bits):
        exponent = (bits >> bits.dtype.type(mantissa_bits)) & bits.dtype.type(exponent_mask)
        mantissa = bits & bits.dtype.type((1 << mantissa_bits) - 1)
        top, bottom = exponent == exponent_mask, exponent == 0
        return {
            "finite": ~top,
            "infinite": top & (mantissa == 0),
            "number": ~(top & (mantissa != 0)),
            "notanumber": top & (mantissa != 0),
            "normal": ~top & (~bottom | (mantissa == 0)),  # zeros count as normal
            "subnormal": bottom & (mantissa != 0),
        }[test]

    return function


def _copysign(kind: str) -> Callable:
    sign = _sign_bit(WIDTH[kind])
    return lambda a, b: (a & sign) | (b & ~sign)


COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
_UNORDERED = {f"{name}u": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def compare(test: str, kind: str, ftz: bool) -> Callable:
    """A comparison of two float bit-pattern arrays: bool array. equ, neu, ... are true when either is NaN."""
    unordered = test in _UNORDERED
    ordered = COMPARISONS[_UNORDERED.get(test, test)]

    def function(a, b):
        x, y = load(a, kind, ftz), load(b, kind, ftz)
        result = ordered(x, y)
        return result | np.isnan(x) | np.isnan(y) if unordered else result

    return function


# -- from opcode to function


def packed(function: Callable, width: int, element_width: int) -> Callable:
    """A function of elements applied to every element of packed words."""

    def apply(*words):
        elements = [np.ascontiguousarray(w).view(UNSIGNED[element_width]) for w in words]
        result = np.ascontiguousarray(function(*elements), dtype=UNSIGNED[element_width])
        return result.view(UNSIGNED[width])

    return apply


def float_form(opcode: str, sources: int) -> Form:
    """The form of a float opcode with `sources` source operands; raises UnsupportedInstruction."""
    parts = opcode.split(".")
    name, kind, flags = parts[0], parts[-1], parts[1:-1]
    mode = next((f for f in flags if f in MODES), "rn")
    mods = Modifiers(mode, frozenset(flags) - set(MODES))
    element = PACKED.get(kind, kind)
    if element not in WIDTH:
        raise UnsupportedInstruction(f"`{opcode}`: type .{kind}")
    if kind in HALF_FORMATS and "f32" in flags and name in ("add", "sub", "fma"):
        mods = Modifiers(mode, mods.flags - {"f32"})
        narrow = (WIDTH[kind],) * (sources - 1)
        return Form(_mixed(name, kind, mods), (*narrow, 32))
    if mods.has("oob"):
        raise UnsupportedInstruction(f"`{opcode}`: .oob")
    function = _element_function(name, element, mods, opcode)
    width = WIDTH[kind]
    if element != kind:
        function = packed(function, width, WIDTH[element])
    return Form(function, (width,) * sources)


def _element_function(name: str, kind: str, mods: Modifiers, opcode: str) -> Callable:
    if name in ("rcp", "rsqrt", "sqrt") and mods.has("approx"):
        return _approximate(_APPROXIMATE[name], kind, mods)
    if name in _ARITHMETIC and (kind not in HALF_FORMATS or name in _HALF_ARITHMETIC):
        return _arithmetic(name, kind, mods)
    if name in _APPROXIMATE and (kind not in HALF_FORMATS or name in ("ex2", "tanh")):
        return _approximate(_APPROXIMATE[name], kind, mods)
    if name in ("min", "max"):
        return _extremum(name, kind, mods)
    if name == "neg":
        return _negate(kind, mods)
    if name == "abs":
        return _absolute(kind, mods)
    if name == "copysign":
        return _copysign(kind)
    if name == "testp":
        return _testp(next(iter(mods.flags)), kind)
    raise UnsupportedInstruction(f"`{opcode}` is not a float instruction the simulator executes")
