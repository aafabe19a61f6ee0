"""The two gated activations, by their definition in torch, and what they are bounded by.

"swiglu":     silu(min(gate, limit)) * clamp(up, -limit, limit)
"swiglu_oai": g * sigmoid(1.702 g) * (u + 1) with g = min(gate, limit), u = clamp(up, -limit, limit)

limit None: no clamp. NaN stays NaN: kernels clamp with the min and max that hand it on.
"""

from __future__ import annotations

import math

import torch

from warpspec.common.nvfp4 import AMAX_TO_GLOBAL

ACTIVATIONS = ("swiglu", "swiglu_oai")
OAI_ALPHA = 1.702
# Where nothing bounds the activation: up to 168 before the largest values are cut.
DEFAULT_INTERMEDIATE_SCALE = 2.0**-4


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float | None) -> torch.Tensor:
    """The activation of fp32 gate and up, fp32."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu":
        return gate * torch.sigmoid(gate) * up
    return gate * torch.sigmoid(OAI_ALPHA * gate) * (up + 1)


def bound(activation: str, limit: float | None) -> float | None:
    """No activation is larger in magnitude; None where there is no bound."""
    if limit is None:
        return None
    if activation == "swiglu":
        return limit * limit
    return limit * (limit + 1)


def intermediate_scale_of(activation: str, limit: float | None) -> float:
    """Global scale of the activations as NVFP4: the smallest power of two at which the bound is not cut.

    A power of two, so that multiplying it into the next weights' global scale is exact. 2**-4 without a limit.
    """
    largest = bound(activation, limit)
    if largest is None or largest == 0.0:
        return DEFAULT_INTERMEDIATE_SCALE
    return 2.0 ** math.ceil(math.log2(largest / AMAX_TO_GLOBAL))
