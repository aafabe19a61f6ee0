"""Integer, bit-field and logic instructions against plain Python integers."""

import operator
import random

import numpy as np
import pytest
from helpers.alu_forms import run

from warpspec.sim.families.alu import form_of

INTS = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000]
INTS += [
    0xFFFFFFFF,
    0xDEADBEEF,
    0x7FFFFFFFFFFFFFFF,
    0x8000000000000000,
    0xFFFFFFFFFFFFFFFF,
    0x123456789ABCDEF0,
]


def to_signed(value, width):
    return value - (1 << width) if value >> (width - 1) else value


def integers(width, count, operands, seed):
    rng = random.Random(seed)
    pool = [i & ((1 << width) - 1) for i in INTS] + [rng.randrange(1 << width) for _ in range(30)]
    return [rng.choices(pool, k=count) for _ in range(operands)]


def check_integer(opcode, reference, widths, out, signed=False, count=300):
    """Compare with a function of Python ints; `widths` are the operands' bits."""
    lanes = [integers(w, count, 1, f"{opcode}{i}")[0] for i, w in enumerate(widths)]
    got = run(opcode, *lanes)
    for lane in zip(got, *lanes, strict=True):
        values = [to_signed(v, w) if signed else v for v, w in zip(lane[1:], widths, strict=True)]
        assert lane[0] == reference(*values) & ((1 << out) - 1), [opcode, *map(hex, lane)]


def clamp(value, width):
    return min(max(value, -(1 << (width - 1))), (1 << (width - 1)) - 1)


def trunc_div(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_integer_arithmetic(width):
    for sign in "su":
        is_signed = sign == "s"
        kind = f"{sign}{width}"
        for name, function in (("add", operator.add), ("sub", operator.sub), ("mul.lo", operator.mul)):
            check_integer(f"{name}.{kind}", function, (width, width), width, is_signed)
        check_integer(f"mul.hi.{kind}", lambda a, b: a * b >> width, (width, width), width, is_signed)
        check_integer(f"min.{kind}", min, (width, width), width, is_signed)
        check_integer(f"max.{kind}", max, (width, width), width, is_signed)
        check_integer(f"mad.lo.{kind}", lambda a, b, c: a * b + c, (width,) * 3, width, is_signed)
        check_integer(f"mad.hi.{kind}", lambda a, b, c: (a * b >> width) + c, (width,) * 3, width, is_signed)
        check_integer(f"sad.{kind}", lambda a, b, c: abs(a - b) + c, (width,) * 3, width, is_signed)
        if width < 64:
            wide = 2 * width
            check_integer(f"mul.wide.{kind}", operator.mul, (width, width), wide, is_signed)
            check_integer(
                f"mad.wide.{kind}", lambda a, b, c: a * b + c, (width, width, wide), wide, is_signed
            )
        operands = integers(width, 200, 2, kind)
        operands[1] = [b or 1 for b in operands[1]]
        for name, function in (("div", trunc_div), ("rem", lambda a, b: a - trunc_div(a, b) * b)):
            values = [[to_signed(v, width) if is_signed else v for v in o] for o in operands]
            want = [function(a, b) & ((1 << width) - 1) for a, b in zip(*values, strict=True)]
            assert run(f"{name}.{kind}", *operands) == want
    check_integer(f"neg.s{width}", operator.neg, (width,), width, True)
    check_integer(f"abs.s{width}", abs, (width,), width, True)


def test_saturating_integer_arithmetic():
    check_integer("add.sat.s32", lambda a, b: clamp(a + b, 32), (32, 32), 32, True)
    check_integer("sub.sat.s32", lambda a, b: clamp(a - b, 32), (32, 32), 32, True)
    check_integer("mad.hi.sat.s32", lambda a, b, c: clamp((a * b >> 32) + c, 32), (32, 32, 32), 32, True)


def test_packed_integers():
    def halves(function, sign):
        def apply(a, b):
            parts = [(a >> s & 0xFFFF, b >> s & 0xFFFF) for s in (0, 16)]
            if sign:
                parts = [tuple(to_signed(v, 16) for v in p) for p in parts]
            low, high = (function(*p) & 0xFFFF for p in parts)
            return high << 16 | low

        return apply

    for kind, sign in (("s16x2", True), ("u16x2", False)):
        check_integer(f"add.{kind}", halves(operator.add, sign), (32, 32), 32)
        check_integer(f"min.{kind}", halves(min, sign), (32, 32), 32)
        check_integer(f"max.{kind}", halves(max, sign), (32, 32), 32)
    check_integer("max.relu.s16x2", halves(lambda a, b: max(a, b, 0), True), (32, 32), 32)
    check_integer("min.relu.s32", lambda a, b: max(min(a, b), 0), (32, 32), 32, True)


def test_carry_chains():
    """A 128-bit sum, difference and product built of 32-bit pieces."""
    rng = random.Random(1)
    for _ in range(50):
        a, b = rng.randrange(1 << 128), rng.choice([rng.randrange(1 << 128), (1 << 128) - 1, 0])
        for name, function in (("add", operator.add), ("sub", operator.sub)):
            total, carry = 0, None
            for piece in range(4):
                x, y = ([v >> 32 * piece & 0xFFFFFFFF] for v in (a, b))
                opcode = f"{name}.cc.u32" if piece == 0 else f"{name}c.cc.u32"
                form = form_of(opcode, 2)
                assert form.carry_out and form.carry_in == (piece > 0)
                arrays = [np.array(v, np.uint32) for v in (x, y)] + ([carry] if piece else [])
                value, carry = form.function(*arrays)
                total |= int(value[0]) << 32 * piece
            assert total == function(a, b) & ((1 << 128) - 1)
            assert bool(carry[0]) == (function(a, b) != total)
        x, y, z = (rng.randrange(1 << 32) for _ in range(3))
        low, carry = form_of("mad.lo.cc.u32", 3).function(*(np.array([v], np.uint32) for v in (x, y, z)))
        form = form_of("madc.hi.u32", 3)
        assert form.carry_in and not form.carry_out
        high = form.function(*(np.array([v], np.uint32) for v in (x, y, 0)), carry)
        assert int(high[0]) << 32 | int(low[0]) == x * y + z


def test_24_bit_products():
    def low24(value, signed):
        value &= 0xFFFFFF
        return value - (1 << 24) if signed and value >> 23 else value

    for sign in (False, True):
        kind = "s32" if sign else "u32"
        check_integer(f"mul24.lo.{kind}", lambda a, b, s=sign: low24(a, s) * low24(b, s), (32, 32), 32)
        check_integer(f"mul24.hi.{kind}", lambda a, b, s=sign: low24(a, s) * low24(b, s) >> 16, (32, 32), 32)
        check_integer(
            f"mad24.lo.{kind}", lambda a, b, c, s=sign: low24(a, s) * low24(b, s) + c, (32, 32, 32), 32
        )
    check_integer(
        "mad24.hi.sat.s32",
        lambda a, b, c: clamp((low24(a, True) * low24(b, True) >> 16) + c, 32),
        (32, 32, 32),
        32,
        signed=True,
    )


def test_dot_products():
    def part(word, bits, index, signed):
        value = word >> bits * index & ((1 << bits) - 1)
        return to_signed(value, bits) if signed else value

    for x in "us":
        for y in "us":
            sx, sy = x == "s", y == "s"
            check_integer(
                f"dp4a.{x}32.{y}32",
                lambda a, b, c, sx=sx, sy=sy: (
                    c + sum(part(a, 8, i, sx) * part(b, 8, i, sy) for i in range(4))
                ),
                (32, 32, 32),
                32,
            )
            for half, first in (("lo", 0), ("hi", 2)):
                check_integer(
                    f"dp2a.{half}.{x}32.{y}32",
                    lambda a, b, c, sx=sx, sy=sy, f=first: (
                        c + sum(part(a, 16, i, sx) * part(b, 8, f + i, sy) for i in range(2))
                    ),
                    (32, 32, 32),
                    32,
                )


@pytest.mark.parametrize("width", [32, 64])
def test_bit_counting(width):
    check_integer(f"popc.b{width}", lambda a: bin(a).count("1"), (width,), 32)
    check_integer(f"clz.b{width}", lambda a: width - a.bit_length(), (width,), 32)
    check_integer(f"brev.b{width}", lambda a: int(f"{a:0{width}b}"[::-1], 2), (width,), width)
    check_integer(f"bfind.u{width}", lambda a: a.bit_length() - 1, (width,), 32)
    check_integer(f"bfind.s{width}", lambda a: (~a if a < 0 else a).bit_length() - 1, (width,), 32, True)
    shift = lambda a: width - a.bit_length() if a else -1  # noqa: E731
    check_integer(f"bfind.shiftamt.u{width}", shift, (width,), 32)


@pytest.mark.parametrize("width", [32, 64])
def test_bit_fields(width):
    def bfe(a, start, length, signed):
        start, length = start & 255, length & 255
        sign = a >> min(start + length - 1, width - 1) & 1 if signed and length else 0
        bits = [a >> (start + i) & 1 if i < length and start + i < width else sign for i in range(width)]
        return sum(bit << i for i, bit in enumerate(bits))

    def bfi(a, b, start, length):
        start, length = start & 255, length & 255
        for i in range(length):
            if start + i < width:
                b = b & ~(1 << (start + i)) | (a >> i & 1) << (start + i)
        return b

    check_integer(f"bfe.u{width}", lambda a, s, n: bfe(a, s, n, False), (width, 32, 32), width)
    check_integer(f"bfe.s{width}", lambda a, s, n: bfe(a, s, n, True), (width, 32, 32), width)
    check_integer(f"bfi.b{width}", bfi, (width, width, 32, 32), width)


def test_extension_and_masks():
    def szext(a, b, mode, signed):
        if mode == "clamp" and b >= 32:
            return a
        n = b & 31
        value = a & ((1 << n) - 1)
        return value - (1 << n) if signed and n and value >> (n - 1) else value

    def bmsk(a, b, mode):
        if mode == "clamp" and a >= 32:
            return 0
        width = min(b, 32) if mode == "clamp" else b & 31
        return ((1 << width) - 1) << (a & 31)

    for mode in ("clamp", "wrap"):
        check_integer(f"szext.{mode}.u32", lambda a, b, m=mode: szext(a, b, m, False), (32, 32), 32)
        check_integer(f"szext.{mode}.s32", lambda a, b, m=mode: szext(a, b, m, True), (32, 32), 32)
        check_integer(f"bmsk.{mode}.b32", lambda a, b, m=mode: bmsk(a, b, m), (32, 32), 32)
    assert run("bmsk.wrap.b32", [1], [2]) == [6]


def test_fns():
    mask = 0b1011_0000_0000_0000_0000_0000_0010_0110
    assert run("fns.b32", [mask] * 6, [0, 2, 3, 31, 31, 0], [1, 0, 0, -1, -3, 9]) == [
        1,
        2,
        0xFFFFFFFF,
        31,
        28,
        0xFFFFFFFF,
    ]


def test_logic_and_lop3():
    check_integer("and.b64", operator.and_, (64, 64), 64)
    check_integer("xor.b16", operator.xor, (16, 16), 16)
    check_integer("not.b32", operator.invert, (32,), 32)
    check_integer("cnot.b32", lambda a: int(a == 0), (32,), 32)
    for function in (lambda a, b, c: a & b & c, lambda a, b, c: (a & b | c) ^ a, lambda a, b, c: a & b & ~c):
        table = function(0xF0, 0xCC, 0xAA) & 0xFF
        lanes = integers(32, 50, 3, "lop3")
        want = [function(*x) & 0xFFFFFFFF for x in zip(*lanes, strict=True)]
        assert run("lop3.b32", *lanes, [table] * 50) == want
    result, flag = run("lop3.or.b32", [1, 1], [2, 1], [0, 0], [0xC0, 0xC0], [False, False])
    assert (result, flag) == ([0, 1], [False, True])
    assert run("and.pred", [True, True], [True, False]) == [True, False]
    assert run("not.pred", [True, False]) == [False, True]


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts(width):
    check_integer(f"shl.b{width}", lambda a, n: a << n if n < 64 else 0, (width, 32), width)
    check_integer(f"shr.u{width}", lambda a, n: a >> n, (width, 32), width)
    lanes = integers(width, 200, 1, "shr") + integers(32, 200, 1, "n")
    want = [to_signed(a, width) >> min(n, 200) & ((1 << width) - 1) for a, n in zip(*lanes, strict=True)]
    assert run(f"shr.s{width}", *lanes) == want


def test_funnel_shifts():
    for mode, limit in (("clamp", lambda c: min(c, 32)), ("wrap", lambda c: c & 31)):
        check_integer(
            f"shf.l.{mode}.b32", lambda a, b, c, f=limit: ((b << 32 | a) << f(c)) >> 32, (32, 32, 32), 32
        )
        check_integer(f"shf.r.{mode}.b32", lambda a, b, c, f=limit: (b << 32 | a) >> f(c), (32, 32, 32), 32)


def test_prmt():
    a, b = 0x33221180, 0x77665544
    pool = [a >> 8 * i & 255 for i in range(4)] + [b >> 8 * i & 255 for i in range(4)]

    def generic(c):
        out = 0
        for i in range(4):
            nibble = c >> 4 * i & 15
            byte = pool[nibble & 7]
            out |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * i
        return out

    selectors = [0x3210, 0x7654, 0x8888, 0x5410, 0x0123, 0xF0A8]
    assert run("prmt.b32", [a] * 6, [b] * 6, selectors) == [generic(c) for c in selectors]
    modes = {
        "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
        "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
        "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
        "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
        "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
        "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
    }
    for mode, selectors in modes.items():
        want = [generic(c) for c in selectors]
        assert run(f"prmt.b32.{mode}", [a] * 4, [b] * 4, [0, 1, 2, 3]) == want
