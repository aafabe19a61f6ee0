"""set, setp, selp and slct as functions on arrays of bit patterns (PTX ISA 9.7.6, 9.7.7)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.float_alu import COMPARISONS, PACKED, PRED, UNSIGNED, WIDTH, Form, compare
from warpspec.sim.integer_alu import integer_type, signed

_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_BOOLEAN = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
_ONE = {"f16": np.uint16(0x3C00), "bf16": np.uint16(0x3F80), "f32": np.uint32(0x3F800000)}


def comparison(test: str, kind: str, ftz: bool) -> tuple[Callable, int]:
    """(function of two bit-pattern arrays to a bool array, bits of an operand)."""
    type_ = integer_type(kind)
    if type_ is None:
        return compare(test, kind, ftz), WIDTH[kind]
    width, is_signed = type_
    plain = COMPARISONS[_UNSIGNED_NAMES.get(test, test)]
    if is_signed:
        return lambda a, b: plain(signed(a), signed(b)), width
    return plain, width


def _split(flags: list[str]) -> tuple[str, Callable | None, bool]:
    """(comparison, boolean operation, .ftz) from the modifiers between the name and the types."""
    boolean = next((_BOOLEAN[f] for f in flags[1:] if f in _BOOLEAN), None)
    return flags[0], boolean, "ftz" in flags


def halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high 16 bits of each word."""
    return (words & np.uint32(0xFFFF)).astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)


def setp_form(opcode: str) -> Form:
    """setp: two predicates; for packed types one for each half, otherwise the comparison and its opposite."""
    parts = opcode.split(".")
    test, boolean, ftz = _split(parts[1:-1])
    kind = parts[-1]
    function, width = comparison(test, PACKED.get(kind, kind), ftz)

    def scalar(a, b, *c):
        result = function(a, b)
        return tuple(boolean(r, c[0]) if boolean else r for r in (result, ~result))

    def pair(a, b, *c):
        results = [function(x, y) for x, y in zip(halves(a), halves(b), strict=True)]
        return tuple(boolean(r, c[0]) if boolean else r for r in results)

    is_packed = kind in PACKED
    width = 32 if is_packed else width
    sources = (width, width, PRED) if boolean else (width, width)
    return Form(pair if is_packed else scalar, sources)


def set_form(opcode: str) -> Form:
    """set: all ones or 1.0 if the comparison holds, else 0."""
    parts = opcode.split(".")
    test, boolean, ftz = _split(parts[1:-2])
    to, kind = parts[-2:]
    function, width = comparison(test, PACKED.get(kind, kind), ftz)
    is_packed = kind in PACKED
    element = PACKED.get(to, to)
    if element in _ONE:
        true = _ONE[element]
    else:
        bits = 16 if is_packed else integer_type(to)[0]
        true = UNSIGNED[bits]((1 << bits) - 1)

    def apply(a, b, *c):
        if not is_packed:
            result = function(a, b)
            return np.where(boolean(result, c[0]) if boolean else result, true, true.dtype.type(0))
        low, high = (function(x, y) for x, y in zip(halves(a), halves(b), strict=True))
        if boolean:
            low, high = boolean(low, c[0]), boolean(high, c[0])
        zero = np.uint32(0)
        return np.where(low, np.uint32(true), zero) | np.where(high, np.uint32(true) << np.uint32(16), zero)

    width = 32 if is_packed else width
    return Form(apply, (width, width, PRED) if boolean else (width, width))


def select_form(opcode: str) -> Form:
    """selp d, a, b, p: a where p. slct d, a, b, c: a where c >= 0 (also -0, but not NaN)."""
    parts = opcode.split(".")
    if parts[0] == "selp":
        width = _width(parts[-1])
        return Form(lambda a, b, p: np.where(p, a, b), (width, width, PRED))
    if parts[0] != "slct" or parts[-1] not in ("s32", "f32"):
        raise UnsupportedInstruction(f"`{opcode}`")
    width = _width(parts[-2])
    view = np.int32 if parts[-1] == "s32" else np.float32
    return Form(lambda a, b, c: np.where(c.view(view) >= 0, a, b), (width, width, 32))


def _width(kind: str) -> int:
    type_ = integer_type(kind)
    return WIDTH[kind] if type_ is None else type_[0]
