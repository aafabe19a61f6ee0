"""Calls that are like an earlier one: what the checks of a small call look at is remembered, with what they found.

Checking arguments and finding their kernel again takes longer than launching it. Used by attention, softmax and
softmax_topk.
"""

from __future__ import annotations

import os

import torch
from torch.autograd import forward_ad

from warpspec.common.backend import BACKEND_VARIABLE
from warpspec.common.hardware import VECTOR_BYTES

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
MOST_REMEMBERED = 4096

# What lies beneath os.environ, which raises and catches a KeyError for a variable that is not there: a microsecond.
_environment = os.environ._data
_backend_variable = os.environ.encodekey(BACKEND_VARIABLE)


class Remembered(dict):
    """What was found for calls, by all that finding it looked at; forgets everything once it is full."""

    def remember(self, key: tuple, found) -> None:
        if len(self) >= MOST_REMEMBERED:
            self.clear()
        self[key] = found


def backend_variable():
    """The environment variable WARPSPEC_BACKEND as the system has it (None: not set)."""
    return _environment.get(_backend_variable)


def signature(tensor: torch.Tensor) -> tuple:
    """What checks look at, of a tensor. (The checks refuse a layout without strides and address.)"""
    if tensor.layout is not torch.strided:
        return (tensor.layout,)
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.get_device(),
        tensor.data_ptr() % VECTOR_BYTES,  # kernels differ by it
    )


def watched(*tensors: torch.Tensor) -> bool:
    """Whether somebody needs to see an operator on these tensors (which costs twice a launch): tracing, a mode, a
    functorch transform, a subclass, autograd; or whoever turns a negated view (``z.conj().imag``) into plain memory."""
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return True
    gradients = torch.is_grad_enabled()
    return any(type(t) not in PLAIN_TENSORS or t.is_neg() or (gradients and t.requires_grad) for t in tensors)
