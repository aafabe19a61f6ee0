"""Routing: which experts a token takes, and with which weights. torch operations, no host synchronisation."""

from __future__ import annotations

import torch

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
MIN_SUM = 1e-20  # added to the sum of weights, which may be 0


def route(
    logits: torch.Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the k experts of each token and their weights.

    Args:
        logits: [T, E] floating; all arithmetic is fp32.
        k: int within 1..E.
        scoring: "softmax" over all experts, "sigmoid", or "sqrtsoftplus", sqrt(ln(1 + exp(logit))).
        bias: [E] floating or None. It is added to the scores for the selection only; weights use the scores without it.
        normalize: divide the weights by their sum (with "softmax" this is softmax over the selected experts).
        scale: finite float that multiplies the weights.

    Returns:
        ids [T, k] int32 and weights [T, k] fp32, by falling score (with the bias); ties go to the lower index.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _check(logits, k, scoring, bias, scale)
    logits = logits.float()
    scores = _scores(logits, scoring)
    steered = scores if bias is None else scores + bias.float()
    # Without a bias, logits order as softmax does, and they do not tie where exp() underflows.
    key = logits if bias is None and scoring == "softmax" else steered
    ids = torch.sort(key, dim=-1, descending=True, stable=True).indices[:, :k]
    if scoring == "softmax" and normalize:
        weights = torch.softmax(logits.gather(1, ids), dim=-1)
    else:
        weights = scores.gather(1, ids)
        if normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + MIN_SUM)
    return ids.int(), weights * scale


def _scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "softmax":
        return torch.softmax(logits, dim=-1)
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    return torch.nn.functional.softplus(logits).sqrt()


def _check(logits, k, scoring, bias, scale) -> None:
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        raise TypeError(f"logits: must be a floating tensor, got {getattr(logits, 'dtype', logits)!r}")
    if logits.dim() != 2:
        raise ValueError(f"logits: must be [T, E], got shape {list(logits.shape)}")
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k: must be an int, got {k!r}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k: must be within 1..{logits.shape[1]} (E), got {k}")
    if scoring not in SCORINGS:
        raise ValueError(f"scoring: must be one of {', '.join(SCORINGS)}, got {scoring!r}")
    if bias is not None:
        if not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
            raise TypeError(f"bias: must be a floating tensor, got {getattr(bias, 'dtype', bias)!r}")
        if bias.shape != logits.shape[1:] or bias.device != logits.device:
            raise ValueError(
                f"bias: must be [E={logits.shape[1]}] on {logits.device}, got {list(bias.shape)} on {bias.device}"
            )
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale: must be a float, got {scale!r}")
    if not abs(scale) < float("inf"):
        raise ValueError(f"scale: must be finite, got {scale}")
