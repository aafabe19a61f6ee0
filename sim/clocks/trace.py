"""The trace of a recorded run: for each warp, the blocks it executed and its interactions (steps) with other units.

An *event* is the end of one phase of a barrier (an mbarrier, a named barrier, a cluster's): a number with the count of
contributions that end it. A warp contributes to events and waits for them; asynchronous operations contribute when
they complete. Since a kernel's synchronisation does not depend on time, a trace can be timed for any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from warpspec.sim.codegen.program import Program
from warpspec.sim.instruction import Instr


class Step:
    """One execution of a system instruction by lanes of a warp.

    signals: events that it contributes to, at once or when its asynchronous work completes. waits: the event that it
    waits for, or None. nbytes: bytes that its asynchronous work moved. lanes: lanes that executed it (0: its guard was
    false). fresh: whether it moves data that no recorded step moved before. about: facts from its operands:
    of tcgen05.mma what it multiplies, of a copy with a tensor map the tensor's address and bytes.
    """

    __slots__ = ("about", "fresh", "ins", "lanes", "nbytes", "signals", "waits")

    def __init__(self, ins: Instr, lanes: int):
        self.ins = ins
        self.lanes = lanes
        self.signals: list[int] = []
        self.waits: int | None = None
        self.nbytes = 0
        self.fresh = True
        self.about: tuple | None = None

    def __repr__(self) -> str:
        return f"Step({self.ins.opcode}, waits {self.waits}, signals {self.signals}, {self.nbytes} bytes)"


Entry = int | tuple[int, int] | Step
"""A block of native code by its number, with its lanes where they are not all of the warp; or a step."""


@dataclass
class CtaTrace:
    """One CTA's warps, in order. number: the CTA's number in the grid. cluster: its cluster's number. more_steps: steps
    that it executed after the end of its trace, which were only counted. uncounted: steps that the places of its warps
    had executed by then; None: the trace is whole.
    """

    number: int
    coords: tuple[int, int, int]
    cluster: int
    rank: int
    warps: list[list[Entry]] = field(default_factory=list)
    more_steps: int = 0
    uncounted: int | None = None

    @cached_property
    def steps(self) -> int:
        """Number of steps of all warps; to be asked for when all are recorded."""
        return sum(type(entry) is Step for entries in self.warps for entry in entries)

    @property
    def longer(self) -> float:
        """How many times as long as its trace the CTA is."""
        return 1 + self.more_steps / self.steps if self.more_steps else 1.0


@dataclass
class LaunchTrace:
    """A launch as recorded.

    contributions: for each event, how many end it. tensor_bytes: bytes of all tensors that the launch may touch.
    sampled: whether CTAs without a trace did not run at all. stride: by how much the numbers that a recorded CTA takes
    from a queue increase, 0: there is no queue. registers: registers of a thread, None: not known. ptx: the module's
    text.
    """

    program: Program
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    registers: int | None
    tensor_bytes: int
    sampled: bool
    ctas: list[CtaTrace] = field(default_factory=list)
    contributions: list[int] = field(default_factory=list)
    tmem_columns: int = 0
    stride: int = 0
    ptx: str = ""

    @property
    def grid_ctas(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def cluster_ctas(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.cluster[2]
