"""Integer, logic and bit-field instructions as functions on bit patterns (PTX ISA 9.7.1, 9.7.2, 9.7.8).

`integer_form(opcode)` gives the function of one opcode; operands and results are unsigned arrays of the
type's width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.float_alu import PRED, UNSIGNED, Form, packed

SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
BYTE = np.uint32(0xFF)
NOT_FOUND = np.uint32(0xFFFFFFFF)
CLAMP_SHIFT = 32


def integer_type(kind: str) -> tuple[int, bool] | None:
    """(bits, signed) of .s32, .u16, .b64, ...; None for another type."""
    if kind[:1] in "sub" and kind[1:].isdigit() and int(kind[1:]) in UNSIGNED:
        return int(kind[1:]), kind[0] == "s"
    return None


def signed(bits: np.ndarray) -> np.ndarray:
    """Read bits as two's-complement integers."""
    return bits.view(SIGNED[bits.dtype.itemsize * 8])


def exact(bits: np.ndarray, is_signed: bool) -> np.ndarray:
    """Values as Python integers (object array): for results wider than any numpy integer."""
    return (signed(bits) if is_signed else bits).astype(object)


def wrap(values: np.ndarray, width: int) -> np.ndarray:
    """Python integers modulo 2**width as bit patterns."""
    return (values & ((1 << width) - 1)).astype(UNSIGNED[width])


def clamp(values: np.ndarray, width: int, is_signed: bool) -> np.ndarray:
    """.sat: Python integers clamped to the type's range, as bit patterns."""
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if is_signed else (0, (1 << width) - 1)
    return wrap(np.minimum(np.maximum(values, low), high), width)


# -- arithmetic


def add(a, b):
    return a + b


def sub(a, b):
    return a - b


def saturating(operation: Callable, width: int, is_signed: bool) -> Callable:
    """The operation on unbounded integers, clamped to the type."""
    return lambda *operands: clamp(operation(*(exact(x, is_signed) for x in operands)), width, is_signed)


def with_carry(operation: Callable, width: int, takes: bool) -> Callable:
    """add.cc, addc, sub.cc, subc, mad.cc, madc: the result and the carry (borrow) out of its top bit.

    Carries concern bit patterns, so additions are unsigned; only a product knows of signs.
    """

    def function(*operands):
        carry = operands[-1].astype(object) if takes else 0
        total = operation(*(operands[:-1] if takes else operands), carry)
        return wrap(total, width), ((total < 0) | (total >> width != 0)).astype(bool)

    return function


def product(a, b, part: str, width: int, is_signed: bool) -> np.ndarray:
    """mul .lo, .hi or .wide as unbounded integers (.lo and .hi as bit patterns)."""
    full = exact(a, is_signed) * exact(b, is_signed)
    mask = (1 << width) - 1
    if part == "wide":
        return full
    return full & mask if part == "lo" else full >> width & mask


def multiply(part: str, width: int, is_signed: bool) -> Callable:
    out = 2 * width if part == "wide" else width
    return lambda a, b: wrap(product(a, b, part, width, is_signed), out)


def multiply_add(part: str, width: int, is_signed: bool, sat: bool) -> Callable:
    out = 2 * width if part == "wide" else width

    def function(a, b, c):
        full = exact(a, is_signed) * exact(b, is_signed)
        if part == "hi":
            full = full >> width
        total = full + exact(c, is_signed)
        return clamp(total, out, is_signed) if sat else wrap(total, out)

    return function


def _low24(bits: np.ndarray, is_signed: bool) -> np.ndarray:
    value = (bits & np.uint32(0xFFFFFF)).astype(np.int64)
    return np.where(value >> 23 & 1, value - (1 << 24), value) if is_signed else value


def multiply24(part: str, is_signed: bool) -> Callable:
    """mul24: .lo is bits 31..0 and .hi bits 47..16 of the 48-bit product."""
    shift = 16 if part == "hi" else 0
    # The product fits int64.
    return lambda a, b: wrap((_low24(a, is_signed) * _low24(b, is_signed) >> shift).astype(object), 32)


def multiply24_add(part: str, is_signed: bool, sat: bool) -> Callable:
    shift = 16 if part == "hi" else 0

    def function(a, b, c):
        term = (_low24(a, is_signed) * _low24(b, is_signed) >> shift).astype(object)
        total = term + exact(c, is_signed)
        return clamp(total, 32, is_signed) if sat else wrap(total, 32)

    return function


def sad(is_signed: bool) -> Callable:
    """c + |a - b|."""

    def function(a, b, c):
        x, y = (signed(a), signed(b)) if is_signed else (a, b)
        return c + np.where(x > y, a - b, b - a)

    return function


def divide(name: str, is_signed: bool) -> Callable:
    """div and rem, rounding to zero. By zero: the quotient is all ones, the remainder the dividend."""

    def function(a, b):
        x, y = exact(a, is_signed), exact(b, is_signed)
        divisor = np.where(y == 0, 1, y)
        quotient = np.abs(x) // np.abs(divisor) * np.where((x < 0) == (divisor < 0), 1, -1)
        width = a.dtype.itemsize * 8
        if name == "rem":
            return np.where(b == 0, a, wrap(x - quotient * divisor, width))
        return np.where(b == 0, UNSIGNED[width]((1 << width) - 1), wrap(quotient, width))

    return function


def extremum(name: str, is_signed: bool, relu: bool) -> Callable:
    pick = np.minimum if name == "min" else np.maximum

    def function(a, b):
        if not is_signed:
            return pick(a, b)
        chosen = pick(signed(a), signed(b))
        return (np.maximum(chosen, 0) if relu else chosen).view(a.dtype)

    return function


def absolute(a):
    value = signed(a)
    return np.where(value < 0, (~a) + a.dtype.type(1), a)


def negate(a):
    return (~a) + a.dtype.type(1)


# -- dot products


def _parts(word: np.ndarray, bits: int, is_signed: bool, first: int = 0, count: int | None = None):
    pieces = np.ascontiguousarray(word).view(SIGNED[bits] if is_signed else UNSIGNED[bits])
    pieces = pieces.reshape(-1, 32 // bits).astype(np.int64)
    return pieces[:, first : None if count is None else first + count]


def dot4(a_signed: bool, b_signed: bool) -> Callable:
    """dp4a: c plus four products of bytes."""
    return lambda a, b, c: c + (_parts(a, 8, a_signed) * _parts(b, 8, b_signed)).sum(1).astype(np.uint32)


def dot2(half: str, a_signed: bool, b_signed: bool) -> Callable:
    """dp2a: c plus two products of 16-bit parts of a with the .lo or .hi bytes of b."""
    first = 0 if half == "lo" else 2
    return lambda a, b, c: (
        c + (_parts(a, 16, a_signed) * _parts(b, 8, b_signed, first, 2)).sum(1).astype(np.uint32)
    )


# -- bits


def bits_of(word: np.ndarray) -> np.ndarray:
    """uint8[n, width]: the bits of each word, least significant first."""
    width = word.dtype.itemsize * 8
    return (word[:, None] >> np.arange(width, dtype=word.dtype) & word.dtype.type(1)).astype(np.uint8)


def popc(a):
    return bits_of(a).sum(1).astype(np.uint32)


def clz(a):
    width = a.dtype.itemsize * 8
    any_set = a != 0
    return np.where(any_set, np.argmax(bits_of(a)[:, ::-1], axis=1), width).astype(np.uint32)


def brev(a):
    width = a.dtype.itemsize * 8
    return (bits_of(a)[:, ::-1].astype(a.dtype) << np.arange(width, dtype=a.dtype)).sum(1, dtype=a.dtype)


def bfind(is_signed: bool, shift_amount: bool) -> Callable:
    """The position of the most significant bit that differs from the sign (unsigned: that is set), or ~0."""

    def function(a):
        width = a.dtype.itemsize * 8
        value = np.where(signed(a) < 0, ~a, a) if is_signed else a
        zeros = clz(value)
        found = zeros < width
        return np.where(found, zeros if shift_amount else np.uint32(width - 1) - zeros, NOT_FOUND)

    return function


def fns(mask, base, offset):
    """The position of the n-th set bit of `mask` from `base` on, downwards when the offset is negative."""
    result = np.full(mask.shape, NOT_FOUND)
    for lane, (m, b, n) in enumerate(zip(mask.tolist(), base.tolist(), signed(offset).tolist(), strict=True)):
        if n == 0:
            if b < 32 and m >> b & 1:
                result[lane] = b
            continue
        step = 1 if n > 0 else -1
        places = range(b, 32) if n > 0 else range(b, -1, -1)
        hits = [p for p in places if 0 <= p < 32 and m >> p & 1]
        if len(hits) >= step * n:
            result[lane] = hits[step * n - 1]
    return result


def bfe(is_signed: bool) -> Callable:
    """Bit field extract: `length` bits from `start` on, extended with zero or with the field's top bit."""

    def function(a, start, length):
        width = a.dtype.itemsize * 8
        start, length = (start & BYTE).astype(np.int64), (length & BYTE).astype(np.int64)
        bits = bits_of(a)
        at = start[:, None] + np.arange(width)
        inside = (np.arange(width) < length[:, None]) & (at < width)
        field = np.take_along_axis(bits, np.minimum(at, width - 1), 1)
        top = np.minimum(start + length - 1, width - 1)
        sign = np.take_along_axis(bits, np.maximum(top, 0)[:, None], 1)
        sign = np.where(length[:, None] == 0, 0, sign) if is_signed else np.zeros_like(sign)
        return join_bits(np.where(inside, field, sign), a.dtype)

    return function


def bfi(a, b, start, length):
    """Bit field insert: the low `length` bits of a placed in b from `start` on."""
    width = a.dtype.itemsize * 8
    start, length = (start & BYTE).astype(np.int64), (length & BYTE).astype(np.int64)
    source = np.arange(width) - start[:, None]
    inside = (source >= 0) & (source < length[:, None])
    taken = np.take_along_axis(bits_of(a), np.maximum(source, 0), 1)
    return join_bits(np.where(inside, taken, bits_of(b)), a.dtype)


def join_bits(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The inverse of bits_of."""
    return (bits.astype(dtype) << np.arange(bits.shape[1], dtype=dtype)).sum(1, dtype=dtype)


def szext(mode: str, is_signed: bool) -> Callable:
    """Sign- or zero-extend a from bit position b on."""

    def function(a, b):
        length = np.minimum(b, 32) if mode == "clamp" else b & np.uint32(31)
        keep = (np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)
        keep = keep.astype(np.uint32)
        top = (a >> (np.maximum(length, 1) - np.uint32(1)).astype(np.uint32)) & np.uint32(1)
        extend = (top == 1) & (length > 0) & (length < 32) & is_signed
        return (a & keep) | np.where(extend, ~keep, np.uint32(0))

    return function


def bmsk(mode: str) -> Callable:
    """A mask of b ones from bit a on."""

    def function(a, b):
        if mode == "clamp":
            start, length = np.minimum(a, 32), np.minimum(b, 32)
        else:
            start, length = a & np.uint32(31), b & np.uint32(31)
        start, length = start.astype(np.uint64), length.astype(np.uint64)
        ones = (np.uint64(1) << length) - np.uint64(1)
        return (ones << start & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return function


def lop3(a, b, c, table):
    """Bit i of `table` is the result where the bits of a, b, c read the number i (a is the high bit)."""
    result = np.zeros_like(a)
    for index in range(8):
        term = (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
        result |= np.where(table >> np.uint32(index) & np.uint32(1), term, np.uint32(0))
    return result


def lop3_with_predicate(operation: str, a, b, c, table, q):
    """lop3.and, lop3.or: also whether the result is not zero, combined with q."""
    result = lop3(a, b, c, table)
    return result, (result != 0) & q if operation == "and" else (result != 0) | q


def funnel_shift(direction: str, mode: str) -> Callable:
    """shf: the high (.l) or low (.r) word of b:a shifted by c."""

    def function(a, b, c):
        amount = np.minimum(c, CLAMP_SHIFT) if mode == "clamp" else c & np.uint32(31)
        amount = amount.astype(np.uint64)
        both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
        if direction == "r":
            return (both >> amount & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        # Bits 63..32 of both << amount; at 32 the low word moves up whole.
        high = np.where(amount == 32, both << np.uint64(32), both << (amount & np.uint64(31)))
        return (high >> np.uint64(32)).astype(np.uint32)

    return function


def shift(name: str, width: int, is_signed: bool) -> Callable:
    """shl, shr: amounts past the width count as the width."""

    def function(a, amount):
        amount = np.minimum(amount, width)
        small = np.minimum(amount, width - 1).astype(a.dtype)
        gone = amount == width
        if name == "shl":
            return np.where(gone, a.dtype.type(0), a << small)
        if is_signed:
            return (signed(a) >> small.astype(SIGNED[width])).view(a.dtype)
        return np.where(gone, a.dtype.type(0), a >> small)

    return function


# Byte numbers of d, least significant first, by the low two bits of the selector; bytes 0-3 are a, 4-7 are b.
_PRMT_MODES = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def permute(mode: str | None) -> Callable:
    """prmt: four bytes of b:a. Without a mode nibble i of c picks byte i; its bit 3 replicates the sign."""

    def function(a, b, c):
        pool = np.stack([np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in (a, b)], 1)
        pool = pool.reshape(-1, 8)
        if mode is not None:
            picked = np.take_along_axis(pool, np.array(_PRMT_MODES[mode])[c & np.uint32(3)], 1)
        else:
            nibbles = (c[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
            picked = np.take_along_axis(pool, (nibbles & 7).astype(np.int64), 1)
            picked = np.where(nibbles & 8, np.where(picked & 0x80, 0xFF, 0), picked).astype(np.uint8)
        return np.ascontiguousarray(picked).view(np.uint32).reshape(-1)

    return function


# -- from opcode to function

_BITWISE = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "cnot": lambda a: (a == 0).astype(a.dtype),
}
_COUNT_SOURCES = {"and": 2, "or": 2, "xor": 2, "not": 1, "cnot": 1}
_CARRYING = {
    "add": lambda a, b, c: a.astype(object) + b.astype(object) + c,
    "sub": lambda a, b, c: a.astype(object) - b.astype(object) - c,
}


def integer_form(opcode: str) -> Form:
    """The form of an integer opcode; raises UnsupportedInstruction."""
    parts = opcode.split(".")
    name, kind, flags = parts[0], parts[-1], parts[1:-1]
    unsupported = UnsupportedInstruction(f"`{opcode}` is not an integer instruction the simulator executes")
    if name == "prmt":
        mode = parts[2] if len(parts) > 2 else None
        return Form(permute(mode), (32, 32, 32))
    if name == "lop3" and flags:
        return Form(partial(lop3_with_predicate, flags[0]), (32, 32, 32, 32, PRED))
    if name in ("dp4a", "dp2a"):
        signs = [t[0] == "s" for t in parts[-2:]]
        return Form(dot4(*signs) if name == "dp4a" else dot2(parts[1], *signs), (32, 32, 32))
    if kind == "pred" and name in _BITWISE:
        operation = (lambda a: ~a) if name == "not" else _BITWISE[name]
        return Form(operation, (PRED,) * _COUNT_SOURCES[name])
    if kind in ("s16x2", "u16x2"):
        inner = integer_form(".".join([*parts[:-1], kind[:-2]]))
        return Form(packed(inner.function, 32, 16), (32,) * len(inner.sources))
    type_ = integer_type(kind)
    if type_ is None:
        raise unsupported
    width, is_signed = type_
    if name in ("addc", "subc", "madc") or "cc" in flags:
        return _carry_form(name, flags, width, is_signed)
    same = partial(_same, width)
    if name in _BITWISE:
        return same(_BITWISE[name], _COUNT_SOURCES[name])
    if name in ("add", "sub"):
        operation = add if name == "add" else sub
        return same(saturating(operation, width, is_signed) if "sat" in flags else operation, 2)
    if name in ("mul", "mad"):
        part = next((f for f in flags if f in ("hi", "lo", "wide")), "lo")
        out = 2 * width if part == "wide" else width
        if name == "mul":
            return Form(multiply(part, width, is_signed), (width, width), is_signed)
        function = multiply_add(part, width, is_signed, "sat" in flags)
        return Form(function, (width, width, out), is_signed)
    simple = {
        "mul24": lambda: same(multiply24(flags[0], is_signed), 2),
        "mad24": lambda: same(multiply24_add(flags[0], is_signed, "sat" in flags), 3),
        "sad": lambda: same(sad(is_signed), 3),
        "div": lambda: same(divide("div", is_signed), 2),
        "rem": lambda: same(divide("rem", is_signed), 2),
        "min": lambda: same(extremum("min", is_signed, "relu" in flags), 2),
        "max": lambda: same(extremum("max", is_signed, "relu" in flags), 2),
        "abs": lambda: same(absolute, 1),
        "neg": lambda: same(negate, 1),
        "popc": lambda: Form(popc, (width,)),
        "clz": lambda: Form(clz, (width,)),
        "brev": lambda: same(brev, 1),
        "bfind": lambda: Form(bfind(is_signed, "shiftamt" in flags), (width,)),
        "fns": lambda: same(fns, 3),
        "bfe": lambda: Form(bfe(is_signed), (width, 32, 32)),
        "bfi": lambda: Form(bfi, (width, width, 32, 32)),
        "szext": lambda: same(szext(flags[0], is_signed), 2),
        "bmsk": lambda: same(bmsk(flags[0]), 2),
        "lop3": lambda: same(lop3, 4),
        "shf": lambda: same(funnel_shift(flags[0], flags[1]), 3),
        "shl": lambda: Form(shift("shl", width, is_signed), (width, 32)),
        "shr": lambda: Form(shift("shr", width, is_signed), (width, 32), is_signed),
    }
    if name not in simple:
        raise unsupported
    return simple[name]()


def _same(width: int, function: Callable, sources: int) -> Form:
    return Form(function, (width,) * sources)


def _carry_form(name: str, flags: list[str], width: int, is_signed: bool) -> Form:
    takes = name in ("addc", "subc", "madc")
    gives = "cc" in flags
    base = name[:3]
    if base == "mad":
        part = "hi" if "hi" in flags else "lo"

        def operation(a, b, c, carry):
            return product(a, b, part, width, is_signed) + c.astype(object) + carry
    else:
        operation = _CARRYING[base]
    function = with_carry(operation, width, takes)
    sources = (width,) * (3 if base == "mad" else 2)
    if not gives:
        return Form(lambda *operands: function(*operands)[0], sources, carry_in=takes)
    return Form(function, sources, carry_in=takes, carry_out=True)
