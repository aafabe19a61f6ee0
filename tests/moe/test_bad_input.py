"""Wrong arguments raise, name themselves, and leave every tensor as it was."""

from dataclasses import replace

import pytest
import torch
from helpers.moe_cases import make_experts, randn

from warpspec.moe import (
    NVFP4Experts,
    QuantizedRows,
    UnsupportedProblem,
    grouped_swiglu,
    intermediate_scale_of,
    moe_ffn,
    prepare_w2,
    route,
)

LAYER, WEIGHTS = make_experts(4, 32, 24)
OTHER, _ = make_experts(4, 48, 24)


WIDE = randn(3, 48).bfloat16()


def ids(*values):
    return torch.tensor(values, dtype=torch.int32).view(3, 2)


def layer_arguments(**changes):
    return {
        "x": randn(3, 32).bfloat16(),
        "experts": LAYER,
        "topk_ids": ids(0, 1, 3, -1, 2, 2),
        "topk_weights": torch.ones(3, 2),
        "backend": "reference",
        **changes,
    }


def rows_arguments(**changes):
    return {
        "a": randn(6, 32).bfloat16(),
        "w13": LAYER.w13,
        "offsets": torch.tensor([1, 1, 4, 6], dtype=torch.int32),
        "backend": "reference",
        **changes,
    }


def misaligned(rows):
    return torch.zeros(rows * 32 + 1, dtype=torch.bfloat16)[1:].view(rows, 32)


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (TypeError, r"^x: must be a torch.Tensor", dict(x=[1.0])),
        (TypeError, r"^x: dtype", dict(x=randn(3, 32))),
        (ValueError, r"^x: shape must be \[any, 32\]", dict(x=randn(3, 48).bfloat16())),
        (ValueError, r"^x: shape", dict(x=randn(1, 3, 32).bfloat16())),
        (ValueError, r"^x: last dimension", dict(x=randn(32, 3).bfloat16().T)),
        (ValueError, r"^x: rows must be aligned.*address", dict(x=misaligned(3))),
        (ValueError, r"^x: rows must be aligned.*strides", dict(x=randn(3, 36).bfloat16()[:, :32])),
        (TypeError, r"^experts: must be an NVFP4Experts", dict(experts=LAYER.w13)),
        (ValueError, r"^experts.w2: must be 4 experts of \[48", dict(x=WIDE, experts=replace(OTHER, w2=LAYER.w2))),
        (ValueError, r"^experts.w13: must be what prepare_w13", dict(experts=replace(LAYER, w13=LAYER.w2))),
        (ValueError, r"^experts.shared", dict(experts=replace(LAYER, shared=5))),
        (ValueError, r"^experts.intermediate_scale", dict(experts=replace(LAYER, intermediate_scale=torch.ones(3)))),
        (TypeError, r"^topk_ids: dtype", dict(topk_ids=torch.zeros(3, 2, dtype=torch.int64))),
        (ValueError, r"^topk_ids: shape", dict(topk_ids=torch.zeros(2, 2, dtype=torch.int32))),
        (ValueError, r"^topk_ids: .* -1\.\.3, got 4 at \[1, 0\]", dict(topk_ids=ids(0, 1, 4, 0, 0, 0), check=True)),
        (ValueError, r"^topk_ids: .* -1\.\.3, got -2", dict(topk_ids=ids(0, 0, 0, 0, 0, -2), check=True)),
        (TypeError, r"^topk_weights: dtype", dict(topk_weights=torch.ones(3, 2).bfloat16())),
        (ValueError, r"^topk_weights: shape", dict(topk_weights=torch.ones(3, 3))),
        (ValueError, r"^limit", dict(limit=0.0)),
        (ValueError, r"^limit", dict(limit=float("nan"))),
        (TypeError, r"^limit", dict(limit="7")),
        (ValueError, r"^activation", dict(activation="gelu")),
        (TypeError, r"^check", dict(check=1)),
        (TypeError, r"^backend", dict(backend=None)),
        (ValueError, r"^backend", dict(backend="cuda")),
        (UnsupportedProblem, r"sm90", dict(backend="sm90")),
        (UnsupportedProblem, r"sm100", dict(backend="sm100")),
    ],
)  # fmt: skip
def test_layer(error, match, changes):
    arguments = layer_arguments(**changes)
    tensors = {name: t.clone() for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    with pytest.raises(error, match=match):
        moe_ffn(**arguments)
    assert all(torch.equal(arguments[name], t) for name, t in tensors.items())


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (TypeError, r"^a: must be", dict(a=None)),
        (ValueError, r"^a: shape", dict(a=randn(6, 48).bfloat16())),
        (TypeError, r"^w13: must be a PreparedWeights", dict(w13=WEIGHTS[0])),
        (ValueError, r"^w13: must be what prepare_w13", dict(a=randn(6, 32).bfloat16(), w13=LAYER.w2)),
        (ValueError, r"^offsets: shape must be \[4\]", dict(offsets=ends(1, 2, 3))),
        (TypeError, r"^offsets: dtype", dict(offsets=ends(1, 2, 3, 4).long())),
        (ValueError, r"^offsets: .* got 7 after 4 at expert 3", dict(offsets=ends(1, 1, 4, 7))),
        (ValueError, r"^offsets: .* got 3 after 4 at expert 2", dict(offsets=ends(1, 4, 3, 6))),
        (ValueError, r"^offsets: .* got -1 after 0 at expert 0", dict(offsets=ends(-1, 1, 4, 6))),
        (ValueError, r"^out_format", dict(out_format="fp8")),
        (ValueError, r"^out_scale: belongs", dict(out_scale=torch.ones(4))),
        (ValueError, r"^out_scale: shape", dict(out_format="nvfp4", out_scale=torch.ones(3))),
        (TypeError, r"^out_scale: dtype", dict(out_format="nvfp4", out_scale=torch.ones(4).double())),
    ],
)
def test_rows(error, match, changes):
    with pytest.raises(error, match=match):
        grouped_swiglu(**rows_arguments(**changes))


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (ValueError, r"^gate: H must be a multiple of 16", dict(gate=randn(2, 8, 24), up=randn(2, 8, 24))),
        (ValueError, r"^down: must be \[2, 16, 8\]", dict(down=randn(2, 8, 16))),
        (TypeError, r"^down: must be a Tensor or NVFP4Tensor, got None", dict(down=None)),
        (ValueError, r"^down: must be on cpu .*got meta", dict(down=torch.empty(2, 16, 8, device="meta"))),
        (ValueError, r"^intermediate_scale", dict(intermediate_scale=torch.ones(3))),
        (ValueError, r"^intermediate_scale", dict(intermediate_scale=0.0)),
        (TypeError, r"^intermediate_scale", dict(intermediate_scale="1")),
        (ValueError, r"^shared", dict(shared=3)),
        (TypeError, r"^shared", dict(shared=1.0)),
        (ValueError, r"^down_bias: shape", dict(down_bias=torch.ones(2, 8))),
    ],
)
def test_experts(error, match, changes):
    arguments = {"gate": randn(2, 8, 16), "up": randn(2, 8, 16), "down": randn(2, 16, 8), **changes}
    with pytest.raises(error, match=match):
        NVFP4Experts.quantize(**arguments)


def test_experts_without_storage():
    weights = {"gate": randn(2, 8, 16), "up": randn(2, 8, 16), "down": randn(2, 16, 8)}
    experts = NVFP4Experts.quantize(**{name: t.to("meta") for name, t in weights.items()})
    assert (
        experts.device.type == "meta"
        and experts.w2.data.shape == NVFP4Experts.quantize(**weights).w2.data.shape
    )


def test_arguments_as_they_stand_are_fine():
    assert moe_ffn(**layer_arguments()).shape == (3, 32)
    assert grouped_swiglu(**rows_arguments()).shape == (6, 24)


ROWS = QuantizedRows.from_rows(randn(6, 32), ends(1, 1, 4, 6))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: LAYER.shard(0, 0), ValueError, r"ranks: must be at least 1, got 0"),
        (lambda: LAYER.shard(0, 3), ValueError, r"ranks: must divide the 4 experts, got 3"),
        (lambda: LAYER.shard(0, 2.0), TypeError, r"ranks: must be an int, got 2\.0"),
        (lambda: LAYER.shard(2, 2), ValueError, r"rank: must be within 0\.\.1, got 2"),
        (lambda: LAYER.to("gpu"), ValueError, r"device: must be a torch\.device or its name, got 'gpu'"),
        (lambda: LAYER.for_backend(90), TypeError, r"backend: must be a string, got 90"),
        (lambda: LAYER.w13.pick(torch.tensor([0, 4])), ValueError,
         r"experts: must be within 0\.\.3 .*got 4 at index 1"),
        (lambda: LAYER.w13.dequantize(0), TypeError, r"experts: must be a slice, got 0"),
        (lambda: ROWS.dequantize(ends(1, 1, 4, 7)), ValueError, r"offsets: .* got 7 after 4 at expert 3"),
        (lambda: QuantizedRows.empty(-1, 32, 4, "cpu", row_scale=True), ValueError,
         r"rows: must be within 0\.\."),
        (lambda: QuantizedRows.from_rows(randn(6, 32), ends(7)), ValueError,
         r"offsets: .* got 7 after 0 at expert 0"),
        (lambda: prepare_w2(randn(2, 16, 8), input_scale=1.0), TypeError,
         r"input_scale: must be a torch\.Tensor, got 1\.0"),
        (lambda: intermediate_scale_of("swiglu", torch.nan), ValueError,
         r"limit: must be a finite number above 0, got nan"),
        (lambda: route(randn(2, 4), 2, normalize=1), TypeError, r"normalize: must be a bool, got 1"),
        (lambda: route(randn(2, 4), 2, scale=torch.inf), ValueError,
         r"scale: must be a finite number, got inf"),
    ],
)  # fmt: skip
def test_methods(call, error, match):
    with pytest.raises(error, match="^" + match):
        call()
