"""The torch operator behind ``softmax_topk``: checks, backend choice, outputs, one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.forward_only import refuse_backward
from warpspec.common.launch import target_of
from warpspec.common.repeated import Remembered, backend_variable, signature
from warpspec.common.transforms import register_derivatives
from warpspec.softmax.problem import as_matrix
from warpspec.softmax.topk import reference
from warpspec.softmax.topk.problem import check

NO_GRADIENTS = (
    "warpspec.softmax.softmax_topk: gradients are not implemented (forward only); detach logits, or call it under "
    "torch.no_grad()"
)


def new_outputs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (probs, indices)."""
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def call(logits: torch.Tensor, k, renormalize, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax_topk`` of a plain tensor; uses remembered calls where possible. Raises what ``softmax_topk`` raises."""
    result = None
    if backend == "auto" and type(k) is int and type(renormalize) is bool:
        result = run_again(logits, k, renormalize)
    return run(logits, k, renormalize, backend) if result is None else result


def run(logits: torch.Tensor, k: int, renormalize: bool, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Check, choose the backend, compute. Nothing is launched or allocated before all checks are done."""
    check(logits, k, renormalize)
    backend = resolve_backend(backend, logits.device)
    if backend == "reference":
        probs, indices = reference.softmax_topk(logits.detach().float(), k, renormalize)
        return probs.to(torch.float32), indices
    probs, indices = new_outputs(logits, k)
    if probs.numel() == 0:
        return probs, indices
    matrix = as_matrix(logits)
    copied = matrix is None
    if copied:
        matrix = as_matrix(logits.contiguous())
    from warpspec.softmax.topk import launch  # it loads the DSL, which the reference does not need

    outputs = (probs.view(-1, k), indices.view(-1, k))
    with target_of(logits.device).current():
        kernel = launch.launcher(matrix, k, renormalize)
        kernel(matrix.detach(), *outputs)
    if backend != "sim" and not copied:
        is_matrix = logits.shape == matrix.shape and logits.stride() == matrix.stride()
        layout = None if is_matrix else (matrix.shape, matrix.stride())
        like = [empty_like_without_memory(tensor) for tensor in (probs, indices)]
        call = RememberedCall(kernel, logits.get_device(), *like, layout)
        _calls.remember(_key(logits, k, renormalize), call)
    return probs, indices


@dataclass(frozen=True, slots=True)
class RememberedCall:
    """A call that was made: its kernel, templates of its results without memory, and the layout of the logits as a
    matrix (None if they are one)."""

    kernel: object
    device: int
    probs: torch.Tensor
    indices: torch.Tensor
    layout: tuple | None


_calls = Remembered()  # calls on CUDA tensors with backend "auto", by everything that ``run`` looks at


def empty_like_without_memory(tensor: torch.Tensor) -> torch.Tensor:
    like = torch.empty_like(tensor)
    like.untyped_storage().resize_(0)
    return like


def _key(logits: torch.Tensor, k: int, renormalize: bool) -> tuple:
    return (signature(logits), k, renormalize)


def run_again(logits: torch.Tensor, k: int, renormalize: bool):
    """(probs, indices) if the call is like one that ``run`` has made before, otherwise None.

    Checking the arguments and finding their kernel again would take most of a small call's time.
    """
    call = _calls.get(_key(logits, k, renormalize))
    if call is None or backend_variable() is not None or torch.cuda.current_device() != call.device:
        return None
    # Takes half the time of torch.empty.
    probs, indices = (torch.empty_like(call.probs), torch.empty_like(call.indices))
    if logits.requires_grad:
        logits = logits.detach()
    if call.layout is None:
        call.kernel(logits, probs, indices)
    else:
        call.kernel(logits.as_strided(*call.layout), probs.view(-1, k), indices.view(-1, k))
    return probs, indices


@torch.library.custom_op(
    "warpspec::softmax_topk",
    mutates_args=(),
    schema="(Tensor logits, SymInt k, bool renormalize, str backend) -> (Tensor, Tensor)",
)
def softmax_topk_operator(logits, k, renormalize, backend):
    """Operator of ``softmax_topk``: (probs, indices)."""
    return run(logits, k, renormalize, backend)


@softmax_topk_operator.register_fake
def _(logits, k, renormalize, backend):
    check(logits, k, renormalize)
    return new_outputs(logits, k)


register_derivatives(softmax_topk_operator, refuse_backward(NO_GRADIENTS))
