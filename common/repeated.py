"""Remembers calls: all that the checks of a small call look at, together with what they found.

Checking arguments and finding their kernel takes longer than launching it, so a call like an earlier one skips both.
Attention, softmax and softmax_topk use this.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Sequence

import torch

# Bound once: a call like an earlier one takes ten microseconds, and each attribute of a module 20 nanoseconds.
from torch._C import (
    _are_functorch_transforms_active,
    _has_storage,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from warpspec.common.hardware import VECTOR_BYTES

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a private class: a torch without it compares signatures
    TensorGuards = None

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
MOST_REMEMBERED = 4096
BACKEND_VARIABLE = "WARPSPEC_BACKEND"  # names the backend of calls that do not

# The mapping beneath os.environ, which raises and catches a KeyError for an unset variable: that takes a microsecond.
_environment = os.environ._data


class Remembered(dict):
    """Results of earlier calls, keyed by all that finding them looked at; forgets everything once it is full."""

    last = (None, None)  # what ``recall`` found last: to compare keys takes less than to hash one
    latest = None  # the call before, for those who can tell without a key whether the next one is like it

    def __init__(self):
        super().__init__()
        self.recalled = {}  # what ``latest`` was, by the id of the result

    def remember(self, key: tuple, found) -> None:
        if len(self) >= MOST_REMEMBERED:
            self.clear()
        self[key] = found

    def clear(self) -> None:
        super().clear()
        self.last, self.latest = (None, None), None
        self.recalled.clear()

    def recall(self, key: tuple):
        """The result of an earlier call with an equal key; None if there is none. For few different calls."""
        last, found = self.last
        if key == last:
            return found
        found = self.get(key)
        if found is not None:
            self.last = (key, found)
        return found


def variable_reader(name: str) -> Callable[[], bytes | None]:
    """A function that returns an environment variable as the system has it (None: not set)."""
    key = os.environ.encodekey(name)
    return lambda: _environment.get(key)


backend_variable = variable_reader(BACKEND_VARIABLE)


def signature(tensor: torch.Tensor) -> tuple:
    """The properties of a tensor that checks look at. (They refuse layouts without strides and address.)"""
    if tensor.layout is not torch.strided:
        return (tensor.layout,)
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.get_device(),
        tensor.data_ptr() % VECTOR_BYTES,  # kernels depend on it
    )


def signatures(tensors: Iterable[torch.Tensor | None]) -> list | None:
    """The place of each tensor among ``tensors`` with its ``signature``, and whether autograd records what is computed
    from them.

    Returns None if one of them is ``watched`` or is not a tensor. This is one loop, because ``watched``, ``recorded``
    and ``signature`` called for each tensor would take twice as long. A tensor on the meta device has a signature, but
    no remembered call is on that device. Raises RuntimeError for a layout without strides and address.
    """
    found, requires_grad = [], False
    for place, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if type(tensor) not in PLAIN_TENSORS or tensor.is_neg():
            return None
        if tensor.requires_grad:
            requires_grad = True
        address = tensor.data_ptr() % VECTOR_BYTES
        found.append((place, tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), address))
    found.append(requires_grad and torch.is_grad_enabled())
    return found


class Likeness:
    """Tells whether tensors are like those that it was made of, by all that ``signatures`` looks at: by the guards of
    compiled code, which compare them in a fifth of the time that signatures take, or by signatures where torch has no
    such guards."""

    __slots__ = ("absences", "absent", "addresses", "given", "guards", "recorded", "requires_grad")

    def __init__(self, tensors: Sequence[torch.Tensor | None]):
        """tensors: what has ``signatures``."""
        missing = [tensor is None for tensor in tensors]
        self.given = _picker([place for place, none in enumerate(missing) if not none])
        self.absent, self.absences = _picker([i for i, none in enumerate(missing) if none]), sum(missing)
        given = self.given(tensors)
        if TensorGuards is None:
            self.guards = _SignatureGuards(given)
        else:
            self.guards = TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self.addresses = [tensor.data_ptr() % VECTOR_BYTES for tensor in given]
        self.requires_grad = any(tensor.requires_grad for tensor in given)
        self.recorded = self.requires_grad and torch.is_grad_enabled()

    def fits(self, tensors: Sequence) -> bool:
        """Whether these are alike. They may be any kind of objects; only where nobody watches (``observed``)."""
        given = self.given(tensors)
        if not self.guards.check(*given) or self.absent(tensors).count(None) != self.absences:
            return False
        if self.requires_grad and torch.is_grad_enabled() != self.recorded:
            return False
        return self.addresses == [tensor.data_ptr() % VECTOR_BYTES for tensor in given]


class _SignatureGuards:
    """Stands for TensorGuards where torch has none."""

    __slots__ = ("signatures",)

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.signatures = signatures(tensors)

    def check(self, *tensors) -> bool:
        """Whether these objects are tensors with equal signatures."""
        return (
            all(isinstance(one, torch.Tensor) for one in tensors) and signatures(tensors) == self.signatures
        )


def _picker(places: list[int]) -> Callable[[Sequence], tuple]:
    """A function that picks the items at these places."""
    return operator.itemgetter(*places) if len(places) > 1 else lambda items: tuple(items[i] for i in places)


def watched(*tensors: torch.Tensor) -> bool:
    """Whether something must see an operator call on these tensors, so that the call goes through torch's dispatcher.

    That is so while calls are ``observed``, for a tensor subclass, on the meta device, for a negated view
    (``z.conj().imag``), which the dispatcher turns into plain memory, and for what a transform has wrapped or batched,
    which has no storage. Other calls bypass it: dispatching an operator written in Python takes longer than ten
    launches and imports torch._dynamo. Autograd alone does not need it, see ``recorded``.
    """
    if observed():
        return True
    for tensor in tensors:
        if type(tensor) not in PLAIN_TENSORS or tensor.is_neg() or not _has_storage(tensor) or tensor.is_meta:
            return True
    return False


def observed() -> bool:
    """Whether every operator call must be seen now: while tracing, in a mode, or in a functorch transform."""
    return (
        is_compiling()
        or _is_tracing()
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def traced(*tensors: torch.Tensor) -> bool:
    """``watched``, but for function modes, such as ``torch.set_default_device`` makes: they see Python's calls, and can
    do without an operator."""
    return (
        is_compiling()
        or _is_tracing()
        or _len_torch_dispatch_stack() > 0
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any(
            type(tensor) not in PLAIN_TENSORS or tensor.is_neg() or not _has_storage(tensor) or tensor.is_meta
            for tensor in tensors
        )
    )


def recorded(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records what is computed from these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
