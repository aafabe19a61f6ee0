"""Calls that are like an earlier one: what the checks of a small call look at is remembered, with what they found.

Checking arguments and finding their kernel again takes longer than launching it. Used by attention, softmax and
softmax_topk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from torch.autograd import forward_ad

from warpspec.common.backend import BACKEND_VARIABLE
from warpspec.common.hardware import VECTOR_BYTES

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
MOST_REMEMBERED = 4096

# What lies beneath os.environ, which raises and catches a KeyError for a variable that is not there: a microsecond.
_environment = os.environ._data


class Remembered(dict):
    """What was found for calls, by all that finding it looked at; forgets everything once it is full."""

    def remember(self, key: tuple, found) -> None:
        if len(self) >= MOST_REMEMBERED:
            self.clear()
        self[key] = found


def variable_reader(name: str) -> Callable[[], bytes | None]:
    """A function that returns an environment variable as the system has it (None: not set)."""
    key = os.environ.encodekey(name)
    return lambda: _environment.get(key)


backend_variable = variable_reader(BACKEND_VARIABLE)


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


def signatures(tensors: Iterable[torch.Tensor | None]) -> list | None:
    """``signature`` of each tensor, None for None; last, whether autograd records what is computed from them. None
    where one of them is ``watched``, or is no tensor.

    One loop: for each tensor apart, ``watched``, ``recorded`` and ``signature`` would take twice as long. A tensor on
    the meta device has a signature: it is on no device that a remembered call is on. Raises RuntimeError for a layout
    without strides and address.
    """
    found, requires_grad = [], False
    for tensor in tensors:
        if tensor is None:
            found.append(None)
            continue
        if type(tensor) not in PLAIN_TENSORS or tensor.is_neg():
            return None
        if tensor.requires_grad:
            requires_grad = True
        address = tensor.data_ptr() % VECTOR_BYTES
        found.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), address))
    found.append(requires_grad and torch.is_grad_enabled())
    return found


def watched(*tensors: torch.Tensor) -> bool:
    """Whether somebody needs to see an operator on these tensors: calls are ``observed``, or one of them is of a
    subclass, on the meta device, or a negated view (``z.conj().imag``), which torch turns into plain memory. An
    operator written in Python takes longer than ten launches and imports torch._dynamo. Autograd needs none: see
    ``recorded``."""
    if observed():
        return True
    for tensor in tensors:  # noqa: SIM110  (``any`` of a generator takes a microsecond longer)
        if type(tensor) not in PLAIN_TENSORS or tensor.is_neg() or tensor.is_meta:
            return True
    return False


def observed() -> bool:
    """Whether somebody needs to see every operator now: tracing, a mode, or a functorch transform."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def recorded(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records what is computed from these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
