"""The tensors and options of a call of ``insert``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch

from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.operands import (
    FLOAT32,
    OUTPUT,
    UINT8,
    UINT32,
    Number,
    Operand,
    names_of,
)

ROWS = Operand(UINT32, 3, None, VECTOR_BYTES)  # words of two numbers
BLOCK_SCALES = Operand(UINT8, 4, when=lambda config: config.fmt.block)


def cache_of(layout: str) -> Operand:
    """The words of a cache whose rows have a layout of the configuration's."""

    def row_bytes(config) -> int:
        """Bytes of a row that a lane stores."""
        return min(VECTOR_BYTES, config.fmt.row_bytes(getattr(config, layout).numbers))

    return Operand(UINT32, 4, None, row_bytes)


def weight_of(name: str) -> Operand:
    """The weights of a norm, whose dtype the configuration has under a name."""
    return Operand(lambda c: getattr(c, name), 1, lambda c: c.k_dim, VECTOR_BYTES, name)


class Operands(NamedTuple):
    """The tensors, as ``insert`` takes them; out is where the queries go.

    Kernels get views: q, out, k, v: [T, H, dim/2] words of two numbers. k_cache, v_cache: words [pages, page_size, H,
    row]. k_block_scales, v_block_scales: bytes [pages, page_size, H, dim/16]. k_scale, v_scale: fp32 [1] or [H].
    """

    k: Annotated[torch.Tensor, ROWS]
    v: Annotated[torch.Tensor, ROWS]
    k_cache: Annotated[torch.Tensor, cache_of("key_layout"), OUTPUT]
    v_cache: Annotated[torch.Tensor, cache_of("value_layout"), OUTPUT]
    slots: Annotated[torch.Tensor, Operand(lambda c: c.slots, 1)]
    q: Annotated[torch.Tensor | None, replace(ROWS, when="q_heads")] = None
    out: Annotated[torch.Tensor | None, replace(ROWS, when="q_heads"), OUTPUT] = None
    cos_sin: Annotated[
        torch.Tensor | None, Operand(lambda c: c.table, 2, lambda c: c.rotated, VECTOR_BYTES, "rotated")
    ] = None
    positions: Annotated[torch.Tensor | None, Operand(lambda c: c.positions, 1, when="rotated")] = None
    q_weight: Annotated[torch.Tensor | None, weight_of("q_weight")] = None
    k_weight: Annotated[torch.Tensor | None, weight_of("k_weight")] = None
    k_scale: Annotated[torch.Tensor | None, Operand(FLOAT32, 1, when="k_scale")] = None
    v_scale: Annotated[torch.Tensor | None, Operand(FLOAT32, 1, when="v_scale")] = None
    k_block_scales: Annotated[torch.Tensor | None, BLOCK_SCALES, OUTPUT] = None
    v_block_scales: Annotated[torch.Tensor | None, BLOCK_SCALES, OUTPUT] = None

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


OUTPUTS = names_of(Operands, OUTPUT)


class InsertNumbers(NamedTuple):
    """The numbers among the kernel's arguments."""

    eps: Annotated[Any, Number(FLOAT32)]


class Options(NamedTuple):
    """The options, as ``insert`` takes them."""

    format: str | None = None
    interleaved: bool = False
    swizzled: bool = False
    eps: float = 1e-6
