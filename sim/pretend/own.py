"""warpspec's own kernels on a pretended device: operations called with tensors on "cuda" run in the session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from warpspec.sim.clocks.record import times
from warpspec.sim.report import SimReport
from warpspec.sim.runs import remember


class OwnKernels:
    """The simulator that is offered to warpspec's packages (`common.simulator`) while a device is pretended.

    arch: the pretended device's architecture. call: runs a compiled function with its arguments and returns the report,
    as a launch of the session, which draws seeds and keeps streams by itself.
    """

    def __init__(self, arch: str, call: Callable[[object, tuple, dict], SimReport]):
        self.pretended = arch
        self._call = call

    def run(self, compiled: object, *arguments: object, seed: int) -> SimReport:
        """Run a compiled host function on tensors of the device. seed: has no effect, the session's counts."""
        return self._call(compiled, arguments, {})

    def one_stream(self) -> contextlib.AbstractContextManager:
        """A context without an effect: all of a session's launches belong to one stream."""
        return contextlib.nullcontext()

    times = staticmethod(times)
    remember = staticmethod(remember)
