"""The grouped output projection: the kernel for sm_90a in the simulator, against the reference; bad arguments."""

import pytest
import torch
from helpers.projection_cases import O_TOLERANCE, case, judge
from helpers.suites import long

from warpspec.common.errors import UnsupportedProblem
from warpspec.latent.projection import Float8Tensor, output_projection, quantize_output
from warpspec.latent.projection.config import Sm90Config, choose


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
def test_against_reference(check_order, simulate_as, arch, tokens, columns, float8):
    simulate_as(arch, sm_count=2)  # several tiles a CTA
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


@pytest.mark.parametrize("arch", ["sm_90a", long("sm_100a")])
def test_quantize_output(check_order, simulate_as, arch):
    """The definition's bits: ties, zeros, tiny and large rows, NaN and infinities; heads that lie apart; no tokens."""
    simulate_as(arch)
    generator = torch.Generator().manual_seed(1)
    o = torch.randn(3, 7, 512, generator=generator) * torch.exp2(
        9 * torch.randn(3, 7, 1, generator=generator)
    )
    o[0, 1], o[0, 2, ::2], o[0, 3] = 0.0, -0.0, torch.randint(-40, 40, (512,), generator=generator) / 16
    o[1, 4, 200], o[2, 0, 511], o[2, 6] = torch.nan, -torch.inf, 1e-30
    wide = torch.zeros(3, 9, 520).bfloat16()
    wide[:, 1:8, 8:] = o.bfloat16()
    for rows in (o.bfloat16(), wide[:, 1:8, 8:], o[:0].bfloat16()):
        got, wanted = quantize_output(rows, backend="sim"), Float8Tensor.quantize(rows)
        assert torch.equal(got.data.view(torch.uint8), wanted.data.view(torch.uint8))
        assert torch.equal(got.scales.view(torch.int32), wanted.scales.view(torch.int32))
    with pytest.raises(ValueError, match=r"o: shape must be \[any, any, 512\], got \[3, 7, 256\]"):
        quantize_output(o[..., :256].bfloat16())


def test_operators_are_traced():
    """torch.compile goes through both without a break."""

    def project(o, weight, scales):
        o = quantize_output(o, backend="reference")
        return output_projection(o, Float8Tensor(weight, scales), backend="reference")

    o = torch.randn(2, 2, 512).bfloat16()
    weight = Float8Tensor.quantize(torch.randn(1, 128, 1024), 128)
    arguments = (o, weight.data, weight.scales)
    compiled = torch.compile(project, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments), project(*arguments))


def test_choice_of_tiles():
    """Decoding fills the SMs with narrow tiles; prefill takes the widest."""
    decode = choose(Sm90Config, False, 64, 8, 1024, 132)
    assert (decode.tile_n, decode.consumers) == (64, 1)
    assert choose(Sm90Config, False, 4096, 8, 1024, 132).tile_n == 256
    assert choose(Sm90Config, True, 4096, 8, 1024, 132).tile_n == 128


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
