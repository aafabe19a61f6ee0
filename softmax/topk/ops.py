"""The torch operator behind ``softmax_topk``: checks, backend choice, outputs, one launch."""

from __future__ import annotations

import torch

from warpspec.common.dispatch import resolve_backend
from warpspec.softmax.problem import as_matrix
from warpspec.softmax.topk import reference
from warpspec.softmax.topk.problem import check


def new_outputs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(probs, indices), uninitialised."""
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def run(logits: torch.Tensor, k: int, renormalize: bool, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Check, choose the backend, compute. Nothing is launched or allocated before all checks."""
    check(logits, k, renormalize)
    backend = resolve_backend(backend, logits.device)
    if backend == "reference":
        probs, indices = reference.softmax_topk(logits.detach().float(), k, renormalize)
        return probs.to(torch.float32), indices
    probs, indices = new_outputs(logits, k)
    if probs.numel() == 0:
        return probs, indices
    matrix = as_matrix(logits)
    if matrix is None:
        matrix = as_matrix(logits.contiguous())
    from warpspec.softmax.topk import launch  # loads the DSL, which the reference does without

    arguments = (matrix.detach(), probs.view(-1, k), indices.view(-1, k), renormalize)
    if backend == "sim":
        launch.run_sim(*arguments)
    else:
        with torch.cuda.device(logits.device):
            launch.run_cuda(*arguments)
    return probs, indices


@torch.library.custom_op(
    "warpspec::softmax_topk",
    mutates_args=(),
    schema="(Tensor logits, SymInt k, bool renormalize, str backend) -> (Tensor, Tensor)",
)
def softmax_topk_operator(logits, k, renormalize, backend):
    """(probs, indices) of ``softmax_topk``."""
    return run(logits, k, renormalize, backend)


@softmax_topk_operator.register_fake
def _(logits, k, renormalize, backend):
    check(logits, k, renormalize)
    return new_outputs(logits, k)


def _backward(context, *gradients):
    raise NotImplementedError(
        "warpspec.softmax.softmax_topk: gradients are not implemented (forward only); detach logits, or call it "
        "under torch.no_grad()"
    )


softmax_topk_operator.register_autograd(_backward)
