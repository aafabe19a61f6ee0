"""The grouped output projection: the kernel for sm_90a in the simulator, against the reference; bad arguments."""

from dataclasses import replace

import pytest
import torch
from projection_cases import O_TOLERANCE, case, judge
from suites import long

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import SIMULATED
from warpspec.fmha.projection import Float8Tensor, ops, output_projection
from warpspec.fmha.projection.config import choose


@pytest.mark.parametrize(
    ("arch", "tokens", "columns", "float8"),
    [
        ("sm_90a", 5, 64, False),
        ("sm_90a", 70, 128, True),
        ("sm_100a", 70, 64, False),
        ("sm_100a", 130, 128, True),
        long("sm_90a", 130, 512, False),
        long("sm_90a", 200, 256, True),
        long("sm_90a", 64, 384, False),
        long("sm_100a", 130, 512, False),
        long("sm_100a", 5, 384, True),
    ],
)
def test_against_reference(check_order, monkeypatch, arch, tokens, columns, float8):
    target = replace(SIMULATED[arch], sm_count=2)  # several tiles a CTA
    monkeypatch.setattr(ops, "target_of", lambda device: target)
    o, weight = case(tokens, 4, 2, columns, float8)
    got = output_projection(o, weight, backend="sim")
    assert judge(got, output_projection(o, weight, backend="reference")) < O_TOLERANCE


def test_reference_and_layouts():
    """The definition, number by number; o flat, with rows apart; out; no tokens."""
    o, weight = case(3, 4, 2, 8)
    got = output_projection(o, weight, backend="reference")
    wanted = torch.stack([o.view(3, 2, 256)[:, g].float() @ weight[g].float().T for g in range(2)], 1)
    assert torch.equal(got.nan_to_num(7), wanted.bfloat16().nan_to_num(7))
    wide = torch.zeros(3, 4 * 128 + 8, dtype=torch.bfloat16)
    wide[:, : 4 * 128] = o.flatten(1)
    out = torch.full((3, 2, 8), 9.0, dtype=torch.bfloat16)
    again = output_projection(wide[:, : 4 * 128], weight, out=out, backend="reference")
    assert again is out and torch.equal(out.nan_to_num(7), got.nan_to_num(7))
    assert output_projection(o[:0], weight, backend="sim").shape == (0, 2, 8)


def test_float8_tensor():
    """Scales are the least powers of two under which a block fits; values within half a step; NaN in its block."""
    x = torch.randn(130, 256) * torch.exp2(6 * torch.randn(130, 1))
    x[:, 128] = 448.0
    x[129, 0] = torch.inf
    for rows in (1, 128):
        made = Float8Tensor.quantize(x, rows)
        assert made.rows == rows and made.scales.shape == (-(-130 // rows), 2)
        values = made.values
        bad = values.isnan()
        assert bad[129, :128].all() and not bad[:128].any() and not bad[:, 128:].any()
        steps = made.scales.repeat_interleave(rows, 0)[:130].repeat_interleave(128, 1)
        assert ((values - x).abs() <= torch.maximum(x.abs() / 16, steps * 2**-10) * 1.001)[~bad].all()
        assert (made.scales[:, 1] >= 1).all() and (made.scales[0].log2() % 1 == 0).all()


def test_choice_of_tiles():
    """Decoding fills the SMs with narrow tiles; prefill takes the widest."""
    decode = choose(9, False, 64, 8, 1024, 132)
    assert (decode.tile_n, decode.consumers) == (64, 1)
    assert choose(9, False, 4096, 8, 1024, 132).tile_n == 256
    assert choose(9, True, 4096, 8, 1024, 132).tile_n == 128


def test_bad_arguments(monkeypatch):
    o, weight = case(3, 4, 2, 64)
    eight, eight_weight = case(3, 4, 2, 128, True)
    with pytest.raises(TypeError, match="weight: must be a bf16 tensor, as o is, got Float8Tensor"):
        output_projection(o, eight_weight)
    with pytest.raises(TypeError, match=r"o: dtype must be one of torch\.bfloat16, got torch\.float32"):
        output_projection(o.float(), weight)
    with pytest.raises(ValueError, match=r"weight: must be \[G, N, K\] with G K = 512"):
        output_projection(o, weight[:1])
    with pytest.raises(ValueError, match="o: heads must be contiguous"):
        output_projection(torch.empty(3, 4, 256, dtype=torch.bfloat16)[..., :128], weight)
    with pytest.raises(ValueError, match=r"weight: must have a scale for 128 x 128"):
        output_projection(eight, Float8Tensor.quantize(eight_weight.values))
    with pytest.raises(ValueError, match=r"scales: shape must be"):
        Float8Tensor(eight.data, eight.scales[..., :0])
    with pytest.raises(ValueError, match=r"out: shape must be \[3, 2, 64\]"):
        output_projection(o, weight, out=torch.empty(3, 128, dtype=torch.bfloat16))
    with pytest.raises(
        UnsupportedProblem, match="kernels take K a multiple of 128 and N of 64, got K 256 and N 8"
    ):
        output_projection(o, weight[:, :8].contiguous(), backend="sim")
    with pytest.raises(NotImplementedError, match="weight: gradients"):
        output_projection(o, weight.clone().requires_grad_())
