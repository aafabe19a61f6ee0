"""The checker's data for CTAs, mbarriers, allocations and asynchronous operations."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from warpspec.sim.instruction import Instr
from warpspec.sim.memory import (
    Allocation,
)
from warpspec.sim.order.clocks import (
    BASE,
    Clock,
    Domain,
    Snapshot,
)
from warpspec.sim.order.findings import Access
from warpspec.sim.order.looks import Looks
from warpspec.sim.order.shadow import Shadow, TensorShadow


class PairOrder:
    """The checker's data for the tensor memory of a CTA in a pair.

    allocated: its tcgen05.alloc. last_uses: what it knew of its tensor memory's uses when it freed it. freed_by_peer:
    the other CTA's tcgen05.dealloc, and what that knew.
    """

    __slots__ = ("allocated", "freed_by_peer", "last_uses")

    def __init__(self):
        self.allocated: Access | None = None
        self.last_uses: list[Access] = []
        self.freed_by_peer: tuple[Access, Snapshot] | None = None


class CtaOrder:
    """The checker's data for a CTA."""

    def __init__(self, units: int):
        self.shared = Shadow(units)
        self._tensor: TensorShadow | None = None

    def begin(self, domain: Domain) -> None:
        """Reset it for a CTA that becomes resident; nothing has touched its memory."""
        self.domain = domain
        self.pair = PairOrder()
        self.shared.clear()
        self.tiles: dict[int, object] = {}  # what tensor copies wrote (operand_layouts.py); key: offset
        if self._tensor is not None:
            self._tensor.clear()
        # Its warps know it from the start, in row BARRIERS, and so does everyone that they meet.
        self.start = domain.component()
        # For tensor memory: number of the findings that a read would have, or 0.
        self.suspects: np.ndarray | None = None

    @cached_property
    def lanes(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Last access to each unit of shared memory, for writes and for reads: when and which lane (see `TAG` in
        memory.py), the number of the access.
        """
        units = self.shared.cells.size
        return {kind: (np.zeros(units, np.int64), np.zeros(units, np.int32)) for kind in ("write", "read")}

    @property
    def tensor(self) -> TensorShadow:
        if self._tensor is None:
            self._tensor = TensorShadow()
        return self._tensor


class Queue:
    """Operations of one kind that a thread issues and that complete in order: a component and their number."""

    __slots__ = ("component", "count")

    def __init__(self, domain: Domain):
        self.component = domain.component()
        self.count = 0


class BarrierOrder:
    """The clocks that an mbarrier passes on. collected: from the arrivals so far; done: at the end of the last
    phase. passed: each warp's last wait for a parity that passed, and the phase whose end it saw."""

    __slots__ = ("collected", "component", "done", "done_foreign", "init", "late", "passed")

    def __init__(self, domain: Domain, init: Access):
        self.component = domain.component()
        self.collected = Clock(domain)
        self.done: np.ndarray | None = None
        self.done_foreign: dict = {}
        self.init = init
        # Last arrivals of operations and of other CTAs, by component, and what a commit tracks.
        self.late: dict[int, tuple[Access, Access | None]] = {}
        self.passed: dict[Clock, tuple[int, Access]] = {}

    def phase_ends(self, phase: int) -> None:
        """The phase with this number, from 1, is complete; so are the copies that it counted."""
        self.collected.raise_to(BASE, self.component, phase)
        self.done, self.done_foreign = self.collected.rows.copy(), self.collected.foreign


class GlobalShadow:
    """Shadow of an allocation. While nothing writes it, its reads are only listed."""

    __slots__ = ("allocation", "base", "early", "end", "listed", "looks", "pending", "shadow", "unit")

    def __init__(self, allocation: Allocation, unit: int):
        self.allocation = allocation
        self.unit = unit
        self.base = allocation.address // unit * unit
        self.end = allocation.end
        self.shadow: Shadow | None = None
        self.early: Shadow | None = None  # accesses that may overlap the previous launch
        self.looks: Looks | None = None  # strong reads of that kind, until their CTA reads the place again
        self.pending: list[tuple] = []
        self.listed: set[tuple] = (
            set()
        )  # (first unit, end, access) of those in it by a warp to units in a row

    @property
    def size(self) -> int:
        """Units of the allocation."""
        return -(-(self.end - self.base) // self.unit)

    def units(self, low: int, high: int) -> slice:
        """The units of the bytes low to high."""
        return slice((low - self.base) // self.unit, -(-(high - self.base) // self.unit))


class Operation:
    """An asynchronous operation: its clock at issue, who issued it."""

    __slots__ = ("agent", "clock", "cta", "domain", "ins", "queue", "queue_count", "tensor", "written")

    def __init__(
        self, agent: str, cta, domain: Domain, ins: Instr, clock: Snapshot, queue: Queue | None = None
    ):
        self.agent, self.cta, self.domain, self.ins, self.clock = agent, cta, domain, ins, clock
        self.queue = queue
        self.queue_count = 0
        self.tensor = False  # its completion orders tcgen05 operations
        self.written: Access | None = None  # the write of a cp.async
        if queue is not None:
            queue.count += 1
            self.queue_count = queue.count
