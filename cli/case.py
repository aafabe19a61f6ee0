"""What the command line runs: an operator with its inputs, its definition, and how exact it has to be."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from warpspec.cli.options import DTYPES

# Relative error, ||got - expected|| / ||expected||, against FP32 on the same inputs.
ATTENTION_TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3}  # bound of the worst head's error
GRADIENT_TOLERANCE = {"bf16": 4.2e-3, "fp16": 1e-3}  # likewise
SOFTMAX_TOLERANCE = {"bf16": 2e-3, "fp16": 1e-3, "fp32": 1e-6}
TOPK_TOLERANCE = 1e-6  # bound of the probabilities' error; the columns are exact
EXPERTS_TOLERANCE = 3e-3
TORCH_FACTOR = 1.25  # never worse than this times torch's own error in the same dtype


@dataclass(frozen=True)
class Case:
    """An operator and its inputs.

    title: operator, shape, dtype. run: takes a backend and returns its results. expected: returns the definition's
    results, in FP32 where it is one. torchs: returns torch's own results on the same inputs, in the same order and
    layout, to compare errors with; None: there are none, or ours need not be as exact. peers: functions whose times are
    compared with ours. tolerance: bound of the error. by_head: results are [..., H, D], and the error is the worst
    head's. flops: floating-point operations of a call. bytes: bytes that a call reads and writes at least. 0: unknown.
    """

    title: str
    run: Callable[[str], Sequence[torch.Tensor]]
    expected: Callable[[], Sequence[torch.Tensor]]
    torchs: Callable[[], Sequence[torch.Tensor]] | None
    tolerance: float
    by_head: bool = False
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)
    flops: int = 0
    bytes: int = 0

    def error(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
        """The worst error of the results; infinite where integers differ, NaN where a number is NaN."""
        worst = 0.0
        for mine, right in zip(got, expected, strict=True):
            if not right.is_floating_point():
                if not torch.equal(mine.to(right.dtype), right):
                    return float("inf")
                continue
            axes = [axis for axis in range(right.dim()) if not (self.by_head and axis == right.dim() - 2)]
            norm = partial(torch.linalg.vector_norm, dim=axes)
            difference, size = norm(mine.to(right.dtype) - right), norm(right)
            relative = torch.where(difference == 0, 0, difference / size).max().item()
            if not relative <= worst:
                worst = relative
        return worst

    def allowed(self, torch_error: float | None, dtype: torch.dtype) -> float:
        """The largest error that passes: the tolerance, or less where torch's own error is small."""
        if torch_error is None:
            return self.tolerance
        eps = torch.finfo(dtype).eps
        # What rounding alone may cost: of sums, of a result.
        rounding = eps if dtype == torch.float32 else eps / 4
        return min(self.tolerance, max(TORCH_FACTOR * torch_error, rounding))


def random_numbers(options: argparse.Namespace, device: str) -> Callable[..., torch.Tensor]:
    """A function that returns normally distributed numbers of a shape, of the options' seed and dtype. It raises
    ValueError where they do not fit memory."""
    generator = torch.Generator(device).manual_seed(options.seed)

    def randn(*shape, dtype=DTYPES[options.dtype]):
        try:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)
        except RuntimeError as error:  # of the allocator's: shapes are lists of positive numbers
            raise ValueError(f"an input of shape {list(shape)} does not fit this machine's memory") from error

    return randn
