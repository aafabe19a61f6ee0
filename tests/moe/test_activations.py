"""An unknown activation is refused wherever one is named, and never computed as another one."""

from types import SimpleNamespace

import pytest
import torch
from helpers.moe_cases import make_experts

from warpspec.moe import intermediate_scale_of, reference
from warpspec.moe.activations import activate, bound
from warpspec.moe.gate import gated
from warpspec.moe.operands import QuantizedRows

ONE = torch.ones(1)


def reference_gemm(name):
    layer, _ = make_experts(1, 32, 16)
    offsets = torch.tensor([2], dtype=torch.int32)
    rows = QuantizedRows.from_rows(torch.ones(2, 32), offsets)
    reference.grouped_gemm(rows, layer.w13, offsets, activation=name, limit=None)


@pytest.mark.parametrize(
    "use",
    [
        lambda name: activate(ONE, ONE, name, None),
        lambda name: bound(name, 7.0),
        lambda name: intermediate_scale_of(name, None),
        lambda name: gated(SimpleNamespace(epilogue=name, has_limit=False), ONE, ONE, None),
        reference_gemm,
    ],
    ids=["definition", "bound", "intermediate scale", "kernel", "reference"],
)
@pytest.mark.parametrize("name", ["gelu", "SwiGLU", "", ["swiglu"]], ids=repr)
def test_an_unknown_activation_raises(use, name):
    allowed = "one of swiglu, swiglu_oai" if isinstance(name, str) else "a string"
    with pytest.raises(
        ValueError if isinstance(name, str) else TypeError, match=rf"^activation: must be {allowed}, got "
    ):
        use(name)
