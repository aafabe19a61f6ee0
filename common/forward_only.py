"""Functions without gradients under autograd: the call works, and backward() raises."""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpspec.common.transforms import direct_apply


def forward_only(refusal: str, function: Callable, *arguments):
    """Return function(*arguments), bypassing torch's dispatcher.

    If autograd records the call, backward() through the result raises NotImplementedError(refusal). function: returns a
    new tensor or a tuple of new tensors; autograd records the floating ones.
    """
    return _apply(refusal, function, *arguments)


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, refusal, function, *arguments):
        ctx.refusal = refusal
        return function(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(ctx.refusal)


_apply = direct_apply(_ForwardOnly)


def refuse_backward(refusal: str) -> Callable:
    """The backward function that an operator without gradients registers."""

    def backward(ctx, *gradients):
        raise NotImplementedError(refusal)

    return backward
