"""The judges of recorded results: what they accept and what they must not."""

import numpy as np
import pytest
from silicon import compare

ONE, NAN, OTHER_NAN, INFINITY = 0x3F800000, 0x7FFFFFFF, 0xFFC00001, 0x7F800000


def words(*values):
    return np.array([values], np.uint32).view(np.int32)


def judge(body, got, want, *sources):
    inputs = [np.array(s, np.uint32).view(np.int32) for s in sources]
    return compare.instruction_problems(body, words(*got), words(*want), inputs)


def test_integers_are_compared_bit_for_bit():
    sources = ([1, 2], [3, 4], [5, 6])
    assert not judge("add.s32 d, a, b", [4, 6], [4, 6], *sources)
    (problem,) = judge("add.s32 d, a, b", [4, 7], [4, 6], *sources)
    assert "0x2 0x4 0x6" in problem and "0x7, recorded 0x6" in problem


def test_nan_payloads_are_not_compared_and_nan_is_no_number():
    sources = ([NAN], [ONE], [0])
    assert not judge("add.rn.f32 d, a, b", [NAN], [OTHER_NAN], *sources)
    assert judge("add.rn.f32 d, a, b", [NAN], [INFINITY], *sources)
    assert judge("mov.b32 d, a", [NAN], [OTHER_NAN], *sources)


def test_halves_are_judged_apart():
    sources = ([0], [0], [0])
    assert not judge("add.rn.f16x2 d, a, b", [0x7FFF3C00], [0xFE013C00], *sources)
    assert judge("add.rn.f16x2 d, a, b", [0x7FFF3C00], [0xFE013C01], *sources)


def test_types_of_conversions_are_their_results():
    assert compare.result_format("cvt.rni.s32.f32") is None
    assert compare.result_format("cvt.rn.satfinite.e4m3x2.f32") is None
    assert compare.result_format("cvt.rn.f32.s32") is compare.FORMATS["f32"]
    assert compare.result_format("setp.lt.f32") is None
    assert compare.result_format("set.lt.u32.f32") is None


THIRD = 0x3EAAAAAB  # 1/3, rounded


@pytest.mark.parametrize(
    ("result", "fine"),
    [(THIRD, True), (THIRD + 1, True), (THIRD - 1, True), (THIRD + 2, False), (NAN, False)],
)
def test_reciprocals_may_be_off_by_one_ulp_on_either_side(result, fine):
    sources = ([0x40400000], [0], [0])  # 3
    body = "rcp.approx.f32 d, a"
    assert (not judge(body, [result], [THIRD], *sources)) == fine
    assert (not judge(body, [THIRD], [result], *sources)) == fine


@pytest.mark.parametrize(
    ("body", "operands", "result", "fine"),
    [
        ("rcp.approx.f32 d, a", (0x80000000,), 0xFF800000, True),  # 1/-0 = -Inf
        ("rcp.approx.f32 d, a", (0x80000000,), 0x7F800000, False),
        ("ex2.approx.f32 d, a", (0xFF800000,), 0x00000000, True),  # 2**-Inf = +0
        ("ex2.approx.f32 d, a", (0xFF800000,), 0x80000000, False),
        ("lg2.approx.f32 d, a", (0xBF800000,), NAN, True),
        ("lg2.approx.f32 d, a", (0xBF800000,), 0, False),
        ("rsqrt.approx.ftz.f32 d, a", (0x00000001,), INFINITY, True),  # a subnormal is a zero
        ("rsqrt.approx.f32 d, a", (0x00000001,), INFINITY, False),
        ("sin.approx.f32 d, a", (0x40490FDB,), 0, True),  # sin of nearly pi, within 2**-20.5
        ("sin.approx.f32 d, a", (0x40490FDB,), 0x35800000, False),  # 2**-20
        ("div.approx.f32 d, a, b", (ONE, 0x7F000001), 0, True),  # beyond 2**126 the reciprocal is 0
        ("div.approx.f32 d, a, b", (ONE, 0x7F000001), 0x003FFFFF, False),
        ("div.full.f32 d, a, b", (ONE, 0x7F000000), 0x00400000, True),
    ],
)
def test_special_values_of_approximations(body, operands, result, fine):
    sources = [[word] for word in (*operands, 0, 0)[:3]]
    assert (not judge(body, [result], [result], *sources)) == fine


def test_bitwise_judge_sees_one_bit_and_formats_judge_only_numbers():
    want = [np.array([[1, 2], [NAN, 4]], np.uint32)]
    got = [want[0].copy()]
    assert not compare.bitwise(got, want, [])
    got[0][1, 0] = OTHER_NAN
    assert compare.bitwise(got, want, [])
    by_format = compare.of_formats((None, "f32"))
    assert not by_format(got, want, [])
    got[0][0, 1] ^= 1
    assert by_format(got, want, [])
