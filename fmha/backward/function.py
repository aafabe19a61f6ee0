"""The ``torch.autograd.Function`` that autograd records for an attention call that nobody watches
(``common.repeated``). Torch's operators would take longer than all launches together.

If the forward call is remembered, a backward call like an earlier one is neither checked nor planned again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch

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
        saved = (o, stats[0], *[operands[place] for place in call.present])
        ctx.save_for_backward(*saved)
        ctx.recorded = (call, options, backend, addresses_of(saved))
        return (o, *stats) if options.return_lse or not options.normalize else o

    @staticmethod
    def backward(ctx, do, *dstats):
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[LEADING:]
        call, options, backend, addresses = ctx.recorded
        dlse = dstats[0] if dstats else None
        if (do is None and all(t is None for t in dstats)) or not any(wanted):
            return (None,) * len(ctx.needs_input_grad)
        if not observed() and not torch.is_grad_enabled():
            key = key_of(options, wanted, do, dlse, saved, addresses)
            known = None if key is None else call.gradients.recall(key)
            if known is not None and known.direct is not None:
                return spread(wanted, known.direct.run((do, dlse, *saved)))
            if known is not None:
                return spread(wanted, backward_call.run(known, restored(call, saved), do, dlse))
        arguments = (call, options, backend, wanted, do, dlse, saved, addresses)
        tensors = [t for t in (do, dlse, *saved) if t is not None]
        if watched(*tensors):
            operands = restored(call, saved)
            rest = ops.flat(operands, options, backend)
            gradients = call_operator(fmha_backward, do, dlse, operands.o, operands.lse, list(wanted), *rest)
        elif torch.is_grad_enabled():  # create_graph
            gradients = forward_only(NO_SECOND_DERIVATIVES, lambda *_: tuple(compute(*arguments)), *tensors)
        else:
            gradients = compute(*arguments)
        return spread(wanted, gradients)


_apply = direct_apply(Attention)


def spread(wanted: tuple[bool, ...], gradients) -> tuple:
    """Spread the wanted gradients over the arguments of ``Attention``."""
    return spreader(wanted)((*gradients, None))


@functools.cache
def spreader(wanted: tuple[bool, ...]) -> Callable:
    """A function that picks the gradients of the arguments of ``Attention`` from the wanted ones and a last None."""
    places = [sum(wanted[:i]) if wants else -1 for i, wants in enumerate(wanted)]
    return operator.itemgetter(*[-1] * LEADING, *places)


def addresses_of(tensors) -> list[int]:
    """The addresses of plain tensors."""
    return list(map(torch.Tensor.data_ptr, tensors))


def key_of(options: Options, wanted, do, dlse, saved, addresses) -> tuple | None:
    """The key under which a backward call is remembered, beside its forward call; None if it must not be.

    addresses: of the saved tensors in the forward call. At the same addresses they are what its own key describes;
    otherwise somebody has replaced them (checkpointing, or a hook), and their signatures are part of the key.
    """
    try:
        replaced = () if addresses_of(saved) == addresses else saved
        found = signatures((do, dlse, *replaced))
    except RuntimeError:  # a tensor without an address: sparse, or a batch
        return None
    if found is None:
        return None
    return (wanted, backward_call.is_deterministic(options), backend_variable(), *found)


def restored(call: ops.Call, saved: tuple[torch.Tensor, ...]) -> Operands:
    """A forward call's operands with its results, from the tensors that ``Attention`` saved."""
    found = [None] * len(Operands._fields)
    found[PLACES.o], found[PLACES.lse], *inputs = saved
    for place, tensor in zip(call.present, inputs, strict=True):
        found[place] = tensor
    return Operands._make(found)


def compute(call: ops.Call, options: Options, backend: str, wanted, do, dlse, saved, addresses):
    """Compute the wanted gradients, in the order of DIFFERENTIABLE. saved: what ``Attention`` saved."""
    operands = restored(call, saved)
    key = key_of(options, wanted, do, dlse, saved, addresses)
    known = None if key is None else call.gradients.get(key)
    if known is None:
        known = backward_call.check(operands, options, backend, wanted, do, dlse)
        if key is not None:
            call.gradients.remember(key, known)
    return backward_call.run(known, operands, do, dlse)
