"""Functions without gradients under autograd: they run at once, and backward() says that there are none."""

from __future__ import annotations

from collections.abc import Callable

import torch


def forward_only(refusal: str, function: Callable, *arguments):
    """function(*arguments), past torch's dispatcher. Where autograd records it, going back through the result raises
    NotImplementedError(refusal).

    function: returns a new tensor or a tuple of new ones; floating ones are what autograd records.
    """
    return _ForwardOnly.apply(refusal, function, *arguments)


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, refusal, function, *arguments):
        ctx.refusal = refusal
        return function(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(ctx.refusal)


def refuse_backward(refusal: str) -> Callable:
    """What an operator without gradients registers as its backward function."""

    def backward(ctx, *gradients):
        raise NotImplementedError(refusal)

    return backward
