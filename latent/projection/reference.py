"""The grouped output projection by its definition, in FP32 torch."""

from __future__ import annotations

import torch

from warpspec.common.autocast import without_autocast


@without_autocast
def forward(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [T, G, N]: each group's product. o: fp32 [T, G, K]. weight: fp32 [G, N, K]."""
    return torch.einsum("tgk,gnk->tgn", o, weight)
