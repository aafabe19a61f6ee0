"""New tensors, without torch's dispatcher: ``torch.empty`` takes longer than a remembered call's checks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch._C import _get_deterministic_algorithms
from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda  # what compiled code allocates by


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty(shape, dtype=dtype, device=device)``. device: with its index, as tensors have it; best the current
    one. Only where nobody watches (``repeated.observed``): no mode sees it."""
    kind = device.type
    if not _get_deterministic_algorithms():  # with them torch fills what it allocates
        if kind == "cuda" and device.index == torch._C._cuda_getDevice():
            return _empty_strided_cuda(shape, _strides(shape), dtype)
        if kind == "cpu":
            return _empty_strided_cpu(shape, _strides(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=device)


class Block(NamedTuple):
    """A contiguous tensor to be allocated."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def block(shape: Iterable[int], dtype: torch.dtype) -> Block:
    """The contiguous tensor of a shape."""
    shape = tuple(shape)
    return Block(shape, _strides(shape), dtype)


def allocate(blocks: Iterable[Block | None], device: torch.device) -> list[torch.Tensor | None]:
    """``empty`` of each block, None of None. For calls that know their blocks this takes half as long."""
    kind = device.type
    if not _get_deterministic_algorithms():
        if kind == "cuda" and device.index == torch._C._cuda_getDevice():
            return [None if each is None else _empty_strided_cuda(*each) for each in blocks]
        if kind == "cpu":
            return [None if each is None else _empty_strided_cpu(*each) for each in blocks]
    return [None if each is None else empty(each.shape, each.dtype, device) for each in blocks]


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
