"""Functions whose products have the dtypes that they say, under ``torch.autocast`` too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch

DEVICES = ("cpu", "cuda")


def without_autocast(function: Callable) -> Callable:
    """The function with autocast off, which would round the operands of fp32 products to bf16."""

    @functools.wraps(function)
    def run(*arguments, **options):
        with contextlib.ExitStack() as stack:
            for device in DEVICES:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*arguments, **options)

    return run
