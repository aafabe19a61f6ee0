"""What the weights of E experts have in common, whatever the layout in which a kernel reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Self

import torch

from warpspec.common.checks import ANY, INTEGER_DTYPES, check_device, check_range, check_tensor

INTERLEAVE = 8  # rows of gate, followed by as many of up: the epilogue's tile along N
GATE, UP = 0, 1  # columns of w13's global scales


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[E, 2I, ...] of gate and up [E, I, ...], which alternate by 8 rows."""
    parts = [part.unflatten(1, (-1, INTERLEAVE)) for part in (gate, up)]
    return torch.stack(parts, dim=2).flatten(1, 3)


class ExpertWeights:
    """Base of the frozen dataclasses of weights [N, K] of E experts.

    data: [E, ...]. global_scale: fp32 [E, 2] for gate and up, or [E, 1]. bias: [E, ...] or None. n: N. TENSORS: names
    of the fields that are tensors, all [E, ...]. layout: the backend whose kernels read the weights.
    """

    data: torch.Tensor
    global_scale: torch.Tensor
    bias: torch.Tensor | None
    n: int

    TENSORS: ClassVar[tuple[str, ...]]
    layout: ClassVar[str]

    @property
    def experts(self) -> int:
        return self.data.shape[0]

    @property
    def gated(self) -> bool:
        """Whether this is w13: gate and up, interleaved."""
        return bool(self.global_scale.shape[1] == 2)  # comparing symbolic sizes does not give a bool

    @property
    def width(self) -> int:
        """Columns of the GEMM's result: N, or N/2 for gate and up."""
        return self.n // 2 if self.gated else self.n

    def to(self, device) -> Self:
        """Copy the weights to another device. Raises TypeError or ValueError for what names none."""
        device = check_device("device", device)
        return self._with_each(lambda tensor: tensor.to(device))

    def pick(self, experts: torch.Tensor) -> Self:
        """The weights of some experts, by number: int32 or int64 [N]. Raises TypeError or ValueError naming the
        argument."""
        check_tensor("experts", experts, INTEGER_DTYPES, (ANY,), self.data.device)
        check_range("experts", experts, 0, self.experts - 1, "experts")
        return self._with_each(lambda tensor: tensor[experts])

    def _with_each(self, change) -> Self:
        """Apply a change to each tensor; return the new weights."""
        tensors = {name: getattr(self, name) for name in self.TENSORS}
        return replace(self, **{name: t if t is None else change(t) for name, t in tensors.items()})

    def row_scales(self) -> torch.Tensor:
        """fp32 [E, N]: the global scale of every row."""
        if not self.gated:
            return self.global_scale.expand(-1, self.n).contiguous()
        return interleave(*(self.global_scale[:, part, None].expand(-1, self.width) for part in (GATE, UP)))
