"""The ``torch.autograd.Function`` that autograd records for an attention call that nobody watches
(``common.repeated``). Torch's operators would take longer than all launches together.

If the forward call is remembered, a backward call like an earlier one is neither checked nor planned again.
"""

from __future__ import annotations

import torch
from torch._C import _has_storage

from warpspec.common.forward_only import forward_only
from warpspec.common.repeated import backend_variable, observed, signatures, watched
from warpspec.common.transforms import call_operator, direct_apply
from warpspec.fmha import ops
from warpspec.fmha.backward import call as backward_call
from warpspec.fmha.backward.ops import NO_SECOND_DERIVATIVES, fmha_backward
from warpspec.fmha.operands import PLACES, Operands, Options

LEADING = 4  # number of arguments of ``Attention`` before those of DIFFERENTIABLE


def forward(call: ops.Call, operands: Operands, options: Options, backend: str):
    """Run a checked call that is ``recorded``: (o, stats). stats: (lse,), (row_max, row_sum), or () if nobody asks."""
    differentiable = (operands.q, operands.k, operands.v, operands.sink, operands.bias)
    found = _apply(call, operands, options, backend, *differentiable)
    return (found, ()) if isinstance(found, torch.Tensor) else (found[0], found[1:])


class Attention(torch.autograd.Function):
    """``attention`` as a function of the tensors in ``problem.DIFFERENTIABLE``; the operands hold the other tensors."""

    @staticmethod
    def forward(ctx, call: ops.Call, operands: Operands, options: Options, backend: str, *differentiable):
        o, stats = ops.run(call, operands)
        ctx.set_materialize_grads(False)
        saved = list(operands)
        saved[PLACES.o], saved[PLACES.lse] = o, stats[0]
        ctx.save_for_backward(*saved)
        ctx.call, ctx.options, ctx.backend = call, options, backend
        return (o, *stats) if options.return_lse or not options.normalize else o

    @staticmethod
    def backward(ctx, do, *dstats):
        operands = Operands._make(ctx.saved_tensors)
        wanted = ctx.needs_input_grad[LEADING:]
        dlse = dstats[0] if dstats else None
        if (do is None and all(t is None for t in dstats)) or not any(wanted):
            return (None,) * len(ctx.needs_input_grad)
        if not observed() and not torch.is_grad_enabled():
            known = remembered(ctx, operands, wanted, do, dlse)
            if known is not None:
                return spread(wanted, backward_call.run(known, operands, do, dlse))
        arguments = (ctx.call, operands, ctx.options, ctx.backend, wanted, do, dlse)
        tensors = [t for t in (do, dlse, *operands) if t is not None]
        if watched(*tensors):
            rest = ops.flat(operands, ctx.options, ctx.backend)
            gradients = call_operator(fmha_backward, do, dlse, operands.o, operands.lse, list(wanted), *rest)
        elif torch.is_grad_enabled():  # create_graph
            gradients = forward_only(NO_SECOND_DERIVATIVES, lambda *_: tuple(compute(*arguments)), *tensors)
        else:
            gradients = compute(*arguments)
        return spread(wanted, gradients)


_apply = direct_apply(Attention)


def spread(wanted, gradients) -> tuple:
    """Spread the wanted gradients over the arguments of ``Attention``."""
    found = iter(gradients)
    return (None,) * LEADING + tuple([next(found) if wants else None for wants in wanted])


def key_of(options: Options, wanted, found: list) -> tuple:
    """The key under which a backward call is remembered, beside its forward call. found: signatures of its tensors."""
    return (wanted, backward_call.is_deterministic(options), backend_variable(), *found)


def remembered(ctx, operands: Operands, wanted, do, dlse) -> backward_call.BackwardCall | None:
    """What ``check`` returned for an earlier backward call like this one, on plain tensors that nobody watches; else
    None."""
    for tensor in (do, dlse):
        if tensor is not None and not _has_storage(tensor):  # sparse, or a batch
            return None
    found = signatures((do, dlse, *operands))
    return None if found is None else ctx.call.gradients.get(key_of(ctx.options, wanted, found))


def compute(call: ops.Call, operands: Operands, options: Options, backend: str, wanted, do, dlse):
    """Compute the wanted gradients, in the order of DIFFERENTIABLE."""
    known, found = None, signatures((do, dlse, *operands))
    if found is not None:
        known = call.gradients.get(key_of(options, wanted, found))
    if known is None:
        known = backward_call.check(operands, options, backend, wanted, do, dlse)
        if found is not None:
            call.gradients.remember(key_of(options, wanted, found), known)
    return backward_call.run(known, operands, do, dlse)
