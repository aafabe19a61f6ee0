"""The torch operator behind attention's gradients, and what autograd needs to find it.

``warpspec::fmha_backward`` takes the gradients of o and lse, both results, the forward call's arguments, and for each
of ``problem.DIFFERENTIABLE`` whether its gradient is wanted; it returns those. Its own derivatives are refused.
"""

from __future__ import annotations

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.launch import SIMULATED, SIMULATED_ARCH, target_of
from warpspec.fmha.backward import reference
from warpspec.fmha.backward.launch import Gradients, check_supported, run_kernels
from warpspec.fmha.backward.problem import DIFFERENTIABLE, BackwardProblem
from warpspec.fmha.operands import INPUTS, Operands, Options
from warpspec.fmha.ops import SCHEMA, fmha_forward, kernel_operands, unflat
from warpspec.fmha.problem import AttentionProblem

BACKWARD_SCHEMA = f"(Tensor? do, Tensor? dlse, Tensor o, Tensor lse, bool[] wanted, {SCHEMA}) -> Tensor[]"
LEADING = 5  # arguments before those of the forward call


def backward_problem(
    operands: Operands, options: Options, wanted, *, memory=True, **options_
) -> BackwardProblem:
    """Check a call, as its forward pass was, and whether it has gradients."""
    names = tuple(name for name, wants in zip(DIFFERENTIABLE, wanted, strict=True) if wants)
    return BackwardProblem.check(AttentionProblem.check(operands, options, memory), names, **options_)


@torch.library.custom_op("warpspec::fmha_backward", mutates_args=(), schema=BACKWARD_SCHEMA)
def fmha_backward(do, dlse, o, lse, wanted, *arguments):
    """The gradients that are wanted, in the order of DIFFERENTIABLE, of their tensors' shapes and dtypes."""
    operands, options, backend = unflat(arguments)
    problem = backward_problem(
        operands,
        options._replace(num_splits=None),
        wanted,
        has_do=do is not None,
        has_dlse=dlse is not None,
        deterministic=options.deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    forward = problem.forward
    backend = resolve_backend(backend, forward.device)
    results = {name: _new(getattr(operands, name)) for name in problem.wanted}
    target = None
    if backend != "reference":
        target = SIMULATED[SIMULATED_ARCH] if backend == "sim" else target_of(forward.device)
        check_supported(problem, target)
    if forward.is_empty or operands.k.numel() == 0:
        for result in results.values():
            result.zero_()
        return list(results.values())
    call = operands._replace(sink=operands.sink, o=o, lse=lse)
    record = kernel_operands(forward, call)
    if forward.packed_q:
        do, dlse = (None if t is None else t[None] for t in (do, dlse))
    if target is None:
        found = reference.backward(problem, record, do, dlse)
        for name, result in results.items():
            result.copy_(found[name].view(result.shape))
    else:
        packed = {name: t[None] if forward.packed_q and name in "qkv" else t for name, t in results.items()}
        run_kernels(problem, target, record, Gradients(do, dlse, **packed))
    return list(results.values())


def _new(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised gradient: of the tensor's shape and dtype, contiguous."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@fmha_backward.register_fake
def _(do, dlse, o, lse, wanted, *arguments):
    operands, options, _ = unflat(arguments)
    problem = backward_problem(operands, options, wanted, memory=False)
    return [_new(getattr(operands, name)) for name in problem.wanted]


def _no_second_derivatives(context, *gradients):
    raise NotImplementedError("warpspec.fmha.attention: second derivatives are not implemented")


fmha_backward.register_autograd(_no_second_derivatives)


def setup_context(ctx, inputs, output) -> None:
    """What backward needs of a call of ``fmha_forward``."""
    o, stats = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: len(INPUTS)], o, stats)
    ctx.rest = inputs[len(INPUTS) :]


def backward(ctx, do, dstats):
    """Gradients of the arguments of ``fmha_forward``; None for those that need none."""
    *tensors, o, stats = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[INPUTS.index(name)] for name in DIFFERENTIABLE]
    found = [None] * (len(INPUTS) + len(ctx.rest))
    if (do is None and dstats is None) or not any(wanted):
        return tuple(found)
    if len(stats) != 1:  # a state, or a call by hand of the operator without lse
        options = unflat((*tensors, *ctx.rest))[1]
        if options.normalize:
            raise NotImplementedError(
                "return_lse: gradients are not implemented for an operator called without lse"
            )
    dlse = None if dstats is None else dstats[0]
    lse = stats[0] if len(stats) else stats
    gradients = iter(fmha_backward(do, dlse, o, lse, wanted, *tensors, *ctx.rest))
    for name, wants in zip(DIFFERENTIABLE, wanted, strict=True):
        if wants:
            found[INPUTS.index(name)] = next(gradients)
    return tuple(found)


fmha_forward.register_autograd(backward, setup_context=setup_context)
