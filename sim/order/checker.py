"""The checker of one launch: what the machine and its handlers tell it, and what it concludes.

Handlers call it where `machine.order` is not None. Agents: warps (the lanes of a warp count as one), and every
asynchronous operation, whose clock is its thread's at issue. PTX ISA: "Memory Consistency Model", "Async proxy",
"Tcgen05 Memory Consistency Model".
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache

import numpy as np

from warpspec.sim.codegen.layout import Ctx
from warpspec.sim.codegen.memory import access_bytes, space_of
from warpspec.sim.codegen.program import Program
from warpspec.sim.instruction import Instr
from warpspec.sim.lanes import FULL_MASK, lanes
from warpspec.sim.memory import (
    CTA_RANK_SHIFT,
    SHARED_BASE_OFFSET,
    WINDOW_SHIFT,
    Allocation,
    GlobalMemory,
)
from warpspec.sim.order import findings
from warpspec.sim.order.clocks import (
    ASYNC_GLOBAL,
    ASYNC_SHARED,
    BARRIERS,
    BASE,
    FENCED,
    PUBLISHED,
    TENSOR,
    TENSOR_OWN,
    Agent,
    Clock,
    Domain,
    Snapshot,
)
from warpspec.sim.order.findings import Access, Finding
from warpspec.sim.order.shadow import Ledger, Shadow, distinct
from warpspec.sim.order.shares import Touched, touched
from warpspec.sim.registry import row_of
from warpspec.sim.tcgen05.memory import COLUMNS, LANES

OFFSET_MASK = (1 << CTA_RANK_SHIFT) - 1
SHARED, GLOBAL, TENSOR_MEMORY = "shared memory", "global memory", "tensor memory"
SCOPES = ("cta", "cluster", "gpu", "sys", "gl")


class CtaOrder:
    """What the checker keeps of a CTA."""

    def __init__(self, domain: Domain, units: int):
        self.domain = domain
        self.shared = Shadow(units)
        # Of each unit, for writes and for reads: the lane, when (`Agent.tag`), and the number of its access.
        self.lanes = {
            kind: (np.zeros(units, np.uint8), np.zeros(units, np.int32), np.zeros(units, np.int32))
            for kind in ("write", "read")
        }
        self._tensor: Shadow | None = None
        self.suspects: np.ndarray | None = (
            None  # of tensor memory: number of the findings if it is read, or 0
        )

    @property
    def tensor(self) -> Shadow:
        if self._tensor is None:
            self._tensor = Shadow((LANES, COLUMNS))
        return self._tensor


class Queue:
    """Operations of one kind that a thread issues and that complete in order: a component and how many there were."""

    __slots__ = ("component", "count")

    def __init__(self, domain: Domain):
        self.component = domain.component()
        self.count = 0


class BarrierOrder:
    """What an mbarrier passes on. collected: by the arrivals so far; done: at the end of the last phase."""

    __slots__ = ("collected", "component", "done", "done_foreign", "init", "late")

    def __init__(self, domain: Domain, init: Access):
        self.component = domain.component()
        self.collected = Clock(domain)
        self.done: np.ndarray | None = None
        self.done_foreign: dict = {}
        self.init = init
        self.late: dict[int, Access] = {}  # last arrivals of operations and of other CTAs, by component

    def phase_ends(self, phase: int) -> None:
        """The phase with this number, from 1, is complete; so are the copies that it counted."""
        self.collected.raise_to(BASE, self.component, phase)
        self.done, self.done_foreign = self.collected.rows.copy(), self.collected.foreign


class GlobalShadow:
    """Shadow of an allocation. While nothing writes it, its reads are only listed."""

    __slots__ = ("allocation", "base", "pending", "shadow", "unit")

    def __init__(self, allocation: Allocation, unit: int):
        self.allocation = allocation
        self.unit = unit
        self.base = allocation.address // unit * unit
        self.shadow: Shadow | None = None
        self.pending: list[tuple] = []

    @property
    def size(self) -> int:
        """Units of the allocation."""
        return -(-(self.allocation.end - self.base) // self.unit)

    def units(self, low: int, high: int) -> slice:
        """The units of the bytes low to high."""
        return slice((low - self.base) // self.unit, -(-(high - self.base) // self.unit))


class Operation:
    """An asynchronous operation: its clock at issue, who issued it."""

    __slots__ = ("agent", "clock", "cta", "domain", "ins", "queue", "queue_count", "tensor")

    def __init__(
        self, agent: str, cta, domain: Domain, ins: Instr, clock: Snapshot, queue: Queue | None = None
    ):
        self.agent, self.cta, self.domain, self.ins, self.clock = agent, cta, domain, ins, clock
        self.queue = queue
        self.queue_count = 0
        self.tensor = False  # its completion orders tcgen05 operations
        if queue is not None:
            queue.count += 1
            self.queue_count = queue.count


class OrderChecker:
    """Happens-before of one launch (or of one share of it). first_only: stop at the first finding."""

    first_only = False

    def __init__(self, program: Program, gmem: GlobalMemory):
        self.program, self.gmem = program, gmem
        self.ledger = Ledger(self.known)
        self.found: dict[tuple, Finding] = {}
        self.units = {False: 4, True: 4}  # bytes, of shared memory and (True) of global memory
        for ins in program.kernel.instrs:
            nbytes = access_bytes(ins)
            if nbytes and nbytes < 4:
                for is_global in (True, False):
                    if space_of(ins) in ("generic", "global" if is_global else "shared", "cluster"):
                        self.units[is_global] = min(self.units[is_global], nbytes)
        self.log = program.new_log()
        self._globals: dict[int, GlobalShadow] = {}
        self._synchronised: dict[object, dict] = {}  # place -> CTA -> (scope, rows by domain)
        self.suspected: list[dict] = []
        self._holding = False
        self._tags = 0
        self._forms: dict[int, tuple] = {}
        self._watched: tuple | None = None
        gmem.watch = None

    # ---- agents -----------------------------------------------------------------------------------------------

    def admit(self, cluster) -> None:
        """A cluster becomes resident."""
        domain = Domain(cluster.number)
        for cta in cluster.ctas:
            cta.order = CtaOrder(domain, -(-len(cta.smem) // self.units[False]))
            for w in cta.warps:
                w.order = Agent(domain)
                self.lanes_meet(w)
                w.ctx[Ctx.LOG] = self.log.ctypes.data
                w.ctx[Ctx.LOG_LIMIT] = self.program.log_limit

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
        """An asynchronous operation that lanes of a warp issue now."""
        return Operation(
            f"warp {w.index}",
            w.cta,
            w.order.domain,
            ins,
            w.order.freeze(mask),
            None if queue is None else self.queue(w, queue),
        )

    def after(self, w, ins: Instr, queue: str, mask: int = FULL_MASK) -> Operation:
        """An operation that takes place once those of a queue so far are done."""
        op = self.issue(w, ins, mask=mask)
        op.queue = self.queue(w, queue)
        op.queue_count = op.queue.count
        return op

    def copied(self, op: Operation, cta, source: np.ndarray, target: np.ndarray, wanted, size: int) -> None:
        """cp.async takes effect: `wanted` bytes a lane from `source` to `size` bytes at offsets of shared memory."""
        for nbytes in dict.fromkeys(wanted.tolist()):
            if nbytes:
                self.global_rows(source[wanted == nbytes], nbytes, self.of(op, False, generic=True), op.clock)
        self.shared_lanes(cta, target, size, self.of(op, True, generic=True), op.clock)

    @staticmethod
    def done_by(op: Operation) -> tuple[np.ndarray, dict]:
        """What the completion of a queue's operation publishes."""
        rows = op.clock.rows[:PUBLISHED].copy()
        if op.queue is not None:
            component = op.queue.component
            if component >= rows.shape[1]:
                rows = np.pad(rows, ((0, 0), (0, component + 1 - rows.shape[1])))
            rows[BASE, component] = max(rows[BASE, component], op.queue_count)
            if op.tensor:
                own = op.clock.rows[TENSOR_OWN]
                np.maximum(rows[TENSOR, : own.size], own, out=rows[TENSOR, : own.size])
                rows[TENSOR, component] = max(rows[TENSOR, component], op.queue_count)
        return rows, op.clock.foreign

    # ---- accesses ---------------------------------------------------------------------------------------------

    def known(self, access: Access, clock: Clock | Snapshot, row: int = BASE) -> bool:
        """Whether a clock's row has an access."""
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
        """Check an access against earlier ones and note it. clocks: of all who make it; place: says where, if asked."""
        if cta is not None and cta.live_warps == 0:
            self.too_late(access, place())
        for first in self.ledger.touch(shadow, where, access, clocks[0]):
            for clock in clocks:
                self.compare(first, access, clock, memory, place)

    def compare(self, first: Access, second: Access, clock, memory: str, place) -> None:
        """Report two accesses to one place unless the first is ordered before the second."""
        if first.component == second.component and first.domain is second.domain and first.queued:
            return
        if memory is TENSOR_MEMORY:
            row = TENSOR_OWN
        elif first.generic and not second.generic:
            row = ASYNC_SHARED if memory is SHARED else ASYNC_GLOBAL
        else:
            row = BASE
        if self.known(first, clock, row) or (first.strong and second.strong):
            return
        missing = row if row != BASE and self.known(first, clock) else BASE
        if missing == TENSOR_OWN and self.known(first, clock, TENSOR):
            missing = TENSOR
        kind, remedy = findings.diagnose(first, second, missing, memory)
        self.report(
            kind,
            f"{memory}, {place() if callable(place) else place}",
            first.describe(),
            second.describe(),
            remedy,
            (first.ins.line, second.ins.line),
            findings.is_tolerated(first, missing),
        )

    def report(self, kind, place, first, second, remedy, lines, tolerated: bool = False) -> None:
        """Add a finding, once for each pair of instructions."""
        self.found.setdefault((kind, lines), Finding(kind, place, first, second, remedy, lines, tolerated))
        if self.first_only and not self._holding:
            raise findings.OrderError(list(self.found.values()), self.program.kernel.name)

    def generic(
        self, w, ins: Instr, write: bool, strong: bool = False, mask: int = FULL_MASK, together: bool = False
    ) -> Access:
        """An access of lanes of a warp by the generic proxy, at this moment. together: the warp makes it as one."""
        agent = w.order
        part = agent.part(0 if together else mask)
        count = agent.count(part)
        key = (ins.index, write, part.mask)
        access = agent.accesses.get(key)
        if access is None:
            access = agent.accesses[key] = Access(
                agent.domain, part.component, count, ins=ins, agent=f"warp {w.index}", cta=w.cta.coords,
                write=write, generic=True, strong=strong, queued=True,
            )  # fmt: skip
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
        """Collects findings meanwhile instead of reporting them."""
        (found, self.found), self._holding = (self.found, {}), True
        try:
            yield self.found
        finally:
            self.found, self._holding = found, False

    def suspect(self, cta, where, found: dict) -> None:
        """Tensor memory holds what nothing orders: the findings are reported if something reads it there."""
        if cta.order.suspects is None:
            cta.order.suspects = np.zeros((LANES, COLUMNS), np.int32)
        self.suspected.append(dict(found))
        cta.order.suspects[where] = len(self.suspected)

    # ---- shared memory ----------------------------------------------------------------------------------------

    def shared_range(self, cta, offset: int, nbytes: int, access: Access, *clocks) -> None:
        """An access to consecutive bytes of a CTA's shared memory."""
        unit = self.units[False]
        where = slice(offset // unit, -(-(offset + nbytes) // unit))
        self.touch(
            cta.order.shared, where, access, clocks, SHARED, lambda: shared_place(cta, offset, nbytes), cta
        )

    def shared_chunks(self, cta, chunks: np.ndarray, chunk: int, access: Access, *clocks) -> None:
        """An access to chunks of shared memory, by their numbers; chunk: bytes of each."""
        unit = self.units[False]
        low, high, dense = span(chunks)
        if dense:
            where: object = slice(low * chunk // unit, (high + 1) * chunk // unit)
        else:
            per = chunk // unit
            where = (chunks.reshape(-1, 1) * per + np.arange(per)).reshape(-1)
        self.touch(
            cta.order.shared, where, access, clocks, SHARED,
            lambda: shared_place(cta, low * chunk, (high + 1 - low) * chunk), cta,
        )  # fmt: skip

    def shared_rows(
        self, w, ins: Instr, cta, offsets: np.ndarray, nbytes: int, write: bool, strong=False
    ) -> None:
        """Lanes access `nbytes` each at these offsets by the generic proxy."""
        access = self.generic(w, ins, write, strong, together=True)
        self.shared_lanes(cta, offsets, nbytes, access, w.order)

    def shared_lanes(self, cta, offsets: np.ndarray, nbytes: int, access: Access, clock) -> None:
        """Lanes access `nbytes` each at these offsets."""
        unit = self.units[False]
        where = offsets.astype(np.intp) // unit
        per = max(nbytes // unit, 1)
        if per > 1:
            where = (where[:, None] + np.arange(per)).reshape(-1)
        low, high = int(offsets.min()), int(offsets.max()) + nbytes
        self.touch(
            cta.order.shared, where, access, (clock,), SHARED, lambda: shared_place(cta, low, high - low)
        )

    # ---- global memory ----------------------------------------------------------------------------------------

    def _global(self, address: int) -> GlobalShadow | None:
        allocation = self.gmem.find(address)
        if allocation is None:
            return None
        found = self._globals.get(allocation.address)
        if found is None or found.allocation is not allocation:
            found = self._globals[allocation.address] = GlobalShadow(allocation, self.units[True])
        return found

    def _touch_global(
        self, memory: GlobalShadow, where, access: Access, clock, address: int, views=None
    ) -> None:
        """where: an index of the flat shadow; views: makes the part of a flat array that a strided access touches."""
        if not access.write and memory.shadow is None:
            memory.pending.append((where, views, access, clock if isinstance(clock, Snapshot) else None))
            return
        self._note_pending(memory)
        shadow = memory.shadow if views is None else part(memory.shadow, views)
        self.touch(shadow, where, access, (clock,), GLOBAL, lambda: global_place(memory, address))

    def _note_pending(self, memory: GlobalShadow) -> None:
        """Give an allocation shadow memory and note the reads so far in it."""
        if memory.shadow is None:
            memory.shadow = Shadow(memory.size)
            for old_where, old_views, old, old_clock in memory.pending:
                shadow = memory.shadow if old_views is None else part(memory.shadow, old_views)
                self.ledger.touch(shadow, old_where, old, old_clock or Clock(old.domain))
            memory.pending = []

    def global_range(self, address: int, nbytes: int, access: Access, clock) -> None:
        """An access to consecutive bytes of global memory."""
        memory = self._global(address)
        if memory is not None and memory.allocation.writable:
            self._touch_global(memory, memory.units(address, address + nbytes), access, clock, address)

    def global_rows(self, addresses: np.ndarray, nbytes: int, access: Access, clock) -> None:
        """Lanes access `nbytes` each."""
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        memory = self._global(low)
        if memory is None or high > memory.allocation.end:
            if len(addresses) > 1:
                for i in range(len(addresses)):
                    self.global_rows(addresses[i : i + 1], nbytes, access, clock)
            return
        if not memory.allocation.writable:
            return
        unit = memory.unit
        if len(addresses) * nbytes == high - low and nbytes >= unit:
            where: object = memory.units(low, high)
        else:
            where = ((addresses - np.uint64(memory.base)) // np.uint64(unit)).astype(np.intp)
            if nbytes > unit:
                where = (where[:, None] + np.arange(nbytes // unit)).reshape(-1)
        self._touch_global(memory, where, access, clock, low)

    @contextmanager
    def watching(self, access: Access, clock):
        """Copies of boxes between global and shared memory meanwhile are this access."""

        def watch(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
            memory = self._global(address)
            if memory is None or not memory.allocation.writable:
                return
            unit = memory.unit
            if (
                any(stride % unit for stride in strides[:-1])
                or shape[-1] % unit
                or (address - memory.base) % unit
            ):
                span_ = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
                self.global_range(address, span_, access, clock)
                return
            first = (address - memory.base) // unit
            view = (first, (*shape[:-1], shape[-1] // unit), (*(s // unit for s in strides[:-1]), 1))
            self._touch_global(memory, ..., access, clock, address, view)

        self.gmem.watch = watch
        try:
            yield
        finally:
            self.gmem.watch = None

    def summary(self) -> dict[int, Touched]:
        """What it saw of global memory by allocation, for a share of the launch that runs apart."""
        result = {}
        for address, memory in self._globals.items():
            shadow = memory.shadow
            if shadow is None:  # nothing here writes it: one of a unit's readers stands for all
                shadow = Shadow(memory.size)
                for where, views, access, _ in memory.pending:
                    shadow_part = shadow if views is None else part(shadow, views)
                    shadow_part.reads[where] = self.ledger.alone(access)
            result[address] = touched(memory.allocation.name, memory.unit, shadow, self.ledger)
        return result

    # ---- what native code has accessed ------------------------------------------------------------------------

    def native(self, w) -> None:
        """The accesses of native blocks that a warp has just run."""
        n = int(w.ctx[Ctx.LOG_COUNT])
        w.ctx[Ctx.LOG_COUNT] = 0
        log, instrs = self.log[:n], self.program.kernel.instrs
        heads = log[:, 0].tolist()
        for i, head in enumerate(heads):
            mask = head >> 32
            if not mask:
                continue
            addresses = log[i, 1:]
            if mask != FULL_MASK:
                addresses = addresses[lanes(mask)]
            self.lane_access(w, instrs[head & 0xFFFFFFFF], addresses.copy(), mask)

    def lane_access(
        self, w, ins: Instr, addresses: np.ndarray, mask: int = FULL_MASK, strong: bool = False
    ) -> None:
        """Lanes (those of the mask) execute a load, a store or an atomic at these addresses."""
        form = self._forms.get(ins.index)
        if form is None:
            row = row_of(ins.opcode)
            form = self._forms[ins.index] = (space_of(ins), access_bytes(ins), not row.loads)
        space, nbytes, write = form
        if space == "generic":
            windows = (addresses >> np.uint64(WINDOW_SHIFT)).tolist()
            if windows.count(windows[0]) != len(windows):
                for i, lane in enumerate(lanes(mask)):
                    self.lane_access(w, ins, addresses[i : i + 1], 1 << lane, strong)
                return
            if windows[0] > 1:
                return  # local memory
            space = "cluster" if windows[0] else "global"
        parts = [(0, nbytes)] if ins.used_bytes is None else runs(ins.used_bytes)
        if space == "global":
            for first, count in parts:
                access = self.generic(w, ins, write, strong, mask)
                self.global_rows(addresses + np.uint64(first) if first else addresses, count, access, w.order)
            return
        for first, count in parts:
            self._lane_shared(
                w, ins, addresses + np.uint64(first) if first else addresses, count, write, strong, mask
            )

    def _lane_shared(
        self, w, ins: Instr, addresses: np.ndarray, nbytes: int, write: bool, strong: bool, mask: int
    ) -> None:
        access = self.generic(w, ins, write, strong, mask)
        ranks = (addresses >> np.uint64(CTA_RANK_SHIFT) & np.uint64(0xFF)).tolist()
        offsets = addresses & np.uint64(OFFSET_MASK)
        for rank in dict.fromkeys(ranks):
            cta = w.cta.cluster.ctas[rank]
            if ranks.count(rank) == len(ranks):
                chosen, executing = offsets, lane_numbers(mask)
            else:
                picked = [r == rank for r in ranks]
                chosen, executing = offsets[picked], lane_numbers(mask)[picked]
            self.shared_lanes(cta, chosen, nbytes, access, w.order)
            if not strong:
                self._between_lanes(w, access, cta, chosen, nbytes, executing)

    def _between_lanes(self, w, access: Access, cta, offsets: np.ndarray, nbytes: int, executing) -> None:
        """Lanes of one warp access one place, one of them writes, and they have not met in between."""
        unit = self.units[False]
        where, per = offsets.astype(np.intp) // unit, max(nbytes // unit, 1)
        if per > 1:
            where = (where[:, None] + np.arange(per)).reshape(-1)
            executing = np.repeat(executing, per)
        lanes_of, tag = cta.order.lanes, w.order.tag
        together = len(offsets) > 1 and (offsets == offsets[0]).all()
        for kind in ("write", "read") if access.write else ("write",):
            numbers, tags, accesses = lanes_of[kind]
            other = numbers[where]
            strange = (tags[where] == tag) & (other != executing) & (other != EACH)
            if strange.any() and not together:
                at = int(np.argmax(strange))
                first = self.ledger.accesses[int(accesses[where[at]])]
                self.report(
                    "lanes of a warp that nothing orders",
                    f"{SHARED}, {shared_place(cta, int(where[at]) * unit, unit)}",
                    f"{first.describe()}, lane {int(other[at]) if other[at] < SEVERAL else 'several'}",
                    f"{access.describe()}, lane {int(executing[at])}",
                    "bar.warp.sync between them", (first.ins.line, access.ins.line),
                )  # fmt: skip
        numbers, tags, accesses = lanes_of["write" if access.write else "read"]
        if together:
            numbers[where] = EACH if access.write else SEVERAL
        elif access.write:
            numbers[where] = executing
        else:
            numbers[where] = np.where(
                (tags[where] == tag) & (numbers[where] != executing), SEVERAL, executing
            )
        tags[where] = tag
        accesses[where] = self.ledger.number(access)

    # ---- fences and synchronising accesses --------------------------------------------------------------------

    def fence(self, w, ins: Instr, mask: int) -> None:
        """fence and membar in all their forms (PTX ISA 9.7.13.4)."""
        agent, parts = w.order, ins.parts
        if "mbarrier_init" in parts:
            agent.fence(BASE, BARRIERS, mask)
        elif "proxy" in parts:
            if any(part.startswith("async") for part in parts):
                if not any(part.endswith("global") for part in parts):
                    agent.fence(BASE, ASYNC_SHARED, mask)
                if not any("shared" in part for part in parts):
                    agent.fence(BASE, ASYNC_GLOBAL, mask)
        else:
            if "release" not in parts:  # fence.acquire, .acq_rel, .sc
                agent.acquire_seen()
            if "acquire" not in parts:
                agent.fence(BASE, FENCED, mask)
                agent.fence_scope = next((part for part in parts if part in SCOPES), "gpu")

    def tensor_fence(self, w, ins: Instr, before: bool) -> None:
        """tcgen05.fence::before_thread_sync and ::after_thread_sync."""
        w.order.fence(*((TENSOR_OWN, TENSOR) if before else (TENSOR, TENSOR_OWN)))

    def ordered(self, w, ins: Instr, mask: int) -> None:
        """ld, st, atom and red that are atomic, volatile or say their order: they synchronise, place by place."""
        operand = ins.operands[1] if ins.parts[0] in ("ld", "atom") else ins.operands[0]
        addresses = w.address(operand)[lanes(mask)]
        space = space_of(ins)
        if space == "local":
            return
        self.lane_access(w, ins, addresses, mask, strong=True)
        updates = ins.parts[0] in ("atom", "red")
        acquires = "acquire" in ins.parts or "acq_rel" in ins.parts
        releases = "release" in ins.parts or "acq_rel" in ins.parts
        scope = next((part for part in ins.parts if part in SCOPES), "gpu" if updates else "sys")
        if not updates and not acquires and not releases and "relaxed" not in ins.parts:
            scope = "sys"  # volatile
        for address in dict.fromkeys(addresses.tolist()):
            if space != "global" and (space != "generic" or address >> WINDOW_SHIFT):
                cta = w.cta.cluster.ctas[address >> CTA_RANK_SHIFT & 0xFF]
                place: object = (cta.number, address & OFFSET_MASK)
            else:
                place = address
            if updates or ins.parts[0] == "ld":
                self.acquire_place(w, place, scope, relaxed=not acquires)
            if updates or ins.parts[0] == "st":
                self.release_place(w, mask, place, scope, relaxed=not releases, replaces=not updates)

    def acquire_place(self, w, place, scope: str, relaxed: bool) -> None:
        """Know what others released at a place of memory, as far as both scopes reach."""
        agent, cta = w.order, w.cta
        for number, (their_scope, clock, cluster) in self._synchronised.get(place, {}).items():
            for reach in (scope, their_scope):
                if (reach == "cta" and number != cta.number) or (
                    reach == "cluster" and cluster != cta.cluster.number
                ):
                    break
            else:
                for domain, rows in clock.items():
                    if domain != agent.domain.number:
                        agent.foreign_seen(domain, rows, relaxed)
                    elif relaxed:
                        agent.see(rows)
                    else:
                        agent.acquire(rows, {})

    def release_place(self, w, mask: int, place, scope: str, relaxed: bool, replaces: bool) -> None:
        """Publish at a place of memory. replaces: a store ends what earlier ones released there."""
        agent, cta = w.order, w.cta
        entries = self._synchronised.setdefault(place, {})
        if relaxed:
            scope = min(
                scope, agent.fence_scope or "sys", key=lambda s: SCOPES.index("gpu" if s == "gl" else s)
            )
        rows = agent.published(mask, relaxed)[:PUBLISHED].copy()
        clock = {agent.domain.number: rows, **agent.foreign}
        if replaces:
            entries.clear()
        elif cta.number in entries:
            _, before, _ = entries[cta.number]
            for domain, old in before.items():
                clock[domain] = _larger(old, clock[domain]) if domain in clock else old
        entries[cta.number] = (scope, clock, cta.cluster.number)

    # ---- mbarriers --------------------------------------------------------------------------------------------

    def barrier_init(self, w, ins: Instr, barrier, mask: int) -> None:
        """mbarrier.init."""
        barrier.order = BarrierOrder(w.order.domain, self.generic(w, ins, True, mask=mask))

    def barrier_used(self, w, ins: Instr, barrier) -> None:
        """A warp arrives at an mbarrier or waits on it: its initialisation must be visible to it."""
        init, agent = barrier.order.init, w.order
        if not (self.known(init, agent) or self.known(init, agent, BARRIERS)):
            self._early(
                init, ins, f"warp {w.index}", w.cta, barrier, "bar.sync or a cluster barrier between them"
            )

    def barrier_signalled(self, op: Operation, barrier) -> None:
        """An asynchronous operation signals an mbarrier: its initialisation must be visible to the async proxy."""
        init, clock = barrier.order.init, op.clock
        if not (self.known(init, clock, BARRIERS) or self.known(init, clock, ASYNC_SHARED)):
            remedy = "fence.mbarrier_init or fence.proxy.async behind the initialisation"
            if not self.known(init, clock):
                remedy += ", then bar.sync or a cluster barrier"
            self._early(init, op.ins, op.agent, op.cta, barrier, remedy)

    def _early(self, init: Access, ins: Instr, agent: str, cta, barrier, remedy: str) -> None:
        second = Access(init.domain, 0, 0, ins=ins, agent=agent, cta=cta.coords, write=True, generic=True)
        place = f"mbarrier at {shared_place(barrier.cta, barrier.offset, 8)}"
        self.report(
            "mbarrier used before its initialisation is visible", place, init.describe(),
            second.describe().replace(" writes:", " uses it:"), remedy, (init.ins.line, ins.line),
        )  # fmt: skip

    def arrive(self, w, ins: Instr, barrier, mask: int) -> None:
        """A warp arrives."""
        self.barrier_used(w, ins, barrier)
        if barrier.cta is not w.cta:
            self.arrival(barrier, self.generic(w, ins, True, mask=mask))
        w.order.release(barrier.order.collected, mask, "relaxed" in ins.parts)

    def arrive_op(self, op: Operation, barrier) -> None:
        """An operation's completion arrives, or completes bytes."""
        self.barrier_signalled(op, barrier)
        self.arrival(barrier, self.loads_on(op, barrier) if op.queue is None else self.of(op, True))
        barrier.order.collected.join(*self.done_by(op))

    def arrival(self, barrier, access: Access) -> None:
        """An operation or another CTA arrives at an mbarrier: its CTA must not exit before."""
        if barrier.cta.live_warps == 0:
            self.too_late(access, f"mbarrier at {shared_place(barrier.cta, barrier.offset, 8)}")
        else:
            barrier.order.late[access.component] = access

    def waited(self, w, ins: Instr, barrier, complete: bool) -> None:
        """A warp has looked at an mbarrier and, if `complete`, seen a phase complete."""
        self.barrier_used(w, ins, barrier)
        order = barrier.order
        if order.done is None or not complete:
            return
        if "relaxed" in ins.parts:
            w.order.see(order.done)
        else:
            w.order.acquire(order.done, order.done_foreign)
            self.lanes_meet(w)

    def loads_on(self, op: Operation, barrier, write: bool = True, generic: bool = False) -> Access:
        """The access of a copy that completes in an mbarrier's present phase."""
        return self.of(op, write, component=barrier.order.component, count=barrier.phase + 1, generic=generic)

    # ---- barriers of threads ----------------------------------------------------------------------------------

    def join_barrier(self, w, barrier, relaxed: bool = False) -> None:
        """A warp arrives at a barrier of threads (`barrier.order`, None at the start of each use)."""
        if barrier.order is None:
            barrier.order = Clock(w.order.domain)
        w.order.release(barrier.order, FULL_MASK, relaxed)
        self.lanes_meet(w)

    def pass_barrier(self, w, clock: Clock, relaxed: bool = False) -> None:
        """A warp has waited for a barrier of threads."""
        if relaxed:
            w.order.see(clock.rows)
        else:
            w.order.acquire(clock.rows, clock.foreign)

    # ---- the end of a CTA ---------------------------------------------------------------------------------------

    def cta_exits(self, cta) -> None:
        """The last warp of a CTA leaves the kernel: all accesses to its shared memory must be over by then."""
        last = Clock(cta.order.domain)
        for w in cta.warps:
            last.join(w.order.rows, w.order.foreign)
        shadow = cta.order.shared
        accesses = [self.ledger.accesses[number] for number in distinct(shadow.writes) if number]
        for number in distinct(shadow.reads):
            accesses += self.ledger.sets[number]
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
            for access in barrier.order.late.values():
                if not self.known(access, last):
                    self.too_late(access, f"mbarrier at {shared_place(cta, barrier.offset, 8)}")

    def too_late(self, access: Access, place: str) -> None:
        """Shared memory is accessed although its CTA may have exited."""
        self.report(
            "shared memory of a CTA that may have exited", place, access.describe(), "",
            _wait(access), (access.ins.line,),
        )  # fmt: skip

    # ---- operations that complete in order --------------------------------------------------------------------

    @staticmethod
    def new_queue(w) -> Queue:
        """A queue that warps share."""
        return Queue(w.order.domain)

    @staticmethod
    def passed_queue(w, queue: Queue, count: int) -> None:
        """A warp has waited for the first `count` operations of a queue."""
        w.order.passed(BASE, queue.component, count)

    def passed(self, w, queue: str, count: int | None = None, row: int = BASE) -> None:
        """A warp has waited for operations of a queue, all or the first `count`."""
        waited = self.queue(w, queue)
        w.order.passed(row, waited.component, waited.count if count is None else count)

    # ---- tensor memory ----------------------------------------------------------------------------------------

    def tensor_access(self, cta, where, access: Access, clock) -> None:
        """An access to lanes and columns of tensor memory; where: an index of [128, 512]."""
        self.touch(cta.order.tensor, where, access, (clock,), TENSOR_MEMORY, lambda: tensor_place(cta, where))
        suspects = cta.order.suspects
        if suspects is not None:
            if access.write:
                suspects[where] = 0
            else:
                for number in distinct(suspects[where]):
                    if number:
                        self.found = self.suspected[number - 1] | self.found

    def tensor_transfer(self, w, ins: Instr, where, write: bool) -> None:
        """tcgen05.ld or tcgen05.st."""
        queue = self.queue(w, "st" if write else "ld")
        queue.count += 1
        access = Access(
            w.order.domain, queue.component, queue.count, ins=ins, agent=f"warp {w.index}", cta=w.cta.coords,
            write=write, generic=False, queued=True,
        )  # fmt: skip
        self.tensor_access(w.cta, where, access, w.order)

    def tensor_waited(self, w, write: bool) -> None:
        """tcgen05.wait::ld or ::st."""
        name = "st" if write else "ld"
        self.passed(w, name)
        self.passed(w, name, row=TENSOR_OWN)

    def commit(self, w, ins: Instr, mask: int) -> Operation:
        """tcgen05.commit: publishes the operations before it and, as a fence::before_thread_sync does, orders them."""
        op = self.after(w, ins, "tcgen05", mask)
        op.tensor = True
        return op

    def tensor_freed(self, w, ins: Instr, column: int, columns: int) -> None:
        """tcgen05.dealloc: all accesses to the columns are over."""
        shadow = w.cta.order.tensor
        where = (slice(None), slice(column, column + columns))
        access = self.generic(w, ins, True, together=True)
        firsts = [self.ledger.accesses[number] for number in distinct(shadow.writes[where]) if number]
        for number in distinct(shadow.reads[where]):
            firsts += self.ledger.sets[number]
        for first in firsts:
            if not self.known(first, w.order):
                _, remedy = findings.diagnose(first, access, BASE, TENSOR_MEMORY)
                self.report(
                    "tensor memory is freed while it is in use", tensor_place(w.cta, where), first.describe(),
                    access.describe().replace(" writes:", " frees it:"), remedy,
                    (first.ins.line, ins.line), findings.is_tolerated(first, BASE, freed=True),
                )  # fmt: skip
        shadow.writes[where] = 0
        shadow.reads[where] = 0


# ---- helpers ------------------------------------------------------------------------------------------------------


SEVERAL, EACH = 64, 255  # instead of a lane: several have read; every lane has written the same place


@cache
def lane_numbers(mask: int) -> np.ndarray:
    """The lanes in a mask, uint8. Read-only."""
    return np.array(lanes(mask), np.uint8)


_SPANS: dict[int, tuple[np.ndarray, tuple[int, int, bool]]] = {}


def span(chunks: np.ndarray) -> tuple[int, int, bool]:
    """(lowest, highest, whether all between are there) of an array of numbers that does not change."""
    held = _SPANS.get(id(chunks))
    if held is None or held[0] is not chunks:
        low, high = int(chunks.min()), int(chunks.max())
        dense = chunks.size >= high - low + 1 and np.unique(chunks).size == high - low + 1
        if len(_SPANS) > 4096:
            _SPANS.clear()
        held = _SPANS[id(chunks)] = (chunks, (low, high, dense))
    return held[1]


def runs(mask: int) -> list[tuple[int, int]]:
    """(first, length) of each run of set bits."""
    found, at = [], 0
    while mask >> at:
        if mask >> at & 1:
            stop = at
            while mask >> stop & 1:
                stop += 1
            found.append((at, stop - at))
            at = stop
        else:
            at += 1
    return found


def part(shadow: Shadow, view: tuple) -> Shadow:
    """The part of a flat shadow that (first unit, shape, strides in units) names, as views."""
    first, shape, strides = view
    result = Shadow.__new__(Shadow)
    for name in ("writes", "reads"):
        flat = getattr(shadow, name)
        steps = tuple(stride * flat.itemsize for stride in strides)
        setattr(
            result,
            name,
            np.ndarray(shape, flat.dtype, buffer=flat, offset=first * flat.itemsize, strides=steps),
        )
    return result


def _larger(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    width = max(one.shape[1], two.shape[1])
    grown = np.zeros((max(len(one), len(two)), width), np.int32)
    for rows in (one, two):
        into = grown[: len(rows), : rows.shape[1]]
        np.maximum(into, rows, out=into)
    return grown


def _wait(access: Access) -> str:
    remedy = findings.wait_for(access)
    return f"{remedy}, before the CTA exits (another CTA's access: a cluster barrier behind it)"


def shared_place(cta, offset: int, nbytes: int) -> str:
    """Bytes of a CTA's shared memory in words."""
    name = cta.names.place(offset) or f"byte {offset - SHARED_BASE_OFFSET} on"
    return f"offset {offset:#x} to {offset + nbytes - 1:#x} of CTA {cta.coords} ({name})"


def global_place(memory: GlobalShadow, address: int) -> str:
    """A byte of an allocation in words."""
    return f"{memory.allocation.name} from byte {address - memory.allocation.address} on"


def tensor_place(cta, where) -> str:
    """Lanes and columns of a CTA's tensor memory in words."""
    lanes_, columns = where
    if isinstance(columns, slice):
        shown = f"columns {columns.start} to {columns.stop - 1}"
    else:
        shown = f"columns {int(np.min(columns))} to {int(np.max(columns))}"
    if isinstance(lanes_, slice):
        start, stop = lanes_.start or 0, LANES if lanes_.stop is None else lanes_.stop
        return f"lanes {start} to {stop - 1}, {shown} of CTA {cta.coords}"
    return f"lanes {int(np.min(lanes_))} to {int(np.max(lanes_))}, {shown} of CTA {cta.coords}"
