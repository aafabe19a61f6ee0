"""Everything that orders accesses: fences, synchronising accesses, mbarriers, thread barriers, waits for operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warpspec.sim.codegen.memory import space_of
from warpspec.sim.instruction import Instr, Operand
from warpspec.sim.lanes import FULL_MASK
from warpspec.sim.memory import (
    CTA_RANK_SHIFT,
    WINDOW_SHIFT,
)
from warpspec.sim.order.clocks import (
    ASYNC_GLOBAL,
    ASYNC_SHARED,
    BARRIERS,
    BASE,
    CLUSTER_FENCED,
    FENCED,
    MAP,
    MAP_RELEASED,
    PUBLISHED,
    TENSOR,
    TENSOR_OWN,
    WRITES,
    Clock,
)
from warpspec.sim.order.findings import Access
from warpspec.sim.order.launches import EARLIER
from warpspec.sim.order.memory import OFFSET_MASK, MemoryAccesses
from warpspec.sim.order.places import of_lanes, shared_place
from warpspec.sim.order.state import BarrierOrder, Operation, Queue

SCOPES = ("cta", "cluster", "gpu", "gl", "sys")  # membar's .gl is .gpu
MOST_SEEN = 4096  # releases that a thread remembers having acquired


@dataclass(frozen=True, slots=True)
class Ordered:
    """The address, scope and order of a synchronising access."""

    operand: Operand
    space: str
    scope: str
    reads: bool
    writes: bool
    acquires: bool
    releases: bool

    @classmethod
    def of(cls, ins: Instr) -> Ordered:
        kind, parts = ins.parts[0], ins.parts
        updates = kind in ("atom", "red")
        acquires = "acquire" in parts or "acq_rel" in parts
        releases = "release" in parts or "acq_rel" in parts
        scope = next((part for part in parts if part in SCOPES), "gpu" if updates else "sys")
        if not updates and not acquires and not releases and "relaxed" not in parts:
            scope = "sys"  # volatile
        return cls(
            ins.operands[1] if kind in ("ld", "atom") else ins.operands[0], space_of(ins), scope,
            updates or kind == "ld", updates or kind == "st", acquires, releases,
        )  # fmt: skip


class Releases:
    """The accesses released at a place, by CTA; places released by the same instructions share it. Never changed."""

    __slots__ = ("by_cta",)

    def __init__(self, by_cta: dict[int, Release]):
        self.by_cta = by_cta

    def joined(self, cta: int, release: Release) -> Releases:
        """Add a release to these; the same object if that adds nothing."""
        before = self.by_cta.get(cta)
        if before is not None:
            release = release.joined(before)
            if release is before:
                return self
        return Releases({**self.by_cta, cta: release})


class Release:
    """The accesses that a CTA's threads have released at a place. clock: rows by domain. Never changed.

    rows, foreign: what a thread published, and knew of other clusters, of one release alone.
    """

    __slots__ = ("clock", "cluster", "foreign", "rows", "scope")

    def __init__(self, scope: str, clock: dict[int, np.ndarray], cluster: int, rows=None, foreign=None):
        self.scope, self.clock, self.cluster = scope, clock, cluster
        self.rows, self.foreign = rows, foreign

    def joined(self, before: Release) -> Release:
        """This release joined with an earlier one at its place; the earlier one itself if this adds nothing."""
        clock, adds = dict(self.clock), self.scope != before.scope
        for domain, old in before.clock.items():
            mine = clock.get(domain)
            if mine is not None and mine is not old:
                width = min(mine.shape[1], old.shape[1])
                if (mine[:, :width] <= old[:, :width]).all() and not mine[:, width:].any():
                    clock[domain] = old
                else:
                    clock[domain], adds = _larger(old, mine), True
            else:
                clock[domain] = old
        if not adds and len(clock) == len(before.clock):
            return before
        return Release(self.scope, clock, self.cluster)


class Synchronisation(MemoryAccesses):
    """Fences, mbarriers, barriers, queues."""

    # ---- fences and synchronising accesses --------------------------------------------------------------------

    def fence(self, w, ins: Instr, mask: int) -> None:
        """fence and membar in all their forms (PTX ISA 9.7.13.4)."""
        agent, parts = w.order, ins.parts
        if "mbarrier_init" in parts:
            agent.fence(BASE, BARRIERS, mask)
        elif "tensormap::generic" in parts:
            if "acquire" in parts:
                agent.fence(MAP_RELEASED, MAP, mask)
            else:
                agent.fence(BASE, MAP_RELEASED, mask)
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
                if agent.fence_scope != "cta":
                    agent.fence(WRITES, CLUSTER_FENCED, mask)

    def grid_dependency(self, w, ins: Instr, mask: int) -> None:
        """griddepcontrol.wait and .launch_dependents."""
        agent, seen = w.order, self.seen
        if "wait" in ins.parts:
            seen.waited = True
            if self._behind_wait is not None:
                agent.acquire(agent.rows, self._behind_wait)
            return
        seen.triggered = True
        seen.in_order |= EARLIER.number in agent.foreign
        if agent.fence_scope in ("gpu", "sys", "gl"):
            released = self._released.setdefault(agent.domain.number, Clock(agent.domain))
            released.join(np.broadcast_to(agent.rows[FENCED], (PUBLISHED, agent.rows.shape[1])), {})

    def tensor_fence(self, w, ins: Instr, before: bool) -> None:
        """tcgen05.fence::before_thread_sync and ::after_thread_sync."""
        w.order.fence(*((TENSOR_OWN, TENSOR) if before else (TENSOR, TENSOR_OWN)))

    def ordered(self, w, ins: Instr, mask: int) -> None:
        """ld, st, atom and red that are atomic, volatile or have an order: they synchronise, place by place."""
        form = self._orders.get(ins.index)
        if form is None:
            form = self._orders[ins.index] = Ordered.of(ins)
        if form.space == "local":
            return
        addresses = of_lanes(w.address(form.operand), mask)
        self.lane_access(w, ins, addresses, mask, strong=form.scope)
        places: list = list(dict.fromkeys(addresses.tolist()))
        if form.space != "global":
            places = [self._place(w, address, form.space) for address in places]
        if form.reads:
            self.acquire_places(w, places, form.scope, relaxed=not form.acquires)
        if form.writes:
            updates = form.reads
            self.release_places(w, mask, places, form.scope, relaxed=not form.releases, replaces=not updates)

    @staticmethod
    def _place(w, address: int, space: str):
        """A place of memory by name: a global address, or (CTA, offset)."""
        if space == "generic" and not address >> WINDOW_SHIFT:
            return address
        return w.cta.cluster.ctas[address >> CTA_RANK_SHIFT & 0xFF].number, address & OFFSET_MASK

    def acquire_places(self, w, places: list, scope: str, relaxed: bool) -> None:
        """Acquire what others released at places of memory, as far as both scopes reach. A thread skips releases it has
        already acquired."""
        agent, cta = w.order, w.cta
        seen = agent.seen_releases
        for releases in dict.fromkeys(map(self._synchronised.get, places)):
            if releases is None or (releases, scope, relaxed) in seen:
                continue
            if len(seen) >= MOST_SEEN:
                seen.clear()
            seen.add((releases, scope, relaxed))
            for number, release in releases.by_cta.items():
                for reach in (scope, release.scope):
                    if (reach == "cta" and number != cta.number) or (
                        reach == "cluster" and release.cluster != cta.cluster.number
                    ):
                        break
                else:
                    for domain, rows in release.clock.items():
                        if domain != agent.domain.number:
                            agent.foreign_seen(domain, rows, relaxed)
                        elif relaxed:
                            agent.see(rows)
                        else:
                            agent.acquire(rows, {})

    def release_places(self, w, mask: int, places: list, scope: str, relaxed: bool, replaces: bool) -> None:
        """Publish at places of memory. replaces: a store ends what earlier ones released there."""
        agent, cta = w.order, w.cta
        if relaxed and agent.fence_scope and SCOPES.index(agent.fence_scope) < SCOPES.index(scope):
            scope = agent.fence_scope
        rows = agent.published(mask, relaxed)
        last = agent.last_release
        if last is None or last.scope != scope or last.rows is not rows or last.foreign is not agent.foreign:
            kept = rows if relaxed else rows[:PUBLISHED].copy()
            clock = {agent.domain.number: kept, **agent.foreign}
            last = agent.last_release = Release(scope, clock, cta.cluster.number, kept, agent.foreign)
        release, known = last, self._synchronised
        before = [None] * len(places) if replaces else list(map(known.get, places))
        if len(self._behind) >= MOST_SEEN:
            self._behind.clear()
        for old in dict.fromkeys(before):
            if (old, release) not in self._behind:
                joined = Releases({cta.number: release}) if old is None else old.joined(cta.number, release)
                self._behind[old, release] = joined
        known.update((place, self._behind[old, release]) for place, old in zip(places, before, strict=True))

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
            remedy = "fence.mbarrier_init or fence.proxy.async after the initialisation"
            known = self.known(init, clock)
            if not known:
                remedy += ", then bar.sync or a cluster barrier"
            # Triton's kernels of one CTA have no such fence, and work.
            alone = known and len(op.cta.cluster.ctas) == 1
            self._early(init, op.ins, op.agent, op.cta, barrier, remedy, alone)

    def _early(
        self, init: Access, ins: Instr, agent: str, cta, barrier, remedy: str, tolerated: bool = False
    ) -> None:
        second = Access(init.domain, 0, 0, ins=ins, agent=agent, cta=cta.coords, write=True, generic=True)
        place = f"mbarrier at {shared_place(barrier.cta, barrier.offset, 8)}"
        self.report(
            "mbarrier used before its initialisation is visible", place, init.describe(),
            second.describe().replace(" writes:", " uses it:"), remedy, (init.ins.line, ins.line), tolerated,
        )  # fmt: skip

    def arrive(self, w, ins: Instr, barrier, mask: int) -> None:
        """A warp arrives. Without .cluster scope, an arrival on another CTA's mbarrier releases no writes to it."""
        self.barrier_used(w, ins, barrier)
        narrow = barrier.cta is not w.cta and "cluster" not in ins.parts
        if narrow:
            self.narrow[ins.index] = ins
        if barrier.cta is not w.cta:
            self.arrival(barrier, self.generic(w, ins, True, mask=mask))
        last = w.order.last_loads
        pending = [last[load] for load in self._pending.get(ins.index, ()) if load in last]
        w.order.release(barrier.order.collected, mask, "relaxed" in ins.parts, narrow, pending)

    def arrive_op(self, op: Operation, barrier) -> None:
        """An operation's completion arrives, or completes bytes. Only the barrier shows that it has arrived: a later
        commit tracks the same operations, and the ISA does not order two commits' arrivals."""
        self.barrier_signalled(op, barrier)
        self.arrival(barrier, self.loads_on(op, barrier), None if op.queue is None else self.of(op, True))
        barrier.order.collected.join(*self.done_by(op))

    def arrival(self, barrier, access: Access, tracked: Access | None = None) -> None:
        """An operation or another CTA arrives at an mbarrier: its CTA must not exit before. tracked: the operations
        whose completion arrives, of a commit."""
        if barrier.cta.live_warps == 0:
            self.too_late(access, f"mbarrier at {shared_place(barrier.cta, barrier.offset, 8)}")
        else:
            barrier.order.late[access.component] = (access, tracked)

    def waited(self, w, ins: Instr, barrier, complete: bool) -> None:
        """A warp has looked at an mbarrier and, if `complete`, seen a phase complete."""
        self.barrier_used(w, ins, barrier)
        order = barrier.order
        if not complete:
            return
        if "parity" in ins.parts:
            self.wait_passes(w, ins, barrier)
        if order.done is None:
            return
        if "relaxed" in ins.parts:
            w.order.see(order.done)
        else:
            w.order.acquire(order.done, order.done_foreign)
            if w.order.told_of_all(order.done):
                self.lanes_meet(w)
            else:
                w.order.tell(order.done)

    def wait_passes(self, w, ins: Instr, barrier) -> None:
        """A warp's wait for a parity has passed. Until the warp has passed it, the next phase must not end: then the
        parity would be that of a phase to come."""
        component, count = w.order.wait_passes()
        access = Access(
            w.order.domain, component, count, ins=ins, agent=f"warp {w.index}", cta=w.cta.coords, write=False,
            generic=True,
        )  # fmt: skip
        barrier.order.passed[w.order] = barrier.phase - 1, access

    def phase_ends(self, barrier) -> None:
        """A phase of an mbarrier has ended. Warps that have waited for the phase before it must have told so, by an
        arrival at this phase or a chain of such; or they might have been late."""
        order, ended = barrier.order, barrier.phase - 1
        order.phase_ends(barrier.phase)
        for phase, wait in order.passed.values():
            if phase == ended - 1 and not self.known(wait, order.collected):
                self._may_miss(barrier, wait, phase)

    def _may_miss(self, barrier, wait: Access, phase: int) -> None:
        which = f"phase {phase}" if phase >= 0 else "the phase before the first"
        warp, ins = barrier.last
        last = Access(
            wait.domain,
            0,
            0,
            ins=ins,
            agent=f"warp {warp.index}",
            cta=warp.cta.coords,
            write=True,
            generic=True,
        )
        self.report(
            "a wait that may miss its phase",
            f"{which} of mbarrier {shared_place(barrier.cta, barrier.offset, 8)}",
            wait.describe().replace(" reads:", f" waits for parity {phase & 1}:"),
            last.describe().replace(" writes:", f" arrives last before phase {phase + 1} ends:"),
            f"an arrival of the waiting warp after its wait (or of a warp that it meets there) for which the end of "
            f"phase {phase + 1} waits; a warp that is late finds parity {phase & 1} to be that of phase {phase + 2}",
            (wait.ins.line, ins.line),
        )  # fmt: skip

    def loads_on(self, op: Operation, barrier, write: bool = True, generic: bool = False) -> Access:
        """The access of a copy that completes in an mbarrier's present phase."""
        return self.of(op, write, component=barrier.order.component, count=barrier.phase + 1, generic=generic)

    # ---- barriers of threads ----------------------------------------------------------------------------------

    def join_barrier(self, w, barrier, relaxed: bool = False) -> None:
        """A warp arrives at a barrier of threads (`barrier.order`, None at the start of each use). Its lanes do not
        meet by that: each lets the others of the barrier know what it did, and only a wait lets it know."""
        if barrier.order is None:
            barrier.order = Clock(w.order.domain)
        w.order.release(barrier.order, FULL_MASK, relaxed)
        w.state["order released"] = not relaxed

    def pass_barrier(self, w, clock: Clock, relaxed: bool = False) -> None:
        """A warp has waited for a barrier of threads."""
        if relaxed:
            w.order.see(clock.rows)
        else:
            w.order.acquire(clock.rows, clock.foreign)
            if w.state.get("order released"):
                self.lanes_meet(w)

    # ---- operations that complete in order --------------------------------------------------------------------

    @staticmethod
    def new_queue(w) -> Queue:
        """A queue that warps share."""
        return Queue(w.order.domain)

    @staticmethod
    def passed_queue(w, ins: Instr, queue: Queue, count: int, issuers: Sequence[tuple] = ()) -> None:
        """A warp has waited for the first `count` operations of a queue. issuers: the warps that issued the last of
        them, each with its operation; they had passed their waits before."""
        agent = w.order
        agent.passed(BASE, queue.component, count)
        for issuer, op in issuers:
            component = issuer.order.wait_component
            if component is not None and component < op.clock.rows.shape[1]:
                for row in (BASE, FENCED):
                    agent.raise_to(row, component, int(op.clock.rows[BASE, component]))

    def passed(self, w, queue: str, count: int | None = None, row: int = BASE) -> None:
        """A warp has waited for operations of a queue, all or the first `count`."""
        waited = self.queue(w, queue)
        w.order.passed(row, waited.component, waited.count if count is None else count)


def _larger(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    width = max(one.shape[1], two.shape[1])
    grown = np.zeros((max(len(one), len(two)), width), np.int32)
    for rows in (one, two):
        into = grown[: len(rows), : rows.shape[1]]
        np.maximum(into, rows, out=into)
    return grown
