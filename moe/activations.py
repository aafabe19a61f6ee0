"""The gated activations: definitions in torch, and bounds of their values.

With g = min(gate, limit) and u = clamp(up, -limit, limit), or gate and up themselves where limit is None:

    "swiglu":     g * sigmoid(g) * u
    "swiglu_oai": g * sigmoid(1.702 g) * (u + 1)

NaN stays NaN: kernels clamp with the min and max instructions that propagate it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from warpspec.common.checks import check_choice, check_number
from warpspec.common.nvfp4 import AMAX_TO_GLOBAL

# For activations without a bound: values up to 168 are not cut.
DEFAULT_INTERMEDIATE_SCALE = 2.0**-4


@dataclass(frozen=True)
class GatedActivation:
    """gate * sigmoid(slope * gate) * (up + shift)."""

    slope: float
    shift: float


ACTIVATIONS = {"swiglu": GatedActivation(1.0, 0.0), "swiglu_oai": GatedActivation(1.702, 1.0)}
EPILOGUES = ("linear", *ACTIVATIONS)  # what a grouped GEMM ends with


def activation_named(name: str) -> GatedActivation:
    """The activation with this name. Raises TypeError or ValueError for a name that is not in ``ACTIVATIONS``."""
    check_choice("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float | None) -> torch.Tensor:
    """The activation of fp32 gate and up, fp32. Raises ValueError for an unknown activation."""
    form = activation_named(activation)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(form.slope * gate) * (up + form.shift if form.shift else up)


def bound(activation: str, limit: float | None) -> float | None:
    """The largest magnitude that the activation can have; None if it has no bound. Raises ValueError for an unknown
    activation."""
    form = activation_named(activation)
    return None if limit is None else limit * (limit + form.shift)


def intermediate_scale_of(activation: str, limit: float | None) -> float:
    """Global scale of the activations as NVFP4: the smallest power of two at which the bound is not cut.

    A power of two can be multiplied exactly into the global scale of the next weights. Without a limit it is 2**-4.
    Raises TypeError or ValueError for an unknown activation, or a limit that is neither None nor a finite number above
    0.
    """
    if limit is not None:
        check_number("limit", limit, positive=True)
    largest = bound(activation, limit)
    if largest is None or largest == 0.0:
        return DEFAULT_INTERMEDIATE_SCALE
    return 2.0 ** math.ceil(math.log2(largest / AMAX_TO_GLOBAL))
