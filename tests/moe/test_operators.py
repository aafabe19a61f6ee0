"""moe_ffn and grouped_swiglu as torch operators: torch.compile, fake tensors, schemas."""

import torch
from helpers.moe_cases import make_experts, randn

from warpspec.moe import QuantizedRows, grouped_swiglu, moe_ffn, ops, route, streamed_ops

LAYER, _ = make_experts(4, 32, 24, biases=True, shared=1)


def inputs(tokens=5):
    return randn(tokens, 32).bfloat16(), randn(tokens, 3, seed=1)


def model(x, logits):
    ids, weights = route(logits * 2, 2, scoring="sigmoid")
    return moe_ffn(x * 2, LAYER, ids, weights, limit=3.0, backend="reference") + 1


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def test_compiles_without_graph_breaks():
    assert torch.equal(compiled(model)(*inputs()), model(*inputs()))


def test_one_compilation_serves_any_number_of_tokens():
    function = compiled(model, dynamic=True)
    for tokens in (5, 3, 9):
        assert torch.equal(function(*inputs(tokens)), model(*inputs(tokens)))


def test_grouped_swiglu_compiles():
    offsets = torch.tensor([1, 1, 4, 5], dtype=torch.int32)

    def function(a, out_format):
        return grouped_swiglu(a, LAYER.w13, offsets, out_format=out_format, backend="reference")

    a = inputs()[0]
    assert torch.equal(compiled(function)(a, "bf16"), function(a, "bf16"))
    got, expected = compiled(function)(a, "nvfp4"), function(a, "nvfp4")
    assert isinstance(got, QuantizedRows) and torch.equal(
        got.dequantize(offsets), expected.dequantize(offsets)
    )


def test_schemas_and_fake_implementations_are_right():
    x, logits = inputs()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    weights = (*ops.flatten(LAYER.w13), *ops.flatten(LAYER.w2))
    torch.library.opcheck(
        torch.ops.warpspec.moe_ffn,
        (
            x,
            *route(logits, 2),
            *weights,
            LAYER.intermediate_scale,
            1,
            "swiglu",
            None,
            False,
            "auto",
            "reference",
        ),
        test_utils=checks,
    )
    offsets = torch.tensor([1, 1, 4, 5], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.warpspec.moe_grouped_swiglu,
        (x, offsets, *weights[:5], None, "bf16", "swiglu_oai", 7.0, False, "reference"),
        test_utils=checks,
    )


def test_operators_of_streamed_experts():
    """Experts laid out for sm_90a have the same checks, and one compilation for any number of tokens."""
    layer = LAYER.for_backend("sm90")
    x, logits = inputs()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    w13, w2 = (streamed_ops.flatten(w) for w in (layer.w13, layer.w2))
    options = (layer.intermediate_scale, 1, "swiglu", None, False, "auto", "reference")
    arguments = (x, *route(logits, 2), *w13, *w2, *options)
    torch.library.opcheck(torch.ops.warpspec.moe_ffn_streamed, arguments, test_utils=checks)
    offsets = torch.tensor([1, 1, 4, 5], dtype=torch.int32)
    arguments = (x, offsets, *w13, "swiglu_oai", 7.0, False, "reference")
    torch.library.opcheck(torch.ops.warpspec.moe_grouped_swiglu_streamed, arguments, test_utils=checks)

    def model(x, logits):
        return moe_ffn(x * 2, layer, *route(logits, 2), limit=3.0, backend="reference") + 1

    function = compiled(model, dynamic=True)
    for tokens in (5, 3):
        assert torch.equal(function(*inputs(tokens)), model(*inputs(tokens)))
