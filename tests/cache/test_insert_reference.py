"""The definition of insert against independent ones: number by number, and torch's own operators."""

import math
import struct

import pytest
import torch
from helpers.insert_cases import make_cache, random_bits

from warpspec.cache import insert
from warpspec.cache.quantize import (
    dequantize_float8,
    dequantize_nvfp4,
    quantize_float8,
    quantize_nvfp4,
)
from warpspec.common.kv_formats import unswizzle_block_scales


def fp32(x: float) -> float:
    """x rounded to fp32; Inf beyond its range."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def nearest_code(x: float, exponent_bits: int, mantissa_bits: int, largest_code: int) -> int:
    """The code of an 8-bit format whose value is nearest to x; of two, the even one. Saturates."""
    if math.isnan(x):
        return 0x7F
    bias = (1 << (exponent_bits - 1)) - 1

    def value(code: int) -> float:
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if exponent == 0:
            return math.ldexp(mantissa, 1 - bias - mantissa_bits)
        return math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)

    magnitude = min(abs(x), value(largest_code))
    code = min(range(largest_code + 1), key=lambda one: (abs(value(one) - magnitude), one % 2))
    return code | (0x80 if math.copysign(1.0, x) < 0 else 0)


@pytest.mark.parametrize("name, shape", [("e4m3", (4, 3, 0x7E)), ("e5m2", (5, 2, 0x7B))])
def test_float8_codes(name, shape):
    """What vLLM's reshape_and_cache_flash stores: x / scale in fp32, to the nearest code, saturated."""
    x = random_bits((400,), torch.bfloat16, torch.Generator().manual_seed(0))
    x[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0 * 0.37])
    for scale in (1.0, 0.37, 2.0**-130):
        scale = fp32(scale)
        codes = quantize_float8(x, torch.tensor(scale), name)
        expected = [nearest_code(fp32(value / scale), *shape) for value in x.double().tolist()]
        assert codes.tolist() == expected


def test_scale_of_zero():
    codes = quantize_float8(torch.tensor([1.0, -1.0, 0.0]), torch.tensor(0.0), "e4m3")
    assert codes.tolist() == [0x7E, 0xFE, 0x7F]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_that_of_complex_numbers(interleaved):
    generator = torch.Generator().manual_seed(1)
    tokens, heads, dim, rotated = 3, 2, 64, 32
    x, angles = torch.randn(tokens, heads, dim, generator=generator), torch.randn(5, rotated // 2)
    x = x.bfloat16()
    positions = torch.tensor([4, 0, 2])
    cache = make_cache("slots", "bfloat16", heads, dim, dim)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    got = insert(
        x, x, slots=torch.tensor([], dtype=torch.int32), q=x, cos_sin=table, positions=positions,
        interleaved=interleaved, backend="reference", **cache.arguments,
    )  # fmt: skip
    turned = x[..., :rotated].double()
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    wanted = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles.double()[positions])[:, None]
    pairs = torch.view_as_real(wanted)
    wanted = (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)
    torch.testing.assert_close(got[..., :rotated].double(), wanted, rtol=2.0**-8, atol=1e-6)
    assert torch.equal(got[..., rotated:], x[..., rotated:])


def test_norm():
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(3, 2, 64, generator=generator).bfloat16(), torch.randn(64, generator=generator)
    cache = make_cache("slots", "bfloat16", 2, 64, 64)
    slots = torch.tensor([2, -1, 5])
    insert(x, x, slots=slots, k_weight=weight, eps=1e-3, backend="reference", **cache.arguments)
    wanted = torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-3)
    got = cache.arguments["k_cache"]
    torch.testing.assert_close(got[[2, 5]].double(), wanted[[0, 2]], rtol=2.0**-8, atol=1e-6)
    assert torch.equal(cache.arguments["v_cache"][[2, 5]], x[[0, 2]])


@pytest.mark.parametrize("name, bound", [("e4m3", 0.03), ("nvfp4", 0.12)])
@pytest.mark.parametrize("layout", ["pages", "cells"])
def test_what_is_stored_reads_as_what_was_given(name, bound, layout):
    """Relative error of elements, with the values' block scales swizzled: a wrong place would give more than 0.7."""
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(24, 2, 128, generator=generator).bfloat16() for _ in range(2))
    cache, scale = make_cache(layout, name, 2, 128, 128), torch.tensor([0.5, 0.01])
    slots, swizzled = torch.randperm(24, generator=generator), name == "nvfp4"
    insert(
        k,
        v,
        slots=slots,
        k_scale=scale,
        v_scale=scale,
        swizzled=swizzled,
        backend="reference",
        **cache.arguments,
    )
    for side, rows in (("k", k), ("v", v)):
        data, blocks = cache.arguments[f"{side}_cache"], cache.arguments.get(f"{side}_block_scales")
        if name == "nvfp4":
            blocks = unswizzle_block_scales(blocks) if side == "v" else blocks
            values = dequantize_nvfp4(data.contiguous(), blocks.contiguous(), scale)
        else:
            values = dequantize_float8(data.contiguous(), scale[:, None], name)
        values, rows = values.flatten(0, 1)[slots], rows.float()
        assert (values - rows).norm() / rows.norm() < bound


def test_nvfp4_of_a_scale_of_zero_is_zero():
    data, blocks = quantize_nvfp4(torch.tensor([[1.0, -2.0] * 8]), torch.tensor([0.0]))
    assert not data.any() and blocks.tolist() == [[0x7E]]


def test_torch_compile_traces_the_operator():
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(4, 2, 64, generator=generator).bfloat16()
    table, positions, slots = torch.randn(8, 64), torch.arange(4), torch.tensor([3, 1, -1, 0])
    caches = [make_cache("pages", "e4m3", 2, 64, 64) for _ in range(2)]

    def layer(k, cache):
        rest = dict(cos_sin=table, positions=positions, backend="reference", format="e4m3")
        return insert(k + 1, k, *cache, slots, q=k * 2, **rest)

    results = []
    for call, cache in zip(
        (torch.compile(layer, backend="eager", fullgraph=True), layer), caches, strict=True
    ):
        results.append(call(rows, (cache.arguments["k_cache"], cache.arguments["v_cache"])))
    assert torch.equal(*results)
    assert all(torch.equal(*pair) for pair in zip(caches[0].memory, caches[1].memory, strict=True))
