"""Running a checked backward problem on a GPU or in the simulator."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import Target
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.operands import Operands


class Gradients(NamedTuple):
    """Of o and lse, read; of the differentiable arguments, written where they are not None. Shapes are those of what
    they are gradients of, as in ``Operands``."""

    do: torch.Tensor | None
    dlse: torch.Tensor | None
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def check_supported(problem: BackwardProblem, target: Target) -> None:
    """Raise UnsupportedProblem, naming the constraint, for a problem that the target's kernels do not run."""
    raise UnsupportedProblem(f"backward: no kernel for {target.arch} yet")


def run_kernels(problem: BackwardProblem, target: Target, operands: Operands, gradients: Gradients) -> None:
    """Launch on the tensors' device and its current stream; no synchronisation."""
    raise NotImplementedError
