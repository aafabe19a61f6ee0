"""Arithmetic against exact rationals and plain Python integers: rounding modes, saturation, NaN, edges."""

import math
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
from helpers.alu_forms import run
from helpers.exact_floats import BF16, F16, F32, F64

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.families.alu import arithmetic, bools, form_of, mask_of
from warpspec.sim.registry import row_of

FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
MODES = ("rn", "rz", "rm", "rp")


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
        "normal": [True, False, True, False, False],  # zeros count as normal
        "subnormal": [False, True, False, False, False],
    }
    for test, results in want.items():
        assert run(f"testp.{test}.f32", values) == results
    assert run("testp.subnormal.f64", [1, 0x3FF0000000000000]) == [True, False]


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
    assert row_of("add.rz.ftz.f32").handler is arithmetic
