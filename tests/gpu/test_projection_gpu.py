"""The grouped output projection on a GPU, against the reference, and the same bits twice."""

import pytest
import torch
from helpers.projection_cases import O_TOLERANCE, case, judge

from warpspec.latent.projection import Float8Tensor, output_projection, quantize_output

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize(
    ("tokens", "groups", "columns"), [(1, 8, 1024), (100, 16, 1024), (1000, 8, 1024), (300, 2, 384)]
)
def test_against_reference(tokens, groups, columns, float8):
    o, weight = case(tokens, 32 * groups, groups, columns, float8, device="cuda")
    runs = [output_projection(o, weight) for _ in range(2)]
    wanted = output_projection(o, weight, backend="reference")
    assert judge(runs[0], wanted) < O_TOLERANCE
    assert torch.equal(runs[0].nan_to_num(7.0), runs[1].nan_to_num(7.0))


def test_quantize_output():
    o = torch.randn(300, 64, 512, device="cuda").bfloat16()
    o[7, 3, 100] = torch.nan
    got, wanted = quantize_output(o), Float8Tensor.quantize(o.cpu())
    assert torch.equal(got.data.cpu().view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(got.scales.cpu().view(torch.int32), wanted.scales.view(torch.int32))
