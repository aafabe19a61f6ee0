"""Weights laid out for sm_90a: the same numbers, whatever the sizes; experts of one backend refused by the other."""

from dataclasses import replace

import pytest
import torch
from helpers.moe_cases import make_experts, randn

from warpspec.common.nvfp4 import E4M3_NAN, NVFP4Tensor, from_mxfp4
from warpspec.moe import NVFP4Experts, UnsupportedProblem, grouped_swiglu, moe_ffn, streamed
from warpspec.moe.operands import prepare_w2


def same(a, b):
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize(("rows", "k"), [(8, 16), (56, 80), (64, 128), (200, 336)])
def test_the_same_numbers(rows, k):
    """Every code, every scale that e4m3 has (subnormal ones, 0, NaN), every K that ends within a chunk or a step."""
    codes = torch.arange(2 * rows * k // 2, dtype=torch.int64) * 37 % 256
    scale = torch.arange(2 * rows * k // 16, dtype=torch.int64) % (E4M3_NAN + 1)
    data, scale = codes.to(torch.uint8).view(2, rows, k // 2), scale.to(torch.uint8).view(2, rows, k // 16)
    weights = NVFP4Tensor(data, scale.view(torch.float8_e4m3fn), torch.tensor([0.5, 3.0]))
    prepared = prepare_w2(weights, input_scale=torch.tensor([0.25, 4.0]), bias=randn(2, rows))
    got = streamed.stream(prepared, unscale=torch.tensor([0.25, 4.0]))
    assert got.block == 16 and got.data.shape[2] == streamed.tile_bytes(k, 16)
    expected = replace(prepared, global_scale=weights.global_scale[:, None]).dequantize()
    assert same(got.dequantize(), expected)


def mxfp4(experts, rows, k, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(116, 130, (experts, rows, k // 32), dtype=torch.uint8, generator=generator)
    scale[0, 3, 0] = 255
    return from_mxfp4(data, scale)


def test_mxfp4_keeps_one_scale_to_32_values():
    """Also where K ends in the middle of a block of 64."""
    layer = NVFP4Experts.quantize(mxfp4(2, 96, 160), mxfp4(2, 96, 160, seed=1), mxfp4(2, 160, 96, seed=2))
    moved = layer.for_backend("sm90")
    assert moved.w13.block == moved.w2.block == 32 and moved.layout == "sm90"
    assert same(moved.w13.dequantize(), layer.w13.dequantize())
    unscaled = layer.w2.dequantize() / layer.intermediate_scale[:, None, None]
    assert same(moved.w2.dequantize(), unscaled)
    assert streamed.tile_bytes(2880, 32) * 8 < 4.26 * 64 * 2880  # 4.25 bits a value, and half a step's scales


def test_activations_there_and_back():
    rows = randn(5, 80)
    assert torch.equal(streamed.restore(streamed.reorder(rows), 80), rows)
    assert not streamed.reorder(rows)[:, streamed.column_order(80) >= 80].any()


def test_layouts_are_refused_by_name():
    layer, _ = make_experts(3, 32, 24)
    moved = layer.for_backend("sm90")
    assert layer.for_backend("auto") is layer and moved.for_backend("sm90") is moved
    assert moved.to("cpu").layout == "sm90"
    with pytest.raises(ValueError, match=r"^backend: experts laid out for 'sm90'"):
        moved.for_backend("sm100")
    with pytest.raises(ValueError, match=r"^backend: must be one of"):
        layer.for_backend("sm80")
    x, ids, weights = randn(2, 32).bfloat16(), torch.zeros(2, 1).int(), torch.ones(2, 1)
    with pytest.raises(UnsupportedProblem, match=r"^precision: 'w4a16"):
        moe_ffn(x, layer, ids, weights, precision="w4a16", backend="sim")
    with pytest.raises(ValueError, match=r"^precision: must be one of"):
        moe_ffn(x, layer, ids, weights, precision="w8a8", backend="reference")
    with pytest.raises(UnsupportedProblem, match=r"^out_format"):
        grouped_swiglu(x, moved.w13, torch.tensor([1, 1, 2]).int(), out_format="nvfp4", backend="reference")


def test_negative_scales_are_refused():
    scale = torch.full((1, 16, 1), 0x81, dtype=torch.uint8).view(torch.float8_e4m3fn)
    w = prepare_w2(NVFP4Tensor(torch.zeros(1, 16, 8, dtype=torch.uint8), scale, torch.ones(1)))
    with pytest.raises(ValueError, match=r"^block scales"):
        streamed.stream(w)


def test_precisions_of_the_reference():
    """Both layouts have both precisions; w4a16 is nearer to the weights' own result than w4a4."""
    layer, _ = make_experts(4, 64, 40, biases=True, shared=1)
    moved = layer.for_backend("sm90")
    x = randn(7, 64).bfloat16()
    ids, weights = torch.randint(-1, 3, (7, 2), dtype=torch.int32), torch.rand(7, 2)

    def result(experts, precision):
        return moe_ffn(x, experts, ids, weights, precision=precision, backend="reference").float()

    for precision in ("w4a4", "w4a16"):
        torch.testing.assert_close(result(layer, precision), result(moved, precision), rtol=1e-2, atol=1e-4)
    assert torch.equal(result(layer, "auto"), result(layer, "w4a4"))
    assert torch.equal(result(moved, "auto"), result(moved, "w4a16"))
    error = (result(layer, "w4a4") - result(moved, "w4a16")).norm() / result(moved, "w4a16").norm()
    assert 0.02 < error < 0.3
