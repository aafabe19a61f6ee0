"""The grouped output projection by its definition, in FP32 torch."""

from __future__ import annotations

import torch


def forward(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [T, G, N] of fp32 o [T, G, K] and weight [G, N, K]."""
    return torch.einsum("tgk,gnk->tgn", o, weight)
