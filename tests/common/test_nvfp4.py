"""The NVFP4 format: rounding against exact arithmetic, packing, the swizzled scale layout, MXFP4."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warpspec.common import nvfp4
from warpspec.common.nvfp4 import NVFP4_BLOCK, NVFP4Tensor, dequantize, quantize

E2M1 = [Fraction(value) for value in nvfp4.E2M1_VALUES]
E4M3 = sorted(
    {Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)}
    | {(1 + Fraction(m, 8)) * Fraction(2) ** e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)}
)


def nearest_even(x: Fraction, values: list[Fraction]) -> int:
    """Index of the value nearest to x >= 0, the even index of two; the last above all."""
    best = min(range(len(values)), key=lambda i: abs(values[i] - x))
    ties = [i for i in range(len(values)) if abs(values[i] - x) == abs(values[best] - x)]
    return next((i for i in ties if i % 2 == 0), ties[0])


def exact_block(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[Fraction, list[int]]:
    """Scale and codes of 16 finite values, with fp32 roundings where the recipe has them, all else exact."""
    amax = x.float().abs().max()
    quotient = min(Fraction((amax / 6 / global_scale).item()), Fraction(448))
    scale = E4M3[nearest_even(quotient, E4M3)]
    if scale == 0:
        return scale, [0] * NVFP4_BLOCK
    divisor = torch.tensor(float(scale)) * global_scale
    codes = []
    for value in x.float():
        code = nearest_even(abs(Fraction((value / divisor).item())), E2M1)
        codes.append(code | (8 if value < 0 else 0))
    return scale, codes


def check_exact(x, t):
    rows = x.flatten(0, -2)
    codes, scale = nvfp4.unpack(t.data).flatten(0, -2), t.scale.float().flatten(0, -2)
    spread = nvfp4.spread_over(t.global_scale, x.dim() - 1).expand(x.shape[:-1]).flatten()
    for r, row in enumerate(rows):
        for b, block in enumerate(row.split(NVFP4_BLOCK)):
            expected_scale, expected_codes = exact_block(block, spread[r])
            assert Fraction(scale[r, b].item()) == expected_scale
            assert codes[r, b * NVFP4_BLOCK : (b + 1) * NVFP4_BLOCK].tolist() == expected_codes


@pytest.mark.parametrize("magnitude", [1e-37, 1e-30, 1e-24, 1e-6, 1.0, 1e5, 5e35])
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_quantises_as_exact_arithmetic_does(magnitude, dims):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 48, generator=generator)
    x[0, 0, :16] = 0
    x[0, 1] *= torch.exp2(torch.arange(48.0) - 40)
    x[1, 2, ::2] = -0.0
    x = (x * magnitude).bfloat16()
    t = quantize(x, global_dims=dims)
    check_exact(x, t)
    assert t.global_scale.shape == x.shape[:dims] and t.shape == x.shape


def test_ties_go_to_the_even_value():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = [0, 2, 2, 4, 4, 6, 6]
    assert nvfp4.e2m1_codes(ties).tolist() == expected
    assert nvfp4.e2m1_codes(-ties).tolist() == [code | 8 for code in expected]
    for step, codes in ((torch.inf, [1, 2, 3, 4, 5, 6, 7]), (-torch.inf, [0, 1, 2, 3, 4, 5, 6])):
        assert nvfp4.e2m1_codes(torch.nextafter(ties, torch.tensor(step))).tolist() == codes
    assert nvfp4.e2m1_codes(torch.tensor([torch.inf, -torch.inf, 1e30, torch.nan, -torch.nan])).tolist() == [
        7,
        15,
        7,
        7,
        7,
    ]


@given(st.lists(st.floats(0, 500, width=32), min_size=1, max_size=64))
def test_scale_rounds_to_the_nearest_e4m3(values):
    scale = nvfp4.block_scale(torch.tensor(values) * 6, torch.ones(()))
    quotients = (torch.tensor(values) * 6 / 6).tolist()
    expected = [E4M3[nearest_even(Fraction(min(q, 448.0)), E4M3)] for q in quotients]
    assert [Fraction(s) for s in scale.float().tolist()] == expected


def test_values_of_the_format_survive():
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (5, 64), generator=generator, dtype=torch.uint8)
    codes[codes == 8] = 0  # -0 does not
    codes[:, ::NVFP4_BLOCK] = 7  # a largest value in every block, so that the scale is found again
    scale = torch.randint(0x30, 0x7F, (5, 4), generator=generator, dtype=torch.uint8)
    scale[:, 0] = 0x7E  # 448
    t = NVFP4Tensor(nvfp4.pack(codes), scale.view(torch.float8_e4m3fn), torch.tensor(2.0**-12))
    again = quantize(dequantize(t))
    assert torch.equal(again.data, t.data) and torch.equal(again.scale.view(torch.uint8), scale)
    assert again.global_scale == t.global_scale


def test_error_is_that_of_the_format():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    error = (dequantize(quantize(x)) - x).norm() / x.norm()
    assert 0.05 < error < 0.11


def test_one_row_without_other_dimensions():
    x = torch.randn(64)
    assert torch.equal(nvfp4.dequantize(quantize(x)), nvfp4.dequantize(quantize(x[None]))[0])


def test_global_scale_given():
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(3))
    for scale in (torch.tensor(0.01), torch.tensor([0.01, 1.0, 1e-6]), torch.rand(3, 4) + 0.1):
        t = quantize(x, scale)
        check_exact(x, t)
        assert torch.equal(t.global_scale, scale)
    assert (quantize(x, 1e-9).scale.float() == 448).all()  # saturates
    assert not dequantize(quantize(x, 1e9)).any()  # vanishes


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_stay_in_row_or_block(poison):
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(4))
    clean = quantize(x, global_dims=1)
    dirty = x.clone()
    dirty[2, 20] = poison
    t = quantize(dirty, global_dims=1)
    assert t.global_scale[2].isnan() and dequantize(t)[2].isnan().all()
    keep = [0, 1, 3]
    assert torch.equal(t.data[keep], clean.data[keep])
    assert torch.equal(dequantize(t)[keep], dequantize(clean)[keep])

    t = quantize(dirty, torch.tensor(0.01))
    assert (t.scale.view(torch.uint8)[2, 1] == nvfp4.E4M3_NAN) and t.scale.float().isnan().sum() == 1
    assert (nvfp4.unpack(t.data)[2, 16:32] == 7).all()
    assert dequantize(t).isnan().sum() == NVFP4_BLOCK


def test_zeros():
    t = quantize(torch.tensor([0.0, -0.0] * 16).view(1, 32))
    assert not t.data.any() and not t.scale.view(torch.uint8).any() and t.global_scale == 2.0**-90
    assert quantize(torch.zeros(0, 32), global_dims=1).shape == (0, 32)
    assert quantize(torch.zeros(0, 32)).global_scale.shape == ()


def test_nibbles():
    codes = torch.arange(16, dtype=torch.uint8)
    assert nvfp4.pack(codes)[0] == 0x10 and torch.equal(nvfp4.unpack(nvfp4.pack(codes)), codes)
    assert nvfp4.e2m1_values(codes).tolist() == [*nvfp4.E2M1_VALUES, *(-v for v in nvfp4.E2M1_VALUES)]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (130, 7), (300, 12), (0, 5)])
def test_swizzle(rows, columns):
    scale = torch.randint(1, 127, (2, rows, columns), dtype=torch.uint8)
    swizzled = nvfp4.swizzle_scales(scale.view(torch.float8_e4m3fn))
    assert swizzled.shape == (2, -(-rows // 128), -(-columns // 4), 512) and swizzled.dtype == torch.uint8
    for r in range(rows):
        for c in range(columns):
            byte = r % 32 * 16 + r // 32 % 4 * 4 + c % 4
            assert swizzled[1, r // 128, c // 4, byte] == scale[1, r, c]
    assert (swizzled != 0).sum() == scale.numel()
    assert torch.equal(nvfp4.unswizzle_scales(swizzled, rows, columns).view(torch.uint8), scale)


class TestMXFP4:
    def mxfp4(self, low, high, shape=(3, 5, 64), seed=0):
        generator = torch.Generator().manual_seed(seed)
        data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator, dtype=torch.uint8)
        scale = torch.randint(
            low, high, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8
        )
        return data, scale

    def values(self, data, scale):
        factor = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
        return nvfp4.e2m1_values(nvfp4.unpack(data)).double() * factor

    @pytest.mark.parametrize("low", [40, 110, 200])
    def test_exact(self, low):
        data, scale = self.mxfp4(low, low + 18)
        data[1, 2, 16:], scale[1, 2, 1] = 0x80, 3  # zeros: their scale does not count
        t = nvfp4.from_mxfp4(data, scale)
        assert torch.equal(dequantize(t).double(), self.values(data, scale))
        assert t.global_scale.shape == (3,) and nvfp4.from_mxfp4(data[0], scale[0]).global_scale.shape == ()

    def test_below_the_range_is_rounded(self):
        data, scale = self.mxfp4(100, 127)
        scale[:, 0, 0], data[:, 0, :16] = 127, 0x27
        error = dequantize(nvfp4.from_mxfp4(data, scale)).double() - self.values(data, scale)
        assert 0 < error.abs().max() <= 2.0**-19

    def test_nan_and_all_zero(self):
        data, scale = self.mxfp4(120, 125)
        scale[0, 1, 1], data[2] = 255, 0
        got = dequantize(nvfp4.from_mxfp4(data, scale))
        assert got[0, 1, 32:].isnan().all() and got.isnan().sum() == 32 and not got[2].any()
        keep = ~got.isnan()
        assert torch.equal(got[keep].double(), self.values(data, scale)[keep])


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (TypeError, "^x: must be", lambda: quantize(torch.zeros(16, dtype=torch.int32))),
        (ValueError, "^x: last dimension", lambda: quantize(torch.zeros(4, 24))),
        (ValueError, "^global_dims", lambda: quantize(torch.zeros(4, 16), global_dims=2)),
        (ValueError, "^global_scale", lambda: quantize(torch.zeros(4, 16), torch.ones(3))),
        (ValueError, "^global_scale", lambda: quantize(torch.zeros(4, 16), torch.ones(4, 16))),
        (TypeError, "^data", lambda: NVFP4Tensor(torch.zeros(4, 8), None, None)),
        (TypeError, "^t: must be an NVFP4Tensor", lambda: nvfp4.dequantize(torch.zeros(4, 8))),
        (
            TypeError,
            "^scale: must be a torch.Tensor, got None",
            lambda: nvfp4.from_mxfp4(torch.zeros(2, 16, dtype=torch.uint8), None),
        ),
        (
            ValueError,
            "^scale: must be",
            lambda: nvfp4.from_mxfp4(*(torch.zeros(2, 16, dtype=torch.uint8) for _ in range(2))),
        ),
    ],
)
def test_bad_input(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_tensor_fields_must_fit():
    t = quantize(torch.zeros(2, 3, 32))
    with pytest.raises(ValueError, match=r"^scale"):
        NVFP4Tensor(t.data, t.scale[:, :, :1], t.global_scale)
    with pytest.raises(ValueError, match=r"^global_scale"):
        NVFP4Tensor(t.data, t.scale, torch.ones(3))
    with pytest.raises(TypeError, match=r"^global_scale"):
        NVFP4Tensor(t.data, t.scale, torch.ones(2).double())
