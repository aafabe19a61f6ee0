"""Cases of the grouped output projection, and how far a result may be off."""

import torch

from warpspec.latent.projection import Float8Tensor

O_TOLERANCE = 3e-3


def case(tokens, heads, groups, columns, float8=False, seed=0, device="cpu"):
    """o [T, H, 128] and weight [G, N, K]: rows of very different size, one token with NaN where there are several."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(4 * torch.randn(tokens, heads, 1, generator=generator))
    o = (torch.randn(tokens, heads, 128, generator=generator) * size).to(device)
    weight = torch.randn(groups, columns, heads * 128 // groups, generator=generator).to(device)
    if tokens > 1:
        o[tokens // 2, 0, 3] = torch.nan
    if float8:
        return Float8Tensor.quantize(o), Float8Tensor.quantize(weight, 128)
    return o.bfloat16(), weight.bfloat16()


def judge(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest relative error of a group; NaN in the same places, in one token at most."""
    got, wanted = got.float(), wanted.float()
    assert torch.equal(got.isnan(), wanted.isnan())
    seen = wanted.isfinite().flatten(1).all(1)
    assert seen.sum() >= len(wanted) - 1
    error = (got - wanted)[seen].norm(dim=(0, 2)) / wanted[seen].norm(dim=(0, 2))
    return float(error.max())
