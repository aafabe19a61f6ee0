"""The host side of a kernel: the function that is compiled and called.

It is the same for all phases and architectures.
"""

from __future__ import annotations

import importlib

from cuda.bindings.driver import CUstream

from warpspec.common.device.host import host_function
from warpspec.common.operands import fakes
from warpspec.swap.config import SwapConfig
from warpspec.swap.operands import Operands, StepNumbers, taken


class SwapHost:
    """The kernel's host side. Compile with ``cute.compile(host(config), ...)`` and the arguments of ``__call__``.

    A phase's class adds ``launch``, which receives the tensors as one ``Operands``, and the numbers.
    """

    def __init__(self, config: SwapConfig):
        self.config = config

    @host_function(Operands, StepNumbers)
    def __call__(self, operands: Operands, numbers: StepNumbers, stream: CUstream):
        """Launch the kernel."""
        self.launch(operands, *numbers, stream)


def host_and_arguments(config: SwapConfig) -> tuple:
    """The host function of a configuration and its arguments but the stream."""
    if not config.multiplies:
        from warpspec.swap.device.phase import SmallPhase as kind
    else:
        kind = importlib.import_module(f"warpspec.swap.{config.arch}.kernel").ProductPhase
    return (kind(config), *fakes(Operands, config, taken(config)), *fakes(StepNumbers, config))
