"""The tensors and options of a call of ``insert``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch


class Operands(NamedTuple):
    """The tensors, as ``insert`` takes them; out is where the queries go."""

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    q: torch.Tensor | None = None
    out: torch.Tensor | None = None
    cos_sin: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_block_scales: torch.Tensor | None = None
    v_block_scales: torch.Tensor | None = None

    @property
    def outputs(self) -> dict[str, torch.Tensor | None]:
        """Tensors that the call writes to, by name."""
        return {name: getattr(self, name) for name in OUTPUTS}

    @property
    def inputs(self) -> dict[str, torch.Tensor | None]:
        """Tensors that the call reads, by name."""
        return {name: tensor for name, tensor in self._asdict().items() if name not in OUTPUTS}

    def detached(self) -> Operands:
        """These operands detached from autograd."""
        return Operands(*(None if tensor is None else tensor.detach() for tensor in self))


OUTPUTS = ("out", "k_cache", "v_cache", "k_block_scales", "v_block_scales")


@dataclass(frozen=True)
class Options:
    """The options, as ``insert`` takes them."""

    format: str | None = None
    interleaved: bool = False
    swizzled: bool = False
    eps: float = 1e-6

    @property
    def values(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))
