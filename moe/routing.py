"""Routing: which experts a token takes, and with which weights. torch operations, no host synchronisation."""

from __future__ import annotations

import torch

from warpspec.common.checks import ANY, check_bool, check_choice, check_floating, check_int, check_number

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
    _check(logits, k, scoring, bias, normalize, scale)
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
    return ids.int(), weights * float(scale)


def _scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "softmax":
        return torch.softmax(logits, dim=-1)
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    return torch.nn.functional.softplus(logits).sqrt()


def _check(logits, k, scoring, bias, normalize, scale) -> None:
    check_floating("logits", logits, (ANY, ANY))
    experts = logits.shape[1]
    if experts == 0:
        raise ValueError(f"logits: must be [T, E] with E of at least 1, got {list(logits.shape)}")
    check_int("k", k, 1, experts)
    check_choice("scoring", scoring, SCORINGS)
    if bias is not None:
        check_floating("bias", bias, (experts,), logits.device)
    check_bool("normalize", normalize)
    check_number("scale", scale, signed=True)
