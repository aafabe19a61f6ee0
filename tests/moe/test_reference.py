"""The FP32 reference and the public functions on it, against the definition written out a token at a time."""

import pytest
import torch
from helpers.moe_cases import by_definition, make_experts, quantized, randn, relative_error

from warpspec.moe import NVFP4Experts, QuantizedRows, grouped_swiglu, intermediate_scale_of, moe_ffn, route

ROUNDING = 2**-8  # bf16, of one number


def routed(tokens, experts, k, seed=0):
    return route(randn(tokens, experts, seed=seed + 50), k)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("biases", [False, True])
def test_layer(activation, limit, biases):
    layer, weights = make_experts(5, 48, 40, biases=biases)
    x = (2 * randn(9, 48, seed=9)).bfloat16()
    ids, topk = routed(9, 5, 3)
    ids[4, 1], ids[5], ids[6, 2] = -1, -1, ids[6, 0]  # none, none at all, twice the same
    got = moe_ffn(x, layer, ids, topk, activation=activation, limit=limit, backend="reference")
    expected = by_definition(x, weights, ids, topk, activation=activation, limit=limit, scale=2**-4)
    torch.testing.assert_close(got.float(), expected, rtol=ROUNDING, atol=1e-5)
    assert not got[5].any()
    other = moe_ffn(x, layer, ids, topk, activation=activation, limit=2.0, backend="reference")
    assert relative_error(other, expected) > 0.01 or limit is None


def test_shared_experts():
    layer, weights = make_experts(5, 32, 24, shared=2)
    x = randn(6, 32, seed=9).bfloat16()
    ids, topk = routed(6, 3, 2)
    assert layer.experts == 3
    got = moe_ffn(x, layer, ids, topk, backend="reference")
    options = dict(activation="swiglu", limit=None, scale=2**-4)
    expected = by_definition(x, weights, ids, topk, **options, shared=2)
    torch.testing.assert_close(got.float(), expected, rtol=ROUNDING, atol=1e-5)
    # An id that names a shared expert is no one's; without choices only the shared ones are left.
    strange = torch.full_like(ids, 3)
    none = moe_ffn(x, layer, ids[:, :0], topk[:, :0], backend="reference")
    assert torch.equal(moe_ffn(x, layer, strange, topk, backend="reference"), none) and none.any()
    with pytest.raises(ValueError, match=r"^topk_ids: values must be within -1\.\.2"):
        moe_ffn(x, layer, strange, topk, check=True, backend="reference")


def test_intermediate_scale():
    x = randn(6, 32, seed=9).bfloat16()
    ids, topk = routed(6, 3, 2)
    per_expert = torch.tensor([2.0**-9, 0.3, 2.0**-4])
    layer, weights = make_experts(3, 32, 32, intermediate_scale=per_expert)
    assert torch.equal(layer.intermediate_scale, per_expert)
    got = moe_ffn(x, layer, ids, topk, backend="reference")
    for e, scale in enumerate(per_expert.tolist()):
        only = torch.where(ids == e, ids, -1)
        part = by_definition(x, weights, only, topk, activation="swiglu", limit=None, scale=scale)
        got = got.float() - part
    assert got.abs().max() < 0.02  # the four roundings' sum
    assert (
        intermediate_scale_of("swiglu", 10.0) == 2**-4 and intermediate_scale_of("swiglu_oai", 7.0) == 2**-5
    )
    assert intermediate_scale_of("swiglu", None) == 2**-4


class TestGroupedSwiglu:
    def operands(self, rows_of=(3, 0, 5), hidden=48, width=24, biases=False):
        layer, weights = make_experts(len(rows_of), hidden, width, biases=biases)
        offsets = torch.tensor(rows_of).cumsum(0).int()
        return randn(int(offsets[-1]) + 2, hidden, seed=9).bfloat16(), layer.w13, offsets, weights

    def expected(self, a, offsets, weights, activation="swiglu", limit=None):
        gate, up = (quantized(w, 1) for w in weights[:2])
        rows, out, start = quantized(a, 1), [], 0
        for e, end in enumerate(offsets.tolist()):
            g, u = (rows[start:end] @ w[e].T for w in (gate, up))
            if weights[3] is not None:
                g, u = g + weights[3][e], u + weights[4][e]
            from helpers.moe_cases import act

            out.append(act(g, u, activation, limit))
            start = end
        return torch.cat(out)

    @pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
    @pytest.mark.parametrize("biases", [False, True])
    def test_bf16(self, activation, biases):
        a, w13, offsets, weights = self.operands(biases=biases)
        got = grouped_swiglu(a, w13, offsets, activation=activation, limit=0.5, backend="reference")
        assert got.shape == (10, 24) and got.dtype == torch.bfloat16
        expected = self.expected(a, offsets, weights, activation, 0.5)
        torch.testing.assert_close(got[:8].float(), expected, rtol=ROUNDING, atol=1e-6)

    def test_nvfp4(self):
        a, w13, offsets, weights = self.operands()
        expected = torch.nn.functional.pad(self.expected(a, offsets, weights), (0, 8))
        scale = torch.tensor([0.5, 1.0, 2.0**-6])
        for given in (None, scale):
            got = grouped_swiglu(a, w13, offsets, out_format="nvfp4", out_scale=given, backend="reference")
            used = torch.full((3,), 2.0**-4) if given is None else scale
            want = QuantizedRows.from_rows(expected, offsets, out_scale=used)
            assert got.k == 32 and got.row_scale is None
            assert torch.equal(got.data[:8], want.data[:8])
            assert torch.equal(got.dequantize(offsets), want.dequantize(offsets))

    def test_empty(self):
        a, w13, _, _ = self.operands()
        zeros = torch.zeros(3, dtype=torch.int32)
        assert grouped_swiglu(a[:0], w13, zeros, backend="reference").shape == (0, 24)
        assert grouped_swiglu(a, w13, zeros, backend="reference").shape == (10, 24)


def test_empty_layer():
    layer, _ = make_experts(3, 32, 16)
    ids, topk = routed(2, 3, 2)
    none = torch.zeros(0, 32, dtype=torch.bfloat16)
    assert moe_ffn(none, layer, ids[:0], topk[:0], backend="reference").shape == (0, 32)
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    assert not moe_ffn(x, layer, ids[:, :0], topk[:, :0], backend="reference").any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_stay_in_their_token(poison):
    layer, _ = make_experts(3, 32, 16)
    x = randn(5, 32, seed=9).bfloat16()
    ids, topk = routed(5, 3, 2)
    clean = moe_ffn(x, layer, ids, topk, backend="reference")
    x[2, 7] = poison
    dirty = moe_ffn(x, layer, ids, topk, backend="reference")
    assert dirty[2].isnan().all()
    assert torch.equal(dirty[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_gradients_raise():
    layer, _ = make_experts(3, 32, 16)
    ids, topk = routed(5, 3, 2)
    x = randn(5, 32).bfloat16().requires_grad_()
    with pytest.raises(NotImplementedError, match="gradients are not implemented"):
        moe_ffn(x, layer, ids, topk, backend="reference").sum().backward()
    offsets = torch.tensor([1, 2, 5], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="gradients are not implemented"):
        grouped_swiglu(x, layer.w13, offsets, backend="reference").sum().backward()


def test_experts_from_quantised_weights():
    layer, (gate, up, down, *_) = make_experts(2, 32, 32)
    from warpspec.common.nvfp4 import quantize

    parts = [quantize(w, global_dims=1) for w in (gate, up, down)]
    same = NVFP4Experts.quantize(*parts)
    x, (ids, topk) = randn(4, 32).bfloat16(), routed(4, 2, 2)
    assert torch.equal(
        moe_ffn(x, layer, ids, topk, backend="reference"), moe_ffn(x, same, ids, topk, backend="reference")
    )
