"""Rows of logits that are hard to select from."""

import torch


def rows(kind: str, count: int, length: int, seed: int = 0) -> torch.Tensor:
    """fp32 [count, length]: "normal", "rising", "falling", "few values" (most of them zero), "equal", "special" (NaN,
    infinities, both zeros), "one exponent" (all within one power of two)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, length, generator=generator)
    if kind == "rising":
        return x.sort(1).values
    if kind == "falling":
        return x.sort(1, descending=True).values
    if kind == "few values":
        return torch.randint(0, 4, (count, length), generator=generator).float() * (x > 1.5)
    if kind == "equal":
        return torch.full_like(x, -2.5)
    if kind == "one exponent":
        return 1 + torch.rand(count, length, generator=generator)
    if kind == "special":
        which = torch.randint(0, 12, (count, length), generator=generator)
        for number, value in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -torch.nan)):
            x[which == number] = value
    return x


KINDS = ("normal", "rising", "falling", "few values", "equal", "special", "one exponent")
