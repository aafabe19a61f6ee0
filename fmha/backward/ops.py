"""The torch operator of attention's gradients and its registration with autograd, for calls that somebody watches
(``common.repeated``). Other calls use ``function``.

``warpspec::fmha_backward`` takes the gradients of o and lse, both results, the forward call's arguments, and a flag for
each of ``problem.DIFFERENTIABLE``; it returns the wanted gradients. It has no derivative of its own.
"""

from __future__ import annotations

import torch

from warpspec.common.forward_only import refuse_backward
from warpspec.common.repeated import Remembered, signatures
from warpspec.common.transforms import call_operator, register_derivatives
from warpspec.fmha.backward import call
from warpspec.fmha.backward.problem import DIFFERENTIABLE
from warpspec.fmha.operands import INPUTS
from warpspec.fmha.ops import SCHEMA, fmha_forward, key_of, unflat

BACKWARD_SCHEMA = f"(Tensor? do, Tensor? dlse, Tensor o, Tensor lse, bool[] wanted, {SCHEMA}) -> Tensor[]"
NO_SECOND_DERIVATIVES = "warpspec.fmha.attention: second derivatives are not implemented"

_checked = Remembered()  # calls on CUDA tensors: the next identical call needs no checks


@torch.library.custom_op("warpspec::fmha_backward", mutates_args=(), schema=BACKWARD_SCHEMA)
def fmha_backward(do, dlse, o, lse, wanted, *arguments):
    """Compute the wanted gradients, in the order of DIFFERENTIABLE, with their tensors' shapes and dtypes."""
    operands, options, backend = unflat(arguments)
    operands = operands._replace(o=o, lse=lse)
    return call.run(checked(operands, options, backend, wanted, do, dlse), operands, do, dlse)


def checked(operands, options, backend, wanted, do, dlse) -> call.BackwardCall:
    """``call.check``, or what it returned for an identical call."""
    key, seeds = key_of(operands, options, backend), signatures((do, dlse))
    if key is None or seeds is None:
        return call.check(operands, options, backend, wanted, do, dlse)
    key = (*key, *seeds, *wanted, call.is_deterministic(options))
    found = _checked.get(key)
    if found is None:
        found = call.check(operands, options, backend, wanted, do, dlse)
        _checked.remember(key, found)
    return found


@fmha_backward.register_fake
def _(do, dlse, o, lse, wanted, *arguments):
    operands, options, _ = unflat(arguments)
    problem = call.backward_problem(operands, options, wanted, memory=False)
    return [call.new_gradient(getattr(operands, name)) for name in problem.wanted]


@fmha_backward.register_vmap
def _(info, in_dims, *arguments):
    """Compute the gradients of each call of a batch on its own, as vmap does with the forward operator."""
    batched = list(zip(arguments, in_dims, strict=True))  # in_dims: an int, or not for what all calls share
    calls = [
        fmha_backward(*(a.select(dim, i) if isinstance(dim, int) else a for a, dim in batched))
        for i in range(info.batch_size)
    ]
    gradients = [torch.stack(each) for each in zip(*calls, strict=True)]
    return gradients, [0] * len(gradients)


register_derivatives(fmha_backward, refuse_backward(NO_SECOND_DERIVATIVES))


def setup_context(ctx, inputs, output) -> None:
    """Save what backward needs from a call of ``fmha_forward``."""
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
    gradients = iter(call_operator(fmha_backward, do, dlse, o, lse, wanted, *tensors, *ctx.rest))
    for name, wants in zip(DIFFERENTIABLE, wanted, strict=True):
        if wants:
            found[INPUTS.index(name)] = next(gradients)
    return tuple(found)


register_derivatives(fmha_forward, backward, setup_context)
