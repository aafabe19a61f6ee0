"""Derivatives of operators under autograd and under ``torch.func``'s transforms (grad, vjp and what they make up).

A transform does not know what ``torch.library`` registers; it knows a ``torch.autograd.Function`` with
``setup_context``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

_rules: dict[Callable, tuple[Callable, Callable | None]] = {}  # operator: (backward, setup_context)


def register_derivatives(
    operator: Callable, backward: Callable, setup_context: Callable | None = None
) -> None:
    """Register an operator's derivatives. backward, setup_context: as a custom operator's ``register_autograd`` takes
    them; backward returns a tuple, or raises."""
    operator.register_autograd(backward, setup_context=setup_context)
    _rules[operator] = (backward, setup_context)


def call_operator(operator: Callable, *arguments):
    """operator(*arguments); where a transform takes gradients, with the derivatives registered here."""
    if takes_gradients():
        return _Differentiable.apply(*arguments, operator)
    return operator(*arguments)


def takes_gradients() -> bool:
    """Whether one of the transforms takes gradients, of whichever tensors."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    return any(transform.key() == TransformType.Grad for transform in get_interpreter_stack())


def direct_apply(function: type[torch.autograd.Function]) -> Callable:
    """``function.apply`` without what torch does in Python for transforms: of calls that nobody watches."""
    return super(torch.autograd.Function, function).apply


class _Differentiable(torch.autograd.Function):
    """An operator, the last argument, so that ``ctx.needs_input_grad`` begins with the operator's own arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        found = arguments[-1](*arguments[:-1])
        return tuple(found) if isinstance(found, list) else found

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.backward_rule, setup_context = _rules[inputs[-1]]
        if setup_context is not None:
            setup_context(ctx, inputs[:-1], output)

    @staticmethod
    def backward(ctx, *gradients):
        return (*ctx.backward_rule(ctx, *gradients), None)
