"""Launches as the simulator was asked for them, to be run again with another program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import numpy as np

from warpspec.sim import runtime, simulation
from warpspec.sim.codegen.program import Program
from warpspec.sim.memory import Allocation, GlobalMemory
from warpspec.sim.order.launches import Past
from warpspec.sim.order.shares import Touched

WORD = 4  # bytes, of what a launch before has written


class Launch:
    """One launch as the simulator was asked for it, to be run again on the same memory."""

    def __init__(self, text: str, kernel: str, options: dict):
        self.text, self.kernel, self.options = text, kernel, options
        self.options.pop("check", None)
        self.memory = [(a, a.array.copy()) for a in options["gmem"].allocations if a.writable]
        self.program = runtime.load_program(text, kernel, True)

    def run(self, program: Program, seed: int, check: str | None = "order") -> list[np.ndarray]:
        """What it leaves in memory; raises what the simulator raises."""
        for allocation, before in self.memory:
            allocation.array[:] = before
        options = self.options | dict(seed=seed, check=check)
        with mock.patch.object(runtime, "load_program", lambda *_: program):
            runtime.execute(self.text, self.kernel, **options)
        return [allocation.array.copy() for allocation, _ in self.memory]


_unwritten: frozenset[str] = frozenset()


@contextmanager
def unwritten(*arguments: str):
    """While this lasts, `written_before` has not written these arguments: weights, or what a launch before it wrote."""
    global _unwritten
    before, _unwritten = _unwritten, frozenset(f"argument `{name}`" for name in arguments)
    try:
        yield
    finally:
        _unwritten = before


def written_before(gmem: GlobalMemory) -> Past:
    """A launch that has written all memory that the next one is given, but for what is ``unwritten``."""

    def whole(allocation: Allocation) -> Touched:
        units, nothing = np.arange(allocation.nbytes // WORD), (np.zeros(0, np.intp), np.zeros(0, np.int32))
        writes = (units, np.ones(units.size, np.int32))
        return Touched("", WORD, allocation.nbytes, writes, *[nothing] * 3, {1: ("a store", 0, False)})

    written = (one for one in gmem.allocations if one.name not in _unwritten)
    return Past("of any kind", [(one, gmem.host_address(one), whole(one)) for one in written])


@contextmanager
def recorded(visit: Callable[[Launch], None]):
    """While this lasts, `visit` sees every launch before it runs. The first of a stream, if it may begin before the end
    of another, begins beside one that has written all its memory."""
    original = simulation.execute

    def execute(text: str, kernel: str, **options):
        overlap = options["overlap"]
        if overlap.dependent and overlap.first:
            overlap.before, overlap.known = [written_before(options["gmem"])], [True]
        launch = Launch(text, kernel, dict(options))
        visit(launch)
        for allocation, before in launch.memory:
            allocation.array[:] = before
        return original(text, kernel, **options | dict(check="order"))  # later launches may overlap this one

    with mock.patch.object(simulation, "execute", execute):
        yield
