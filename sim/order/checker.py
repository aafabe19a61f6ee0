"""The checker of one launch: the machine and its handlers report events to it, and it draws conclusions.

Handlers call it where `machine.order` is not None. Agents: warps (the lanes of a warp count as one), and every
asynchronous operation, whose clock is its thread's at issue. PTX ISA: "Memory Consistency Model", "Async proxy",
"Tcgen05 Memory Consistency Model".
"""

from __future__ import annotations

import numpy as np

from warpspec.sim.order.clocks import (
    Clock,
)
from warpspec.sim.order.exits import ExitChecks
from warpspec.sim.order.findings import Finding
from warpspec.sim.order.places import shared_place
from warpspec.sim.order.shadow import distinct
from warpspec.sim.order.tensors import TensorAccesses


class OrderChecker(TensorAccesses, ExitChecks):
    """Happens-before of one launch, or of one share of it."""

    def all_found(self) -> dict[tuple, Finding]:
        """The findings of a finished run."""
        return self.found | self.layouts.findings()

    def cta_exits(self, cta) -> None:
        """The last warp of a CTA leaves the kernel: all accesses to its shared memory must be over by then."""
        self.padding_touched(cta)
        self.looked_once(cta)
        for barrier in cta.named_barriers.values():
            if barrier.arrived:
                self.barrier_left(cta, barrier)
        last = Clock(cta.order.domain)
        for w in cta.warps:
            last.join(w.order.rows, w.order.foreign)
        if cta.order.pair.freed_by_peer is not None:
            self.pair_exits(cta, last)
        shadow, ledger = cta.order.shared, self.ledger
        accesses = []
        if not all(self.known(ledger.accesses[number], last) for number in shadow.touched):
            # Only accesses without a successor count: the others' successors are known.
            accesses = [ledger.accesses[number] for number in distinct(shadow.writes) if number]
            for number in distinct(shadow.reads):
                accesses += ledger.sets[number]
        for access in accesses:
            if not self.known(access, last):
                where = np.flatnonzero(shadow.writes == access.key)
                place = (
                    shared_place(cta, int(where[0]) * self.units[False], 4)
                    if where.size
                    else f"CTA {cta.coords}"
                )
                self.too_late(access, place)
        for barrier in cta.mbarriers.values():
            for access, tracked in barrier.order.late.values():
                if not self.known(access, last):
                    place = f"mbarrier at {shared_place(cta, barrier.offset, 8)}"
                    # A later commit shows that they are over: public kernels do not wait for the earlier one's arrival.
                    tolerated = tracked is not None and self.known(tracked, last)
                    self.too_late(access, place, tolerated)
