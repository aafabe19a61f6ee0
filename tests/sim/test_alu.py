"""Arithmetic against exact rationals and plain Python integers: rounding modes, saturation, NaN, edges."""

import math
import operator
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
from exact_floats import BF16, F16, F32, F64

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.families.alu import bools, form_of, mask_of
from warpspec.sim.registry import handler_for

FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
DTYPE = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
MODES = ("rn", "rz", "rm", "rp")
INTS = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000]
INTS += [
    0xFFFFFFFF,
    0xDEADBEEF,
    0x7FFFFFFFFFFFFFFF,
    0x8000000000000000,
    0xFFFFFFFFFFFFFFFF,
    0x123456789ABCDEF0,
]


def run(opcode, *operands):
    """The result(s) of an opcode on lists of bit patterns (bools for predicates)."""
    form = form_of(opcode, len(operands))
    arrays = [
        np.array(o, bool) if bits == 1 else np.array([x & ((1 << bits) - 1) for x in o], DTYPE[bits])
        for o, bits in zip(operands, form.sources, strict=True)
    ]
    result = form.function(*arrays)
    return tuple(r.tolist() for r in result) if isinstance(result, tuple) else result.tolist()


def patterns(kind, count, seed):
    """Random bit patterns of a float type, and its edges."""
    fmt = FORMATS[kind]
    rng = random.Random(seed)
    exponent_one = 1 << (fmt.precision - 1)
    one = (1 << (fmt.bits - fmt.precision - 1)) - 1 << (fmt.precision - 1)
    edges = [0, 1, 2, exponent_one - 1, exponent_one, exponent_one + 1, one, one + 1, one - 1]
    infinity = ((1 << (fmt.bits - fmt.precision)) - 1) << (fmt.precision - 1)
    edges += [infinity, infinity - 1, infinity + 1]
    edges += [e | 1 << (fmt.bits - 1) for e in edges]
    near = [one + rng.randrange(-(1 << fmt.precision), 1 << fmt.precision) for _ in range(count // 2)]
    near = [p ^ (rng.randrange(2) << (fmt.bits - 1)) for p in near]
    return edges + near + [rng.randrange(1 << fmt.bits) for _ in range(count // 2)]


def pairs(kind, count, operands, seed=0):
    """Lists of operands: every edge against every edge, then random ones."""
    rng = random.Random(seed)
    pool = patterns(kind, count, seed)
    return [rng.choices(pool, k=count) for _ in range(operands)]


def number(pattern, kind):
    """A float (exact) for comparison: NaN as 'nan', zeros with their sign."""
    value = FORMATS[kind].value(pattern)
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    return float(value)


def same(got, want):
    return got == want and (got == "nan" or math.copysign(1, got) == math.copysign(1, want))


def expected(kind, mode, operation, operands, ftz=False):
    """The correctly rounded result of one lane."""
    fmt = FORMATS[kind]
    values = [fmt.value(p) for p in operands]
    floats = [float(v) for v in values]
    if ftz:
        floats = [math.copysign(0.0, f) if abs(f) < 2.0**fmt.min_exponent else f for f in floats]
        values = [Fraction(f) if math.isfinite(f) else f for f in floats]
    if all(map(math.isfinite, floats)) and not (operation in ("div", "rcp") and floats[-1] == 0):
        exact = _exact(operation, floats, fmt, mode)
        if exact is not None:
            if ftz and isinstance(exact, float) and abs(exact) < 2.0**fmt.min_exponent:
                return math.copysign(0.0, exact)
            return exact
        if operation == "sqrt":
            return "nan"
    with np.errstate(all="ignore"):
        wide = [np.float64(f) for f in floats]
        result = {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul": lambda a, b: a * b,
            "fma": lambda a, b, c: a * b + c,
            "div": lambda a, b: a / b,
            "rcp": lambda a: np.float64(1) / a,
            "sqrt": lambda a: np.sqrt(a),
        }[operation](*wide)
    return "nan" if np.isnan(result) else float(result)


def _exact(operation, floats, fmt, mode):
    a = Fraction(floats[0])
    b = Fraction(floats[1]) if len(floats) > 1 else None
    if operation == "sqrt":
        if floats[0] == 0:
            return floats[0]
        if a < 0:
            return None
        return _round_root(a, fmt, mode)
    value = {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul": lambda: a * b,
        "fma": lambda: a * b + Fraction(floats[2]),
        "div": lambda: a / b,
        "rcp": lambda: 1 / a,
    }[operation]()
    if value != 0:
        return fmt.round(value, mode)
    if operation in ("mul", "div"):
        return math.copysign(0.0, math.copysign(1, floats[0]) * math.copysign(1, floats[1]))
    terms = {"add": floats, "sub": [floats[0], -floats[1]]}.get(operation)
    if operation == "fma":
        terms = [math.copysign(1, floats[0]) * math.copysign(1, floats[1]), floats[2]]
    signs = {math.copysign(1, t) for t in terms}
    if len(signs) == 1:
        return math.copysign(0.0, signs.pop())
    return -0.0 if mode == "rm" else 0.0


def _round_root(a, fmt, mode):
    """sqrt to the format: bracket the root between neighbours, then decide by squaring."""
    scale = Fraction(2) ** 400
    root = Fraction(math.isqrt(int(a * scale * scale * Fraction(2) ** 2000)), 1) / (
        scale * Fraction(2) ** 1000
    )
    if root * root == a:
        return fmt.round(root, mode)
    return fmt.round(root + Fraction(1, 2**1500), mode)


ROUNDED = [(op, kind) for kind in ("f32", "f64") for op in ("add", "sub", "mul", "fma", "div", "rcp", "sqrt")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("operation", "kind"), ROUNDED)
def test_rounded_arithmetic(operation, kind, mode):
    operands = {"fma": 3, "rcp": 1, "sqrt": 1}.get(operation, 2)
    count = 400 if kind == "f32" else 120
    lanes = pairs(kind, count, operands, seed=operation + mode)
    got = run(f"{operation}.{mode}.{kind}", *lanes)
    for lane in zip(got, *lanes, strict=True):
        want = expected(kind, mode, operation, lane[1:])
        assert same(number(lane[0], kind), want), [hex(x) for x in lane]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", ["add", "mul", "fma"])
def test_flush_to_zero(operation, mode):
    lanes = pairs("f32", 300, 3 if operation == "fma" else 2, seed="ftz" + mode)
    got = run(f"{operation}.{mode}.ftz.f32", *lanes)
    for lane in zip(got, *lanes, strict=True):
        want = expected("f32", mode, operation, lane[1:], ftz=True)
        assert same(number(lane[0], "f32"), want), [hex(x) for x in lane]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
def test_half_arithmetic(operation, kind):
    lanes = pairs(kind, 500, 3 if operation == "fma" else 2, seed=operation + kind)
    got = run(f"{operation}.rn.{kind}", *lanes)
    for lane in zip(got, *lanes, strict=True):
        assert same(number(lane[0], kind), expected(kind, "rn", operation, lane[1:])), [hex(x) for x in lane]


def test_double_rounding_does_not_happen():
    # Just above a tie of f16: rounding in a wider format first would land on the tie.
    one, big, tiny = 0x3C00, 0x2C00, 0x0001  # 1, 2**-4, 2**-24
    half_ulp = 0x1800  # 2**-9; 2**-4 * 2**-7 is 2**-11
    assert run("fma.rn.f16", [big], [0x2000], [one]) == [one]  # 2**-4 * 2**-7: the tie goes to even
    assert run("fma.rn.f16", [0x2C01], [0x2000], [one]) == [one + 1]
    assert run("add.rn.f16", [one], [half_ulp]) == [one + 2]
    # f32: 1 + (2**-24 + 2**-149): above the tie by 2**-149, beyond the last bit of a float64.
    bits = lambda x: struct.unpack("<I", struct.pack("<f", x))[0]  # noqa: E731
    a, b = 1 + 2.0**-23, 2.0**-24
    assert run("fma.rn.f32", [bits(2.0**-75)], [bits(2.0**-74)], [bits(1.0)]) == [bits(1.0)]
    assert run("fma.rp.f32", [bits(2.0**-75)], [bits(2.0**-74)], [bits(1.0)]) == [bits(a)]
    assert run("fma.rm.f32", [bits(-(2.0**-75))], [bits(2.0**-74)], [bits(1.0)]) == [bits(1 - b)]
    assert tiny == 1


def test_results_are_canonical_nan():
    assert run("add.rn.f32", [0x7F800000, 0x7FC12345], [0xFF800000, 0]) == [0x7FFFFFFF] * 2
    assert run("mul.f16", [0x7C00], [0]) == [0x7FFF]
    assert run("fma.rn.bf16", [0x7F80], [0], [0]) == [0x7FFF]
    assert run("min.f32", [0x7FC00001], [0xFFC00001]) == [0x7FFFFFFF]


def test_saturation():
    inf, nan, two, minus, half = 0x7F800000, 0x7FC00000, 0x40000000, 0xBF800000, 0x3F000000
    zero = [0] * 5
    assert run("add.sat.f32", [inf, nan, two, minus, half], zero) == [0x3F800000, 0, 0x3F800000, 0, half]
    assert run("add.sat.f16", [0x7C00, 0x7E00, 0x4000, 0xBC00, 0x3800], zero) == [
        0x3C00,
        0,
        0x3C00,
        0,
        0x3800,
    ]
    assert run("fma.rn.relu.f16", [0xBC00, 0x7E00, 0x3C00], [0x3C00] * 3, [0] * 3) == [0, 0x7FFF, 0x3C00]
    assert run("fma.rn.relu.bf16x2", [0xBF803F80], [0x3F803F80], [0]) == [0x00003F80]


def test_packed_operations_are_two_scalars():
    rng = random.Random(5)
    words = [[rng.randrange(1 << 64) for _ in range(50)] for _ in range(3)]
    low, high = ([[x >> s & 0xFFFFFFFF for x in w] for w in words] for s in (0, 32))
    for opcode in ("fma.rn.f32x2", "fma.rm.ftz.f32x2"):
        scalar = opcode.replace("f32x2", "f32")
        want = [high << 32 | low for low, high in zip(run(scalar, *low), run(scalar, *high), strict=True)]
        assert run(opcode, *words) == want
    for kind in ("f16", "bf16"):
        a, b = ([x & 0xFFFFFFFF for x in w] for w in words[:2])
        parts = [([x >> s & 0xFFFF for x in a], [x >> s & 0xFFFF for x in b]) for s in (0, 16)]
        want = [high << 16 | low for low, high in zip(*(run(f"mul.{kind}", *p) for p in parts), strict=True)]
        assert run(f"mul.{kind}x2", a, b) == want


def test_mixed_precision():
    # bf16 a * b + f32 c, rounded once
    got = run("fma.rn.f32.bf16", [0x3F81], [0x3F81], [0x33800000])
    exact = (1 + Fraction(1, 128)) ** 2 + Fraction(1, 2**24)
    assert number(got[0], "f32") == F32.round(exact, "rn")
    got = run("add.rz.f32.f16", [0x3C01], [0xB3800000])
    assert number(got[0], "f32") == F32.round(1 + Fraction(1, 1024) - Fraction(1, 2**24), "rz")
    got = run("sub.f32.f16", [0x3C00], [0x40000000])
    assert number(got[0], "f32") == -1.0


@pytest.mark.parametrize(
    ("opcode", "function", "low", "high"),
    [
        ("ex2.approx.f32", lambda x: 2.0**x, -120, 120),
        ("lg2.approx.f32", math.log2, 1e-30, 1e30),
        ("rcp.approx.ftz.f32", lambda x: 1 / x, 1e-30, 1e30),
        ("rsqrt.approx.f32", lambda x: x**-0.5, 1e-30, 1e30),
        ("sqrt.approx.f32", math.sqrt, 0, 1e30),
        ("tanh.approx.f32", math.tanh, -9, 9),
        ("sin.approx.f32", math.sin, -3, 3),
        ("cos.approx.f32", math.cos, -3, 3),
    ],
)
def test_approximations(opcode, function, low, high):
    rng = random.Random(opcode)
    values = [struct.unpack("<f", struct.pack("<f", rng.uniform(low, high)))[0] for _ in range(100)]
    bits = [struct.unpack("<I", struct.pack("<f", v))[0] for v in values]
    for got, v in zip(run(opcode, bits), values, strict=True):
        assert number(got, "f32") == pytest.approx(function(v), rel=2**-22, abs=2**-24)


def test_half_exponential_and_tanh():
    assert run("ex2.approx.f16", [0x3C00, 0xFC00, 0x7C00]) == [0x4000, 0, 0x7C00]
    assert run("ex2.approx.ftz.bf16x2", [0x3F80BF80]) == [0x40003F00]
    assert run("tanh.approx.bf16", [0x7F80, 0x8000]) == [0x3F80, 0x8000]


def test_minimum_and_maximum():
    nan, one, two, zero, minus_zero = 0x7FC00000, 0x3F800000, 0x40000000, 0, 0x80000000
    assert run("min.f32", [nan, one, zero, two], [one, nan, minus_zero, one]) == [one, one, minus_zero, one]
    assert run("max.f32", [minus_zero, zero, one], [zero, minus_zero, two]) == [zero, zero, two]
    assert run("max.NaN.f32", [nan, one], [one, two]) == [0x7FFFFFFF, two]
    assert run("max.f32", [one], [nan], [two]) == [two]
    assert run("min.xorsign.abs.f32", [0xC0000000], [one]) == [0xBF800000]
    assert run("min.xorsign.abs.f16x2", [0xC000C000], [0x3C00BC00]) == [0xBC003C00]
    assert run("max.relu.bf16x2", [0xBF80BF80], [0xC0003F80]) == [0x00003F80]
    assert run("max.ftz.f32", [1], [minus_zero]) == [zero]


def test_sign_operations():
    assert run("neg.ftz.f32", [1, 0x3F800000]) == [0x80000000, 0xBF800000]
    assert run("abs.f16x2", [0xBC008001]) == [0x3C000001]
    assert run("copysign.f32", [0x80000000], [0x3F800000]) == [0xBF800000]


def test_testp():
    values = [0, 1, 0x3F800000, 0x7F800000, 0xFF800001]
    want = {
        "finite": [True, True, True, False, False],
        "infinite": [False, False, False, True, False],
        "number": [True, True, True, True, False],
        "notanumber": [False, False, False, False, True],
        "normal": [False, False, True, False, False],
        "subnormal": [False, True, False, False, False],
    }
    for test, results in want.items():
        assert run(f"testp.{test}.f32", values) == results
    assert run("testp.subnormal.f64", [1, 0x3FF0000000000000]) == [True, False]


# -- integers


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


# -- comparison and selection


def test_setp():
    nan, one, two = 0x7FC00000, 0x3F800000, 0x40000000
    a, b = [one, two, nan], [two, one, one]
    assert run("setp.lt.f32", a, b) == ([True, False, False], [False, True, True])
    assert run("setp.ltu.f32", a, b)[0] == [True, False, True]
    assert run("setp.nan.f32", a, b)[0] == [False, False, True]
    assert run("setp.ne.f32", a, b)[0] == [True, True, False]
    assert run("setp.gt.and.s32", [1, 1, -1], [0, 0, 0], [True, False, True]) == (
        [True, False, False],
        [False, False, True],
    )
    assert run("setp.hi.u64", [1 << 63], [1])[0] == [True]
    assert run("setp.lt.s64", [1 << 63], [1])[0] == [True]
    assert run("setp.lt.or.f16x2", [0x3C004000], [0x40003C00], [False]) == ([False], [True])
    assert run("setp.eq.ftz.f32", [1], [0x80000000])[0] == [True]


def test_set_and_selections():
    assert run("set.lt.u32.f32", [0x3F800000, 0x40000000], [0x40000000] * 2) == [0xFFFFFFFF, 0]
    assert run("set.ge.f32.s32", [5, -5], [0, 0]) == [0x3F800000, 0]
    assert run("set.lt.f16x2.f16x2", [0x3C004000], [0x40003C00]) == [0x3C000000]
    assert run("set.eq.u16.bf16", [0x3F80], [0x3F80]) == [0xFFFF]
    assert run("set.lt.xor.u32.bf16x2", [0x3F804000], [0x40003F80], [True]) == [0x0000FFFF]
    assert run("selp.b64", [1, 2], [3, 4], [True, False]) == [1, 4]
    assert run("slct.u32.s32", [1, 2], [3, 4], [0, -1]) == [1, 4]
    assert run("slct.f32.f32", [1, 2], [3, 4], [0x80000000, 0x7FC00000]) == [1, 4]


def test_unknown_forms_raise():
    for opcode in ("add.e4m3", "rcp.f16", "sin.approx.f16x2", "popc.f32"):
        with pytest.raises(UnsupportedInstruction):
            form_of(opcode, 2)


def test_lane_masks():
    assert mask_of(bools(0x80000001)) == 0x80000001
    assert handler_for("add.rz.ftz.f32").family == "alu"
