"""Number formats against values worked out one code at a time with fractions, and against torch."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from warpspec.sim import formats
from warpspec.sim.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, FORMATS, TF32, UE4M3, UE8M0

SMALL_FLOATS = [E2M1, E2M3, E3M2, E4M3, E5M2]


def code_value(fmt, magnitude):
    """Exact value of a non-negative finite code from the format's definition."""
    exponent, mantissa = divmod(magnitude, 1 << fmt.mantissa_bits)
    scale = Fraction(2) ** (max(exponent, 1) - fmt.bias)
    return scale * (Fraction(mantissa, 1 << fmt.mantissa_bits) + (1 if exponent else 0))


def nearest_even(fmt, x):
    """satfinite rn of a positive finite fraction, by looking at every code."""
    codes = range(fmt.max_code + 1)
    best = min(codes, key=lambda c: (abs(code_value(fmt, c) - x), c & 1))
    return best


def test_known_values():
    e2m1 = formats.table(E2M1)
    assert e2m1[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert np.array_equal(e2m1[8:16], -e2m1[:8]) and np.signbit(e2m1[8])
    assert formats.table(E4M3)[0x7E] == 448 and np.isnan(formats.table(E4M3)[[0x7F, 0xFF]]).all()
    assert formats.table(E5M2)[0x7B] == 57344 and formats.table(E5M2)[0xFC] == -np.inf
    assert formats.table(E2M3)[0x1F] == 7.5 and formats.table(E3M2)[0x1F] == 28
    assert formats.table(UE8M0)[[0, 127, 254]].tolist() == [2.0**-127, 1, 2.0**127]
    assert np.isnan(formats.table(UE8M0)[255])
    assert formats.table(UE4M3)[0xFE] == 448, "the sign bit of ue4m3 is ignored"


@pytest.mark.parametrize("fmt, dtype", [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_fp8_tables_equal_torch(fmt, dtype):
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(formats.table(fmt), expected)


@pytest.mark.parametrize("fmt", SMALL_FLOATS, ids=lambda f: f.name)
def test_rn_satfinite_at_and_around_every_midpoint(fmt):
    values = [code_value(fmt, c) for c in range(fmt.max_code + 1)]
    points = list(values)
    for low, high in itertools.pairwise(values):
        middle = np.float32((low + high) / 2)
        points += [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    top = np.float32(values[-1])
    points += [top * np.float32(1.01), top * np.float32(1000), np.float32(1e-45), np.float32(1e-38)]
    x = np.array([float(p) for p in points], np.float32)
    expected = [nearest_even(fmt, Fraction(float(v))) for v in x]
    assert formats.encode(x, fmt, satfinite=True).tolist() == expected
    sign = 1 << fmt.sign_shift
    assert formats.encode(-x, fmt, satfinite=True).tolist() == [c | sign for c in expected]
    assert formats.encode(-x, fmt, satfinite=True, relu=True).tolist() == [0] * len(x)


@pytest.mark.parametrize("fmt", [E2M1, E2M3, E3M2, E4M3, E5M2, UE4M3, UE8M0], ids=lambda f: f.name)
def test_every_small_code_survives_a_round_trip(fmt):
    codes = np.arange(1 << fmt.bits)
    values = formats.decode(codes, fmt)
    rounding = "rz" if fmt is UE8M0 else "rn"
    back = formats.encode(values, fmt, rounding)
    keep = ~np.isnan(values)
    np.testing.assert_array_equal(back[keep], codes[keep])
    assert (back[~keep] == fmt.nan_code).all()


NAN_CODES = [(E4M3, 0x7F), (E5M2, 0x7F), (E2M1, 7), (E2M3, 0x1F), (E3M2, 0x1F), (UE8M0, 0xFF)]


@pytest.mark.parametrize("fmt, nan", NAN_CODES)
def test_nan_and_infinity_with_satfinite(fmt, nan):
    rounding = "rp" if fmt is UE8M0 else "rn"
    x = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    got = formats.encode(x, fmt, rounding, satfinite=True).tolist()
    sign = (1 << fmt.sign_shift) if fmt.signed else 0
    assert got == [nan, nan, fmt.max_code, fmt.max_code | sign]


def random_floats(seed, n=100_000):
    bits = np.random.default_rng(seed).integers(0, 1 << 32, n, dtype=np.uint32)
    edges = [0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x477FEFFF, 0x477FF000]
    edges = np.array([*edges, 0x33000000, 0x33000001, 0x7F7F7FFF, 0x7F7F8000], np.uint32)
    x = np.concatenate([bits, edges]).view(np.float32)
    near_half = np.random.default_rng(seed + 1).normal(0, 1e-5, n).astype(np.float32)
    return np.concatenate([x, near_half, near_half * np.float32(1e9)])


@pytest.mark.parametrize("fmt, dtype", [(F16, torch.float16), (BF16, torch.bfloat16)])
def test_sixteen_bit_rn_equals_torch(fmt, dtype):
    x = random_floats(3)
    x = x[~np.isnan(x)]
    expected = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(formats.encode(x, fmt), expected)
    every = np.arange(1 << 16, dtype=np.uint16)
    decoded = torch.from_numpy(every.view(np.int16)).view(dtype).float().numpy()
    np.testing.assert_array_equal(formats.decode(every, fmt), decoded)


@pytest.mark.parametrize("fmt", [F16, BF16, TF32, E5M2], ids=lambda f: f.name)
def test_directed_roundings_bracket_the_value(fmt):
    x = random_floats(5, 20_000)
    x = x[np.isfinite(x)]
    down, up = (formats.decode(formats.encode(x, fmt, r), fmt) for r in ("rm", "rp"))
    zero, near = (formats.decode(formats.encode(x, fmt, r), fmt) for r in ("rz", "rn"))
    assert (down <= x).all() and (up >= x).all()
    np.testing.assert_array_equal(zero, np.where(x < 0, up, down))
    exact = down == up
    np.testing.assert_array_equal(near[exact], x[exact])
    assert ((near == down) | (near == up)).all()
    apart = formats.encode(up[~exact], fmt).astype(int) - formats.encode(down[~exact], fmt).astype(int)
    same_sign = (up[~exact] > 0) == (down[~exact] >= 0)
    assert (np.abs(apart[same_sign & (up[~exact] != 0) & (down[~exact] != 0)]) == 1).all()


def test_ue8m0_rounds_up_and_down():
    x = np.array([1, 1.0000001, 1.99, 2, 2.0**-127, 2.0**-126, 2.0**-126.5, 0, 1e-45, 3e38], np.float32)
    assert formats.encode(x, UE8M0, "rz", True).tolist() == [127, 127, 127, 128, 0, 1, 0, 0, 0, 254]
    assert formats.encode(x, UE8M0, "rp", True).tolist() == [127, 128, 128, 128, 0, 1, 1, 0, 0, 254]


def test_tf32_truncates_operands_and_rounds_in_cvt():
    bits = np.array([0x3F801FFF, 0x3F801000, 0x3F803000, 0x3F800FFF, 0xFF800000], np.uint32)
    low, middle, high, infinity = 0x3F800000, 0x3F802000, 0x3F804000, 0xFF800000
    assert formats.round_tf32(bits).tolist() == [low, low, middle, low, infinity]
    assert formats.round_tf32(bits, "rn").tolist() == [middle, low, high, low, infinity]
    assert formats.round_tf32(bits, "rna").tolist() == [middle, middle, high, low, infinity]
    assert formats.round_tf32(bits, "rn", relu=True)[4] == 0
    assert formats.round_tf32(bits, "rz", satfinite=True)[4] == 0xFF7FE000


def test_unpacking_is_low_bits_first():
    assert formats.unpack_nibbles(np.array([[0x21, 0x43]], np.uint8)).tolist() == [[1, 2, 3, 4]]
    word = (1 | 2 << 6 | 3 << 12 | 63 << 18).to_bytes(3, "little")
    assert formats.unpack_sextets(np.frombuffer(word, np.uint8)).tolist() == [1, 2, 3, 63]


def test_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match="rounding"):
        formats.encode(np.zeros(1, np.float32), FORMATS["bf16"], "up")
    with pytest.raises(ValueError, match="rz or rp"):
        formats.encode(np.zeros(1, np.float32), UE8M0, "rn")
