"""Agents and accesses: who may conflict with whom, and what is reported."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager

import numpy as np

from warpspec.sim.codegen.layout import Ctx
from warpspec.sim.codegen.memory import access_bytes, space_of
from warpspec.sim.codegen.program import Program
from warpspec.sim.instruction import Instr
from warpspec.sim.lanes import FULL_MASK
from warpspec.sim.memory import (
    GlobalMemory,
)
from warpspec.sim.names import placed
from warpspec.sim.order import findings, launches, pending_loads
from warpspec.sim.order.clocks import (
    ALIKE,
    ASYNC_GLOBAL,
    ASYNC_SHARED,
    BARRIERS,
    BASE,
    LOADED,
    MAP,
    MAP_RELEASED,
    PUBLISHED,
    TENSOR,
    TENSOR_OWN,
    WRITES,
    Agent,
    Clock,
    Domain,
    Snapshot,
)
from warpspec.sim.order.findings import Access, Finding
from warpspec.sim.order.launches import EARLIER, Overlap, Seen
from warpspec.sim.order.operand_layouts import OperandLayouts
from warpspec.sim.order.places import SHARED, TENSOR_MAPS, TENSOR_MEMORY
from warpspec.sim.order.shadow import Ledger, Shadow
from warpspec.sim.order.state import CtaOrder, GlobalShadow, Operation, Queue
from warpspec.sim.tcgen05.memory import COLUMNS, LANES


class Accesses:
    """Agents, their accesses, and findings. first_only: stop at the first finding."""

    first_only = False

    def __init__(self, program: Program, gmem: GlobalMemory, overlap: Overlap | None = None):
        self.program, self.gmem = program, gmem
        self.overlap = overlap or Overlap()
        self.seen = Seen()
        self._behind_wait = self.overlap.waited() if self.overlap.dependent else None
        self._released: dict[int, Clock] = {}  # what the next launch knows from its start; key: cluster
        self.ledger = Ledger(self.known)
        self.layouts = OperandLayouts(self.last_writer)
        self.found: dict[tuple, Finding] = {}
        self.units = {False: 4, True: 4}  # bytes, of shared memory and (True) of global memory
        for ins in program.kernel.instrs:
            nbytes = access_bytes(ins)
            if nbytes and nbytes < 4:
                for is_global in (True, False):
                    if space_of(ins) in ("generic", "global" if is_global else "shared", "cluster"):
                        self.units[is_global] = min(self.units[is_global], nbytes)
        self.log = program.new_log()
        self._spare: list[CtaOrder] = []  # records of CTAs that are over, to be used again
        self._globals: dict[int, GlobalShadow] = {}
        self._recent: GlobalShadow | None = None  # the allocation that lanes accessed last
        self._synchronised: dict[object, object] = {}  # place -> `Releases`
        self._behind: dict[tuple, object] = {}  # (`Releases`, `Release`) -> the `Releases` with it
        self._orders: dict[int, object] = {}  # instruction -> `Ordered`
        self.suspected: list[dict] = []
        self.narrow: dict[int, Instr] = {}  # arrivals on other CTAs' mbarriers without .cluster scope
        self._pending = pending_loads.at_arrivals(program)
        self._late_loads = frozenset(at for loads in self._pending.values() for at in loads)
        self._holding = False
        self._tags = 0
        self._forms: dict[int, tuple] = {}
        self._own: dict[
            tuple, tuple
        ] = {}  # (instruction, lanes, CTA's rank, addresses) -> units of shared memory
        self._watched: tuple | None = None
        gmem.watch = None

    # ---- agents -----------------------------------------------------------------------------------------------

    def admit(self, cluster) -> None:
        """A cluster becomes resident."""
        domain = Domain(cluster.number)
        for cta in cluster.ctas:
            cta.order = self._spare.pop() if self._spare else CtaOrder(-(-len(cta.smem) // self.units[False]))
            cta.order.begin(domain)
            for w in cta.warps:
                w.order = Agent(domain)
                w.order.raise_to(BARRIERS, cta.order.start, 1)
                self.lanes_meet(w)
                w.ctx[Ctx.LOG] = self.log.ctypes.data
                w.ctx[Ctx.LOG_LIMIT] = self.program.log_limit

    def retire(self, cluster) -> None:
        """A cluster has ended: its CTAs' data are reused."""
        self._spare += [cta.order for cta in cluster.ctas]

    @staticmethod
    def queue(w, name: str) -> Queue:
        """A warp's queue of operations of some kind."""
        key = ("order", name)
        if key not in w.state:
            w.state[key] = Queue(w.order.domain)
        return w.state[key]

    def lanes_meet(self, w) -> None:
        """The lanes of a warp have met at a barrier."""
        self._tags += 1
        w.order.meet(self._tags)

    def warp_barrier(self, w, ins: Instr) -> None:
        """bar.warp.sync."""
        self.lanes_meet(w)

    def issue(self, w, ins: Instr, queue: str | None = None, mask: int = FULL_MASK) -> Operation:
        """Note an asynchronous operation that lanes of a warp issue now."""
        return Operation(
            f"warp {w.index}",
            w.cta,
            w.order.domain,
            ins,
            w.order.freeze(mask),
            None if queue is None else self.queue(w, queue),
        )

    def after(self, w, ins: Instr, queue: str, mask: int = FULL_MASK) -> Operation:
        """Note an operation that takes place after those now in a queue."""
        op = self.issue(w, ins, mask=mask)
        op.queue = self.queue(w, queue)
        op.queue_count = op.queue.count
        return op

    def copied(self, op: Operation, cta, source: np.ndarray, target: np.ndarray, wanted, size: int) -> None:
        """cp.async takes effect: `wanted` bytes a lane from `source` to `size` bytes at offsets of shared memory."""
        for nbytes in dict.fromkeys(wanted.tolist()):
            if nbytes:
                self.global_rows(source[wanted == nbytes], nbytes, self.of(op, False, generic=True), op.clock)
        self.shared_lanes(cta, target, size, op.written, op.clock)

    @staticmethod
    def done_by(op: Operation) -> tuple[np.ndarray, dict]:
        """The clock that the completion of a queue's operation publishes."""
        rows = op.clock.rows[:PUBLISHED].copy()
        if op.queue is not None:
            component = op.queue.component
            if component >= rows.shape[1]:
                rows = np.pad(rows, ((0, 0), (0, component + 1 - rows.shape[1])))
            np.maximum(rows[ALIKE, component], op.queue_count, out=rows[ALIKE, component])
            if op.tensor:
                own = op.clock.rows[TENSOR_OWN]
                np.maximum(rows[TENSOR, : own.size], own, out=rows[TENSOR, : own.size])
                rows[TENSOR, component] = max(rows[TENSOR, component], op.queue_count)
        return rows, op.clock.foreign

    # ---- accesses ---------------------------------------------------------------------------------------------

    def last_writer(self, cta, offset: int) -> Instr | None:
        """The instruction that last wrote a byte of a CTA's shared memory."""
        number = int(cta.order.shared.writes[offset // self.units[False]])
        return self.ledger.accesses[number].ins if number else None

    @staticmethod
    def known(access: Access, clock: Clock | Snapshot, row: int = BASE) -> bool:
        """Whether a clock's row includes an access."""
        rows = clock.rows
        if access.domain is not clock.domain:
            rows = clock.foreign.get(access.domain.number)
            if rows is None or row >= len(rows):
                return False
        component = access.component
        return component < rows.shape[1] and rows[row, component] >= access.count

    def touch(
        self, shadow: Shadow, where, access: Access, clocks: tuple, memory: str, place, cta=None
    ) -> None:
        """Check an access against earlier ones and note it. clocks: those of all who make it; place: a function that
        says where."""
        if cta is not None:
            if cta.live_warps == 0:
                self.too_late(access, place())
            if access.cta != cta.coords:
                self.check_started(access, clocks[0], cta, place)
        for kind in self.ledger.note(shadow, where, access, clocks[0]):
            if kind:
                asked = (kind, memory, access.write, access.generic, access.component, access.pipe)
                for clock in clocks:
                    if asked not in clock.known_kinds:
                        self.check(kind, asked, access, clock, memory, place)

    def check(self, kind: int, asked: tuple, access: Access, clock, memory: str, place) -> None:
        """Compare an access with those that a kind of cell represents. A clock never forgets, so a question is asked
        once: asked names it."""
        ordered = not access.strong
        for first in self.ledger.of(kind, access.write):
            ordered &= self.compare(first, access, clock, memory, place)
        if ordered:
            clock.known_kinds.add(asked)

    def check_started(self, access: Access, clock, cta, place) -> None:
        """Another CTA of the cluster must have started before its shared memory is accessed."""
        started = cta.order.start
        rows = clock.rows
        if started < rows.shape[1] and rows[BARRIERS, started]:
            return
        self.report(
            "shared memory of a CTA that may not have started", place() if callable(place) else place,
            access.describe(), "",
            "barrier.cluster.arrive (relaxed will do) and barrier.cluster.wait before the cluster's first access",
            (access.ins.line,),
        )  # fmt: skip

    def compare(self, first: Access, second: Access, clock, memory: str, place) -> bool:
        """Whether the first of two accesses to one place is ordered before the second; reports them if they race."""
        if findings.of_one_queue(first, second) and findings.pipelined(first, second):
            return True
        if memory is TENSOR_MEMORY:
            row = TENSOR_OWN
        elif memory is TENSOR_MAPS:
            row = MAP if first.domain is second.domain else MAP_RELEASED
        elif first.generic and not second.generic:
            row = ASYNC_SHARED if memory is SHARED else ASYNC_GLOBAL
        else:
            row = BASE
        known = self.known(first, clock, row)
        if known and not (first.write and first.generic and row <= ASYNC_GLOBAL):
            return True
        if known and self.known(first, clock, WRITES):
            return True
        looks = second.strong and not second.write and EARLIER.number not in clock.foreign
        if findings.morally_strong(first, second) or (first.domain is EARLIER and looks):
            return False  # of what it looks at too early, the end of its CTA decides (`looks`)
        missing = row if row != BASE and self.known(first, clock) else BASE
        if known:
            missing = WRITES
        elif missing == TENSOR_OWN and self.known(first, clock, TENSOR):
            missing = TENSOR
        if missing in (ASYNC_SHARED, ASYNC_GLOBAL) and first.write and not self.known(first, clock, WRITES):
            missing = WRITES  # both are missing; name the one that silicon is known to show
        kind, remedy = findings.diagnose(first, second, missing, memory)
        fenced = known and row == ASYNC_SHARED
        tolerated = findings.is_tolerated(first, second, missing, fenced=fenced)
        if (
            missing == ASYNC_SHARED
            and first.ins.index in self._late_loads
            and not self.known(first, clock, LOADED)
        ):
            kind, remedy, tolerated = pending_loads.KIND, self._late_arrivals(first.ins), False
        if missing == WRITES:
            remedy += self._narrow_arrivals()
        if first.domain is EARLIER:
            kind, remedy = launches.OVERLAP, launches.REMEDY
        self.report(
            kind,
            f"{memory}, {place() if callable(place) else place}",
            first.describe(),
            second.describe(),
            remedy,
            (first.ins.line, second.ins.line),
            tolerated,
        )
        return False

    def _late_arrivals(self, load: Instr) -> str:
        """The instruction that would complete a load before the arrivals after it."""
        instrs = self.program.kernel.instrs
        arrivals = [instrs[at] for at, loads in self._pending.items() if load.index in loads]
        return f"a use of what the first loads, or fence.proxy.async, before the arrival ({_lines(arrivals)})"

    def _narrow_arrivals(self) -> str:
        """The arrivals on other CTAs' mbarriers with too narrow a scope, for a remedy."""
        return f": {_lines(self.narrow.values())}" if self.narrow else ""

    def report(self, kind, place, first, second, remedy, lines, tolerated: bool = False) -> None:
        """Add a finding, once for each pair of instructions."""
        self.found.setdefault((kind, lines), Finding(kind, place, first, second, remedy, lines, tolerated))
        if self.first_only and not self._holding:
            raise findings.OrderError(list(self.found.values()), self.program.kernel.name)

    def generic(
        self,
        w,
        ins: Instr,
        write: bool,
        strong: bool | str = False,
        mask: int = FULL_MASK,
        together: bool = False,
    ) -> Access:
        """A current access of a warp's lanes by the generic proxy. together: the warp accesses as one."""
        agent = w.order
        part = agent.part(0 if together else mask)
        if part.epoch != agent.epoch:
            agent.count(part)
        key = (ins.index, write, part.mask)
        access = agent.accesses.get(key)
        if access is None:
            access = agent.accesses[key] = Access(
                agent.domain, part.component, agent.count(part), ins=ins, agent=f"warp {w.index}", cta=w.cta.coords,
                write=write, generic=True, strong=strong, queued=True,
            )  # fmt: skip
            if ins.index in self._late_loads:
                agent.last_loads[ins.index] = access.component, access.count
        return access

    def of(self, op: Operation, write: bool, *, component: int | None = None, count: int = 0, generic=False,
           queued: bool = False, strong: bool = False) -> Access:  # fmt: skip
        """An access of an asynchronous operation; its completion is known by a component of its own or its queue."""
        if component is None:
            component, count = op.queue.component, op.queue_count
        return Access(
            op.domain, component, count, ins=op.ins, agent=op.agent, cta=op.cta.coords, write=write,
            generic=generic, queued=queued, strong=strong,
        )  # fmt: skip

    @contextmanager
    def held_back(self):
        """Context that collects findings instead of reporting them."""
        (found, self.found), self._holding = (self.found, {}), True
        try:
            yield self.found
        finally:
            self.found, self._holding = found, False

    def suspect(self, cta, where, found: dict) -> None:
        """Tensor memory holds unordered data: the findings are reported if something reads it."""
        if cta.order.suspects is None:
            cta.order.suspects = np.zeros((LANES, COLUMNS), np.int32)
        self.suspected.append(dict(found))
        cta.order.suspects[where] = len(self.suspected)

    def too_late(self, access: Access, place: str, tolerated: bool = False) -> None:
        """Report an access to shared memory whose CTA may have exited.

        Hardware keeps the memory of a CTA until its bulk stores have read it (docs/notebook/checker.md).
        """
        self.report(
            "shared memory of a CTA that may have exited", place, access.describe(), "",
            _wait(access), (access.ins.line,), tolerated or findings.copies_from_own(access),
        )  # fmt: skip


def _lines(instrs: Iterable[Instr]) -> str:
    return "; ".join(
        f"PTX line {ins.line}" + f" from {placed(ins.source)}" * bool(ins.source) for ins in instrs
    )


def _wait(access: Access) -> str:
    remedy = findings.wait_for(access)
    return f"{remedy}, before the CTA exits (another CTA's access: a cluster barrier after it)"
