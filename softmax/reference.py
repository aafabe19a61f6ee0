"""The softmax's definition, in fp32 torch operations."""

from __future__ import annotations

import torch


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax over the last dimension of x (fp32, fp16, bf16), computed in fp32, in x's dtype."""
    x32 = x.detach().to(torch.float32)
    powers = torch.exp(x32 - x32.amax(dim=-1, keepdim=True))
    return (powers / powers.sum(dim=-1, keepdim=True)).to(x.dtype)
