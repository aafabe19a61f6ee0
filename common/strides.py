"""Strides of dimensions of one element, which mean nothing: kernels, TMA and views of another dtype mind them."""

from __future__ import annotations

import torch

from warpspec.common.hardware import TMA_ALIGNMENT


def regular_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor with strides that TMA accepts in dimensions of size 1, where strides mean nothing."""
    strides = list(tensor.stride())
    vector = TMA_ALIGNMENT // tensor.element_size()
    step = -(-tensor.shape[-1] // vector) * vector
    if tensor.shape[-1] == 1:  # (a bias may have others, which the reference reads)
        strides[-1] = 1
    for dim in reversed(range(tensor.dim() - 1)):
        if tensor.shape[dim] == 1:
            strides[dim] = step
        step = max(step, strides[dim] * tensor.shape[dim])
    return tensor if tuple(strides) == tensor.stride() else tensor.as_strided(tensor.shape, strides)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's memory as 32-bit words. The rows of its other dimensions begin at multiples of a word."""
    return regular_strides(tensor.detach()).view(torch.uint32)
