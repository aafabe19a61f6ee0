"""The definition of softmax + top-k, in torch."""

from __future__ import annotations

import torch


def softmax_topk(logits: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(probs, indices int32) in the dtype of the logits, which should be fp32 or fp64.

    The order is the logits' own: NaN first, then from the largest down; equal ones by column.
    """
    # torch's sort of a CUDA tensor puts NaN with the sign set last, and may tell -0 from +0.
    logits = torch.where(logits.isnan(), torch.nan, logits) + 0.0
    indices = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    if renormalize:
        largest = logits.amax(-1, keepdim=True)
        weights = (logits.gather(-1, indices) - largest).exp()
        probs = weights / weights.sum(-1, keepdim=True)
    else:
        probs = logits.softmax(-1).gather(-1, indices)
    return probs, indices.to(torch.int32)
