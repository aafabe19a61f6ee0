"""What shows when a CTA ends: barriers that threads missed, and accesses to shared memory that belongs to no field."""

from __future__ import annotations

import numpy as np

from warpspec.sim.instruction import Instr
from warpspec.sim.lanes import WARP_SIZE
from warpspec.sim.names import placed
from warpspec.sim.order.accesses import Accesses
from warpspec.sim.order.places import shared_place
from warpspec.sim.order.shadow import distinct

NO_FIELD = "an access to the padding between two fields"
LEFT = "a barrier of all threads that some of them have left"
MISCOUNTED = "a named barrier of fewer threads than use it"


def _at(ins: Instr) -> str:
    """An instruction in words."""
    return f"PTX line {ins.line} `{ins.opcode}`" + (f" from {placed(ins.source)}" if ins.source else "")


class ExitChecks(Accesses):
    """Checks at the end of a CTA and of its threads."""

    def threads_missing(self, w, ins, barrier, missing: int) -> None:
        """A barrier without a number of threads is complete, though some threads have exited: hardware counts them."""
        self.report(
            LEFT, f"barrier {barrier.number} of CTA {w.cta.coords}",
            f"{missing} threads of the CTA exited before", f"warp {w.index}: {_at(ins)}",
            "all threads at the barrier, or a named barrier of those that take part", (ins.line,), tolerated=True,
        )  # fmt: skip

    def barrier_left(self, cta, barrier) -> None:
        """A CTA ends and a named barrier has arrivals: if more warps use it than it counts, the count is wrong."""
        used = len(barrier.users) * WARP_SIZE
        if barrier.all_threads or used <= barrier.expected:
            return
        _, ins = barrier.last
        self.report(
            MISCOUNTED, f"named barrier {barrier.number} of CTA {cta.coords}",
            f"warps {', '.join(map(str, sorted(barrier.users)))} use it, {used} threads; it is of {barrier.expected}",
            f"{barrier.arrived} have arrived when the CTA ends, the last at {_at(ins)}",
            f"a barrier of {used} threads", (ins.line,), tolerated=True,
        )  # fmt: skip

    def padding_touched(self, cta) -> None:
        """Report what touched the padding between fields of storage, where the fields are known."""
        shadow, unit = cta.order.shared, self.units[False]
        if not shadow.touched:
            return
        for start, end, before in cta.names.padding:
            where = slice(-(-start // unit), end // unit)
            found = [self.ledger.accesses[number] for number in distinct(shadow.writes[where]) if number]
            for number in distinct(shadow.reads[where]):
                found += self.ledger.sets[number]
            for access in found:
                at = np.flatnonzero(shadow.cells[where]).item(0) * unit + where.start * unit
                behind = f"{at - start} bytes after `{before}`, " if before else ""
                self.report(
                    NO_FIELD, f"shared memory, {behind}{shared_place(cta, at, unit)}", access.describe(), "",
                    "an index within the field, or a field with room for it", (access.ins.line,),
                )  # fmt: skip
