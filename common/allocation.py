"""New tensors, without torch's dispatcher: ``torch.empty`` takes longer than a remembered call's checks."""

from __future__ import annotations

from functools import lru_cache

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


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
