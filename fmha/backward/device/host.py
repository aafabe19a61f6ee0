"""The host side of a main kernel: the function that is compiled and called, the same for every architecture."""

from __future__ import annotations

from cuda.bindings.driver import CUstream

from warpspec.common.device.host import host_function
from warpspec.common.operands import fakes
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.backward.operands import BackwardNumbers, BackwardOperands


class BackwardHost:
    """``cute.compile(Backward(config), ...)`` makes one kernel. An architecture's ``Backward`` adds ``launch``, which
    gets ``BackwardOperands``, (``LogitNumbers``, scale), the window and the order."""

    def __init__(self, config: BackwardKernel):
        self.config = config

    @host_function(BackwardOperands, BackwardNumbers)
    def __call__(self, operands: BackwardOperands, numbers: BackwardNumbers, stream: CUstream):
        logits, scale, *window, pieces, section = numbers
        self.launch(operands, (logits, scale), tuple(window), (pieces, section), stream)


def fake_arguments(config: BackwardKernel) -> tuple:
    """What a kernel of a configuration is compiled for: the arguments of ``BackwardHost.__call__`` but the stream."""
    return (*fakes(BackwardOperands, config), *fakes(BackwardNumbers, config))
