"""cvt against exact rationals: every rounding mode, saturation, NaN, packing order, stochastic rounding."""

import itertools
import math
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
from helpers.exact_floats import BF16, F16, F32, F64

from warpspec.sim.conversions import convert_form
from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.families.convert import convert
from warpspec.sim.registry import row_of

FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
DTYPE = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
NAN32 = 0x7FC00000
# Magnitudes of the small formats by code, written out from the definition: sign | exponent | mantissa.
SMALL = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3)}
LARGEST = {"e4m3": 448, "e5m2": 57344, "e2m1": 6, "e2m3": 7.5, "e3m2": 28}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 7, "e2m3": 0x1F, "e3m2": 0x1F}
FIELD = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "e2m3": 8, "e3m2": 8}


def run(opcode, *operands):
    """The results of a cvt on lists of bit patterns."""
    form = convert_form(opcode, len(operands))
    arrays = [
        np.array([x & ((1 << bits) - 1) for x in o], DTYPE[bits])
        for o, bits in zip(operands, form.sources, strict=True)
    ]
    return form.function(*arrays).tolist()


def bits32(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def single(pattern):
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


def small_values(name):
    """The finite magnitudes of a small format, ascending by code."""
    exponent_bits, mantissa_bits, bias = SMALL[name]
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if exponent:
            mantissa += 1 << mantissa_bits
        values.append(mantissa * Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits))
    return [v for v in values if v <= LARGEST[name]]


def nearest_code(value, name):
    """The code of a small format nearest to a rational, ties to even, saturating."""
    values = small_values(name)
    sign_bit = 1 << (sum(SMALL[name][:2]))
    magnitude = min(abs(value), values[-1])
    best = min(range(len(values)), key=lambda c: (abs(values[c] - magnitude), c & 1))
    return best | (sign_bit if value < 0 else 0)


def floats(count, seed, spread=20):
    rng = random.Random(seed)
    picked = [bits32(rng.choice((-1, 1)) * 2.0 ** rng.uniform(-spread, spread)) for _ in range(count)]
    return picked + [rng.randrange(1 << 32) for _ in range(count)]


# -- floats among each other


def same(pattern, want, kind):
    got = FORMATS[kind].value(pattern)
    if isinstance(want, float) and math.isnan(want):
        return isinstance(got, float) and math.isnan(got)
    return float(got) == want and math.copysign(1, float(got)) == math.copysign(1, want)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("to", ["f16", "bf16", "f32"])
def test_narrowing(to, mode):
    fmt, source = FORMATS[to], "f64" if to == "f32" else "f32"
    if source == "f64":
        rng = random.Random(mode)
        sources = [
            struct.unpack("<Q", struct.pack("<d", rng.choice((-1, 1)) * 2.0 ** rng.uniform(-155, 130)))[0]
            for _ in range(400)
        ]
        sources += [0, 1 << 63, 1, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000]
    else:
        sources = [*floats(300, mode), *floats(100, mode, 127 if to == "bf16" else 26)]
        sources = [s & 0xFFFFFFFF for s in sources] + [0, 1 << 31, 1, 0x7F800000, 0xFF800000, NAN32]
    for pattern, got in zip(sources, run(f"cvt.{mode}.{to}.{source}", sources), strict=True):
        value = FORMATS[source].value(pattern)
        want = value if isinstance(value, float) else fmt.round(value, mode)
        if not isinstance(value, float) and want == 0:
            want = math.copysign(0.0, value) if value != 0 else 0.0
        assert same(got, want, to), (hex(pattern), hex(got))


def test_widening_is_exact():
    patterns = list(range(0, 1 << 16, 7))
    for kind in ("f16", "bf16"):
        for pattern, got in zip(patterns, run(f"cvt.f32.{kind}", patterns), strict=True):
            assert same(got, float(FORMATS[kind].value(pattern)), "f32")
        for pattern, got in zip(patterns, run(f"cvt.f64.{kind}", patterns), strict=True):
            assert same(got, float(FORMATS[kind].value(pattern)), "f64")
    assert run("cvt.ftz.f32.bf16", [0x0001, 0x8001]) == [0, 1 << 31]


def test_saturating_narrowing():
    big, inf, minus = bits32(1e38), 0x7F800000, bits32(-1e6)
    assert run("cvt.rn.satfinite.f16.f32", [big, inf, minus, NAN32]) == [0x7BFF, 0x7BFF, 0xFBFF, 0x7FFF]
    assert run("cvt.rn.f16.f32", [big, inf, minus]) == [0x7C00, 0x7C00, 0xFC00]
    assert run("cvt.rz.f16.f32", [big]) == [0x7BFF]
    assert run("cvt.rn.relu.bf16.f32", [minus, bits32(1.0), NAN32]) == [0, 0x3F80, 0x7FFF]
    assert run("cvt.sat.f32.f32", [minus, bits32(0.25), big, NAN32]) == [0, bits32(0.25), bits32(1), 0]
    assert run("cvt.rn.sat.f16.f32", [bits32(0.5), big]) == [0x3800, 0x3C00]


def test_rounding_to_integral_floats():
    values = [0.5, 1.5, 2.5, -0.5, -1.5, 2.3, -2.7, 1e30]
    sources = [bits32(v) for v in values]
    for rounding, function in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
        got = [single(x) for x in run(f"cvt.{rounding}.f32.f32", sources)]
        want = [
            math.copysign(float(function(v)), single(s)) for v, s in zip(values[:-1], sources, strict=False)
        ]
        assert got[:-1] == want
        assert [math.copysign(1, g) for g in got[:-1]] == [math.copysign(1, v) for v in values[:-1]]
        assert got[-1] == single(bits32(1e30))


def test_packing_puts_the_first_operand_above():
    one, minus_two = bits32(1.0), bits32(-2.0)
    assert run("cvt.rn.f16x2.f32", [one], [minus_two]) == [0x3C00C000]
    assert run("cvt.rz.bf16x2.f32", [one], [minus_two]) == [0x3F80C000]
    assert run("cvt.rn.relu.bf16x2.f32", [one], [minus_two]) == [0x3F800000]
    assert run("cvt.rn.satfinite.e2m1x2.f32", [one], [minus_two]) == [0x2C]
    assert run("cvt.rn.satfinite.e4m3x2.f32", [one], [minus_two]) == [0x38C0]
    assert run("cvt.rp.satfinite.ue8m0x2.f32", [one], [bits32(3.0)]) == [127 << 8 | 129]


# -- integers


@pytest.mark.parametrize("rounding", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_float_to_integer(to, rounding):
    width, signed = int(to[1:]), to[0] == "s"
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
    function = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[rounding]
    edges = [
        0.5,
        1.5,
        -0.5,
        -0.0,
        float(high),
        float(low),
        2.0**31,
        2.0**63,
        -(2.0**63),
        2.0**64,
        math.inf,
        -math.inf,
    ]
    for source, pattern_of in (
        ("f32", bits32),
        ("f64", lambda v: struct.unpack("<Q", struct.pack("<d", v))[0]),
    ):
        rng = random.Random(to + source)
        values = edges + [rng.choice((-1, 1)) * 2.0 ** rng.uniform(-3, 66) for _ in range(80)]
        patterns = [pattern_of(v) for v in values]
        for pattern, got in zip(patterns, run(f"cvt.{rounding}.{to}.{source}", patterns), strict=True):
            value = float(FORMATS[source].value(pattern))
            whole = function(value) if math.isfinite(value) else (high if value > 0 else low)
            assert got == min(max(whole, low), high) & ((1 << width) - 1), (to, value)
    half = run(f"cvt.{rounding}.{to}.f16", [0x4500, 0xC500, 0x7C00])  # 5, -5, inf
    assert half == [5, max(-5, low) & ((1 << width) - 1), high]


def test_nan_to_integer():
    assert run("cvt.rzi.s32.f32", [NAN32]) == [0]
    assert run("cvt.rzi.u16.f16", [0x7E00]) == [0]
    assert run("cvt.rzi.s64.f32", [NAN32]) == [1 << 63]
    assert run("cvt.rzi.u32.f64", [0x7FF8 << 48]) == [1 << 31]
    assert run("cvt.rzi.s16.f64", [0x7FF8 << 48]) == [1 << 15]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["s8", "u16", "s32", "u32", "s64", "u64"])
def test_integer_to_float(source, mode):
    width, signed = int(source[1:]), source[0] == "s"
    rng = random.Random(source + mode)
    patterns = [0, 1, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1]
    patterns += [rng.randrange(1 << width) >> rng.randrange(width) for _ in range(120)]
    if width == 64:  # ties of 24-bit significands, and one above and below them
        patterns += [(1 << 62) + (1 << 38) + d for d in (-1, 0, 1)] + [
            (3 << 61) + (3 << 37) + d for d in (-1, 0, 1)
        ]
    for to in ("f32", "f64", "f16", "bf16"):
        for pattern, got in zip(patterns, run(f"cvt.{mode}.{to}.{source}", patterns), strict=True):
            value = pattern - (1 << width) if signed and pattern >> (width - 1) else pattern
            assert same(got, FORMATS[to].round(Fraction(value), mode), to), (to, value)


def test_integer_to_integer():
    assert run("cvt.s64.s32", [0x80000000]) == [0xFFFFFFFF80000000]
    assert run("cvt.u64.u32", [0x80000000]) == [0x80000000]
    assert run("cvt.s8.s32", [0x1FF, 0x7F]) == [0xFF, 0x7F]
    assert run("cvt.sat.s8.s32", [0x1FF, 0x7F, 0xFFFFFF00]) == [0x7F, 0x7F, 0x80]
    assert run("cvt.sat.u8.s32", [0xFFFFFFFF, 300, 7]) == [0, 255, 7]
    assert run("cvt.sat.u32.s64", [(1 << 64) - 1, 1 << 40]) == [0, 0xFFFFFFFF]
    assert convert_form("cvt.s8.s32", 1).signed and not convert_form("cvt.u8.s32", 1).signed


@pytest.mark.parametrize(
    ("kind", "size"), [("s16", 16), ("u16", 16), ("u8", 8), ("s8", 8), ("u4", 4), ("s2", 2)]
)
def test_pack(kind, size):
    low, high = (-(1 << (size - 1)), (1 << (size - 1)) - 1) if kind[0] == "s" else (0, (1 << size) - 1)
    pairs = list(itertools.product([0, 1, 5, 70000, -1, -40000, -(1 << 31), (1 << 31) - 1], repeat=2))
    a, b = ([p[i] for p in pairs] for i in (0, 1))
    mask = (1 << size) - 1
    fields = [[min(max(v, low), high) & mask for v in x] for x in (a, b)]
    want = [x << size | y for x, y in zip(*fields, strict=True)]
    if size == 16:
        assert run(f"cvt.pack.sat.{kind}.s32", a, b) == want
    else:
        c = 0x89ABCDEF
        want = [(c << 2 * size | w) & 0xFFFFFFFF for w in want]
        assert run(f"cvt.pack.sat.{kind}.s32.b32", a, b, [c] * len(a)) == want


# -- tf32 and the small formats


def test_tf32():
    a = 0x3F800000
    ties = [a + 0x1000, a + 0x3000, a + 0x0FFF, a + 0x1001]  # a tie, a tie above an odd value, below, above
    assert run("cvt.rna.tf32.f32", ties) == [a + 0x2000, a + 0x4000, a, a + 0x2000]
    assert run("cvt.rn.tf32.f32", ties) == [a, a + 0x4000, a, a + 0x2000]
    assert run("cvt.rz.tf32.f32", ties) == [a, a + 0x2000, a, a]
    assert run("cvt.rn.relu.tf32.f32", [a | 1 << 31]) == [0]
    assert run("cvt.rna.satfinite.tf32.f32", [0x7F7FFFFF]) == [0x7F7FE000]


@pytest.mark.parametrize("name", list(SMALL))
def test_small_formats(name):
    field = FIELD[name]
    sources = [x for x in floats(200, name, 10) if not math.isnan(single(x))]
    values = small_values(name)
    ties = [bits32(float((a + b) / 2)) for a, b in itertools.pairwise(values)]
    sources += ties + [t ^ 1 << 31 for t in ties] + [0, 1 << 31, 0x7F800000, 0xFF800000]
    upper, lower = sources, sources[::-1]
    got = run(f"cvt.rn.satfinite.{name}x2.f32", upper, lower)

    def code(pattern):
        value = single(pattern)
        if math.isinf(value):
            return nearest_code(Fraction(10) ** 9 * (1 if value > 0 else -1), name)
        sign = 1 << sum(SMALL[name][:2]) if pattern >> 31 else 0
        return nearest_code(abs(Fraction(value)), name) | sign

    codes = [code(pattern) for pattern in sources]
    want = [a << field | b for a, b in zip(codes, codes[::-1], strict=True)]
    assert got == want
    nan = NAN_CODE[name]
    assert run(f"cvt.rn.satfinite.{name}x2.f32", [NAN32], [0xFFC00000]) == [nan << field | nan]
    relu = run(f"cvt.rn.satfinite.relu.{name}x2.f32", [bits32(-3.0)], [bits32(1.0)])
    assert relu == [nearest_code(Fraction(1), name)]


@pytest.mark.parametrize("name", list(SMALL))
def test_small_formats_back_and_forth_with_halves(name):
    field, values = FIELD[name], small_values(name)
    sign = 1 << sum(SMALL[name][:2])
    codes = list(range(len(values))) + [c | sign for c in range(len(values))]
    words = [c << field | codes[-1 - i] for i, c in enumerate(codes)]
    halves = run(f"cvt.rn.f16x2.{name}x2", words)
    for word, pair in zip(words, halves, strict=True):
        for shift, half in ((field, pair >> 16), (0, pair & 0xFFFF)):
            code = word >> shift & ((1 << field) - 1)
            value = float(values[code & (sign - 1)]) * (-1 if code & sign else 1)
            assert same(half, value, "f16")
    assert run(f"cvt.rn.satfinite.{name}x2.f16x2", halves) == words
    assert run(f"cvt.rn.satfinite.{name}x2.f16x2", [0x7E007C00]) == [
        NAN_CODE[name] << field | len(values) - 1
    ]
    assert run(f"cvt.rn.satfinite.{name}x2.bf16x2", [0x3F80BF80]) == [
        nearest_code(Fraction(1), name) << field | nearest_code(Fraction(-1), name)
    ]


def test_ue8m0():
    ones = [bits32(x) for x in (1.0, 1.5, 2.0, 0.75, 2.0**-127, 2.0**-149, 0.0, 3e38)]
    assert run("cvt.rz.ue8m0x2.f32", [0] * 8, ones) == [127, 127, 128, 126, 0, 0, 0, 254]
    assert run("cvt.rp.satfinite.ue8m0x2.f32", [0] * 8, ones) == [127, 128, 128, 127, 0, 0, 0, 254]
    assert run("cvt.rp.ue8m0x2.f32", [NAN32], [bits32(-4.0)]) == [0xFF << 8 | 129]
    assert run("cvt.rz.ue8m0x2.bf16x2", [0x3F804000]) == [127 << 8 | 128]
    assert run("cvt.rn.bf16x2.ue8m0x2", [127 << 8 | 130]) == [0x3F804100]
    assert run("cvt.rn.bf16x2.ue8m0x2", [0xFF << 8]) == [0x7FFF << 16 | 0x0040]  # NaN and 2**-127


# -- stochastic rounding


def test_stochastic_halves():
    """A value k/8192 above an f16 number goes up for exactly k of the 8192 random numbers."""
    one = 0x3F800000
    for k in (0, 1, 4096, 8191):
        random_numbers = list(range(1 << 13))
        got = run("cvt.rs.f16x2.f32", [one] * 8192, [one + k] * 8192, random_numbers)
        assert sum(x & 0xFFFF == 0x3C01 for x in got) == k
        assert {x & 0xFFFF for x in got} <= {0x3C00, 0x3C01}
        assert {x >> 16 for x in got} == {0x3C00}
    # The random bits of a are the 13 low ones of the upper half; 3 more above them play no part.
    assert run("cvt.rs.f16x2.f32", [one + 1], [one], [0x1FFF0000]) == [0x3C013C00]
    assert run("cvt.rs.f16x2.f32", [one + 1], [one], [0xE0000000]) == [0x3C003C00]
    assert run("cvt.rs.bf16x2.f32", [one + 1], [one | 1 << 31], [0xFFFFFFFF]) == [0x3F81BF80]
    assert run("cvt.rs.satfinite.bf16x2.f32", [0x7F7FFFFF], [NAN32], [0xFFFFFFFF]) == [0x7F7F7FFF]
    assert run("cvt.rs.bf16x2.f32", [0x7F7FFFFF], [0x7F800000], [0xFFFFFFFF]) == [0x7F807F80]
    assert run("cvt.rs.relu.f16x2.f32", [one | 1 << 31], [one], [0]) == [0x00003C00]


def test_stochastic_small_formats():
    one, negative = bits32(1.25), bits32(-1.25)  # halfway between e2m1's 1 and 1.5
    operands = ([one], [negative], [one], [negative])
    assert run("cvt.rs.satfinite.e2m1x4.f32", *operands, [0]) == [0x2A2A]
    assert run("cvt.rs.satfinite.e2m1x4.f32", *operands, [0xFFFFFFFF]) == [0x3B3B]
    # a, b take the upper byte of each half of rbits, e, f the lower byte.
    assert run("cvt.rs.satfinite.e2m1x4.f32", *operands, [0xFF00FF00]) == [0x3B2A]
    assert run("cvt.rs.satfinite.e2m1x4.f32", *operands, [0x00FF00FF]) == [0x2A3B]
    eights = ([bits32(1.0625)],) * 4  # halfway between e4m3's 1 and 1.125
    assert run("cvt.rs.satfinite.e4m3x4.f32", *eights, [0xFFFF0000]) == [0x39393838]
    assert run("cvt.rs.satfinite.e4m3x4.f32", *eights, [0x0000FFFF]) == [0x38383939]
    assert run("cvt.rs.satfinite.e5m2x4.f32", [bits32(1e9)], [bits32(-1e9)], [NAN32], [0], [0]) == [
        0x7BFB7F00
    ]
    # Subnormals: 1.5 times the smallest e5m2 number; 3/4 of the smallest goes to it or to zero.
    tiny = bits32(1.5 * 2.0**-16)
    assert run("cvt.rs.satfinite.e5m2x4.f32", [tiny], [tiny], [tiny], [tiny], [0x80007FFF]) == [0x02020101]
    less = bits32(0.75 * 2.0**-16)
    assert run("cvt.rs.satfinite.e5m2x4.f32", [less], [less], [less], [less], [0x40003FFF]) == [0x01010000]


def halves(words):
    """bf16x2 words as (upper, lower) numbers."""
    return [tuple(BF16.value(word >> shift & 0xFFFF) for shift in (16, 0)) for word in words]


def test_fixed_point_bytes_with_a_scale_of_64_are_integers():
    bytes_ = range(256)
    words = run(
        "cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.s2f6x2", [b << 8 | 255 - b for b in bytes_], [0x8585] * 256
    )
    wanted = [b - 256 if b > 127 else b for b in bytes_]
    assert halves(words) == [(wanted[b], wanted[255 - b]) for b in bytes_]


def test_scales_are_by_element():
    opcode = "cvt.rn.scaled::n2::ue8m0.bf16x2.{}x2"
    assert halves(run(opcode.format("s2f6"), [0x40C0], [0x7E80])) == [(0.5, -2)]
    assert halves(run(opcode.format("e4m3"), [0x3840], [0x8180])) == [(4, 4)]  # 1 * 4, 2 * 2
    assert halves(run(opcode.format("e2m1"), [0x7F], [0x807F])) == [(12, -6)]
    assert halves(run("cvt.rn.relu.scaled::n2::ue8m0.bf16x2.s2f6x2", [0x40C0], [0x7F7F])) == [(1, 0)]
    assert halves(run("cvt.rn.bf16x2.s2f6x2", [0x7F80])) == [(127 / 64, -2)]
    (word,) = run(opcode.format("s2f6"), [0x4040], [0xFF7F])
    assert word >> 16 & 0x7FFF > 0x7F80 and word & 0xFFFF == 0x3F80  # a scale of NaN


def test_unknown_forms_raise():
    for opcode in ("cvt.rn.e4m3.f32", "cvt.rn.satfinite.s2f6x2.f32", "cvt.s32.f32", "cvt.rn.f16x2.f64"):
        with pytest.raises(UnsupportedInstruction):
            convert_form(opcode, 2)
    assert row_of("cvt.rn.satfinite.e2m1x2.f32").handler is convert
