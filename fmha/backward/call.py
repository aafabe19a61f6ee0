"""Check a call of attention's gradients, choose its backend, and compute it.

``check`` does everything that depends neither on the tensors' values nor on their addresses; ``run`` does the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from warpspec.common.allocation import Block, allocate, block
from warpspec.common.backend import resolve_backend
from warpspec.common.launch import target_of
from warpspec.common.strides import regular_strides
from warpspec.fmha.backward import launch, reference
from warpspec.fmha.backward.direct import HELD, Direct, direct, is_direct
from warpspec.fmha.backward.launch import Gradients
from warpspec.fmha.backward.problem import DIFFERENTIABLE, BackwardProblem
from warpspec.fmha.backward.ranges import check_ascending
from warpspec.fmha.operands import Operands, Options
from warpspec.fmha.ops import is_regular, kernel_operands
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.values import are_checked


class BackwardCall(NamedTuple):
    """A checked call.

    computed: the problem that kernels compute (``BackwardProblem.padded``). prepared: the kernels; None: the reference.
    empty: nothing is launched, gradients are zeros. regular: kernels take the inputs and o as they are
    (``regular_operands``). aligned: kernels can read do as it is (``launch.aligned``). pads: kernels compute it on
    padded copies. results: the wanted gradients, in the order of DIFFERENTIABLE; workspace: what kernels need beside
    them, None where it is not known in advance. direct: the launches, if nothing else has to be done.
    """

    problem: BackwardProblem
    computed: BackwardProblem
    prepared: launch.Prepared | None
    empty: bool
    regular: bool
    aligned: bool
    pads: bool
    results: tuple[Block, ...]
    workspace: launch.Workspace | None
    direct: Direct | None = None


def backward_problem(
    operands: Operands, options: Options, wanted, *, memory=True, **options_
) -> BackwardProblem:
    """Check a call as its forward pass was checked, and that it has gradients. wanted: a flag for each of
    DIFFERENTIABLE."""
    names = tuple(name for name, wants in zip(DIFFERENTIABLE, wanted, strict=True) if wants)
    return BackwardProblem.check(AttentionProblem.check(operands, options, memory), names, **options_)


def is_deterministic(options: Options) -> bool:
    """Whether gradients are to be the same bits every time."""
    return options.deterministic or torch.are_deterministic_algorithms_enabled()


def check(operands: Operands, options: Options, backend: str, wanted, do, dlse) -> BackwardCall:
    """Check everything, choose the backend, and prepare its kernels.

    operands: the forward call's, with its results o and lse. wanted: a flag for each of DIFFERENTIABLE. do, dlse:
    gradients of the results, at least one. Raises what ``attention`` documents for backward().
    """
    inputs = operands._replace(o=None, lse=None)
    problem = backward_problem(
        inputs,
        options._replace(num_splits=None),
        wanted,
        has_do=do is not None,
        has_dlse=dlse is not None,
        deterministic=is_deterministic(options),
    )
    forward = problem.forward
    backend = resolve_backend(backend, forward.device)
    empty = forward.is_empty or operands.k.numel() == 0
    prepared = workspace = known = None
    computed, pads = problem.padded, False
    if backend != "reference":
        target = target_of(forward.device)
        # Both raise UnsupportedProblem for what the kernels do not do.
        prepared = (launch.supported if empty else launch.prepare)(computed, target)
        record = kernel_operands(forward, operands, (operands.o, operands.lse, None, None), batched=False)
        if operands.ranges is not None and not empty and are_checked(forward.device):
            check_ascending(forward, record)
        if not empty:
            pads = computed is not problem and prepared.config.rows is None
        if not (empty or pads):
            workspace = launch.workspace_of(prepared, computed, record)
    regular = regular_strides(operands.o) is operands.o and is_regular(operands)
    aligned = prepared is None or do is None or launch.aligned(do) is do
    results = tuple(block(t.shape, t.dtype) for t in (getattr(operands, name) for name in problem.wanted))
    if workspace is not None and regular and aligned and is_direct(problem, operands, do, dlse):
        known = direct(prepared, problem, operands, results, workspace)
    return BackwardCall(problem, computed, prepared, empty, regular, aligned, pads, results, workspace, known)


def run(call: BackwardCall, operands: Operands, do, dlse) -> list[torch.Tensor]:
    """Compute the wanted gradients, in the order of DIFFERENTIABLE, contiguous, each with its tensor's shape."""
    if call.direct is not None:
        held = [t for t in (getattr(operands, name) for name in HELD) if t is not None]
        return call.direct.run((do, dlse, *held))
    problem, forward = call.problem, call.problem.forward
    results = allocate(call.results, operands.q.device)
    if call.empty:
        for result in results:
            result.zero_()
        return results
    native, outputs = call.prepared is not None, (operands.o, operands.lse, None, None)
    record = kernel_operands(forward, operands, outputs, call.regular, not native)
    written = dict(zip(problem.wanted, results, strict=True))
    if not native:
        if forward.requests.packed_q:
            do, dlse = (None if t is None else t[None] for t in (do, dlse))
        found = reference.backward(problem, record, do, dlse)
        for name, result in written.items():
            result.copy_(found[name].view(result.shape))
        return results
    if not call.aligned:
        do = launch.aligned(do)
    gradients = Gradients(do, dlse, **written)
    if call.pads:
        run_padded(call.prepared, call.computed, record, gradients)
    else:
        launch.run_kernels(call.prepared, call.computed, record, gradients, call.workspace)
    return results


def run_padded(
    prepared: launch.Prepared, padded: BackwardProblem, record: Operands, gradients: Gradients
) -> None:
    """Run ``launch.run_kernels`` on copies whose rows are padded with zeros, which change no product and no sum."""
    size = padded.forward.head_dim

    def widened(tensor):
        return None if tensor is None else regular_strides(pad(tensor, (0, size - tensor.shape[-1])))

    rows = {name: widened(getattr(record, name)) for name in ("q", "k", "v", "o")}
    wide = {name: new_gradient(rows[name]) for name in "qkv" if getattr(gradients, name) is not None}
    own = gradients._replace(do=widened(gradients.do), **wide)
    launch.run_kernels(prepared, padded, record._replace(**rows), own)
    for name, gradient in wide.items():
        target = getattr(gradients, name)
        target.copy_(gradient[..., : target.shape[-1]])


def new_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised, contiguous gradient with the tensor's shape and dtype."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
