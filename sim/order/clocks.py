"""Vector clocks: the events that an agent knows to have happened before.

A component counts the events of one source: the accesses of a warp between two of its releases; the copies that
complete on one mbarrier, by phase; the tcgen05.mma and cp of a warp, its tcgen05.ld, its tcgen05.st, its cp.async, its
bulk stores' reads and their writes, the wgmma groups of a warpgroup, each in order of issue. An access is the pair
(component, count), and it is ordered before an agent whose clock has at least that count.

A clock has several rows, because an event may be known for one purpose and not for another:

- BASE: causality order (PTX ISA, "Memory Consistency Model").
- WRITES: BASE without what arrives through another CTA's mbarrier without .cluster scope: such an arrival orders no
  writes of the generic proxy or of cp.async (docs/notebook/checker.md: stale words on an H200).
- LOADED: BASE without reads of shared memory whose data an mbarrier arrival does not wait for (pending_loads.py).
- ASYNC_SHARED, ASYNC_GLOBAL: generic-proxy accesses followed by a fence.proxy.async; only these are ordered before
  accesses of the async proxy.
- BARRIERS: mbarrier initialisations followed by a fence.mbarrier_init; CTAs that have started.
- TENSOR: tcgen05 operations that are ordered before a thread synchronisation.
- MAP_RELEASED: writes of tensor maps followed by a tensormap proxy release.

These rows travel with every release. Rows of a thread alone: TENSOR_OWN (tcgen05 operations that are ordered before
its next ones), FENCED (BASE at its last fence: what its relaxed writes release), CLUSTER_FENCED (WRITES at its last
fence of cluster scope or wider), SEEN (events seen by its relaxed reads; they join BASE at its next fence), MAP (tensor
maps acquired).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warpspec.sim.lanes import FULL_MASK

BASE, WRITES, LOADED, ASYNC_SHARED, ASYNC_GLOBAL, BARRIERS, TENSOR, MAP_RELEASED = range(8)
PUBLISHED = 8  # rows that travel
TENSOR_OWN, FENCED, CLUSTER_FENCED, SEEN, MAP = range(8, 13)
ROWS = 13
ALIKE = slice(BASE, LOADED + 1)  # events in BASE are in the others, too, except those of such arrivals
STEP = 32  # components added when a clock grows

MOST_PARTS = 8  # most sets of lanes that are distinguished in a warp's accesses

Foreign = dict[int, np.ndarray]  # other clusters' clocks, by domain


class Domain:
    """The components of one cluster."""

    __slots__ = ("capacity", "count", "number")

    def __init__(self, number: int):
        self.number = number
        self.count = 0
        self.capacity = STEP

    def component(self) -> int:
        """A new component."""
        self.count += 1
        if self.count > self.capacity:
            self.capacity += STEP
        return self.count - 1


def wider(rows: np.ndarray, width: int) -> np.ndarray:
    """A copy of the clock with room for more components."""
    grown = np.zeros((rows.shape[0], width), np.int32)
    grown[:, : rows.shape[1]] = rows
    return grown


def merged(mine: Foreign, others: Foreign) -> Foreign:
    """The union of two clocks' knowledge of other clusters. Neither argument is changed."""
    if not others or others is mine:
        return mine
    if not mine:
        return others
    result = dict(mine)
    for number, rows in others.items():
        before = result.get(number)
        if before is None:
            result[number] = rows
        elif before is not rows:
            width = max(before.shape[1], rows.shape[1])
            result[number] = np.maximum(wider(before, width), wider(rows, width))
    return result


class Clock:
    """Rows of one domain and knowledge of others."""

    __slots__ = ("domain", "foreign", "known_kinds", "rows")

    def __init__(self, domain: Domain, count: int = PUBLISHED):
        self.domain = domain
        self.known_kinds: set[tuple] = set()  # see `Accesses.check`
        self.rows = np.zeros((count, domain.capacity), np.int32)
        self.foreign: Foreign = {}

    def join(self, rows: np.ndarray, foreign: Foreign) -> None:
        """Add the published rows of another clock."""
        mine = self.rows
        width = rows.shape[1]
        if width > mine.shape[1]:
            mine = self.rows = wider(mine, width)
        into = mine[:PUBLISHED, :width]
        np.maximum(into, rows[:PUBLISHED], out=into)
        if foreign:
            self.foreign = merged(self.foreign, foreign)

    def raise_to(self, row: int, component: int, count: int) -> None:
        """Add a component's events up to `count`."""
        if component >= self.rows.shape[1]:
            self.rows = wider(self.rows, component + STEP)
        if self.rows[row, component] < count:
            self.rows[row, component] = count
        if row == BASE and self.rows[ALIKE, component].min() < count:
            np.maximum(self.rows[ALIKE, component], count, out=self.rows[ALIKE, component])


class Snapshot:
    """A clock as it was when an asynchronous operation was issued. Never changed."""

    __slots__ = ("domain", "foreign", "known_kinds", "rows")

    def __init__(self, domain: Domain, rows: np.ndarray, foreign: Foreign):
        self.domain, self.rows, self.foreign = domain, rows, foreign
        self.known_kinds: set[tuple] = set()  # see `Accesses.check`


class Part:
    """Accesses of some lanes of a warp. synced: how many of them the warp's other lanes know (up to its last warp
    barrier)."""

    __slots__ = ("component", "epoch", "mask", "synced")

    def __init__(self, mask: int, component: int):
        self.mask, self.component = mask, component
        self.epoch = -1
        self.synced = 0


class Agent(Clock):
    """The clock of a warp. Its lanes share it, except their own accesses since the last warp barrier.

    Each set of lanes has a component for its accesses (`Part`). All accesses between two publications have the same
    count.
    """

    __slots__ = (
        "accesses",
        "epoch",
        "fence_scope",
        "frozen",
        "lanes",
        "last_loads",
        "last_release",
        "loose",
        "parts",
        "reads",
        "relaxed",
        "seen_foreign",
        "seen_releases",
        "tag",
        "told",
        "wait_component",
        "waits",
    )

    def __init__(self, domain: Domain):
        super().__init__(domain, ROWS)
        self.parts: dict[int, Part] = {}
        self.loose: list[Part] = []  # parts with accesses since the last warp barrier
        self.told: dict[int, int] = {}  # by component: how many of a loose part's accesses all lanes know of
        self.epoch = 0  # incremented by every publication: later accesses have a new count
        self.frozen: dict[int, Snapshot] = {}  # snapshots until the clock changes; key: lanes
        self.relaxed: dict[int, np.ndarray] = {}  # what lanes publish by relaxed writes, until it changes
        self.last_loads: dict[
            int, tuple[int, int]
        ] = {}  # (component, count) by instruction, see pending_loads.py
        self.accesses: dict = {}  # accesses at this count, by instruction, kind and lanes
        self.fence_scope = ""
        self.seen_foreign: Foreign = {}
        self.last_release = None  # a `synchronisation.Release`
        self.seen_releases: set[tuple] = set()  # see `Synchronisation.acquire_places`
        self.lanes = {"write": -1, "read": -1}  # `tag` at the last access of each kind to shared memory
        self.reads: list[tuple] = []  # reads of shared memory since then, see `MemoryAccesses._between_lanes`
        self.tag = 0  # names the time since the last warp barrier, among all warps
        self.wait_component: int | None = None  # counts its waits for mbarriers that have passed
        self.waits = 0

    def part(self, mask: int) -> Part:
        """The part for these lanes; for all lanes if a warp has too many parts."""
        found = self.parts.get(mask)
        if found is None:
            mask = mask if len(self.parts) < MOST_PARTS else FULL_MASK
            found = self.parts.get(mask) or Part(mask, self.domain.component())
            self.parts[mask] = found
            if found.component >= self.rows.shape[1]:
                self.rows = wider(self.rows, found.component + STEP)
        return found

    def count(self, part: Part) -> int:
        """The count of an access that takes place now."""
        if part.epoch != self.epoch:
            part.epoch = self.epoch
            self.rows[ALIKE, part.component] = self.rows[BASE, part.component] + 1
            self.accesses = {}
            self.frozen = {}
            if part not in self.loose:
                self.loose.append(part)
        return int(self.rows[BASE, part.component])

    def meet(self, tag: int) -> None:
        """The lanes have met at a barrier: each knows what the others have accessed."""
        for part in self.loose:
            part.synced = int(self.rows[BASE, part.component])
        self.loose = []
        self.told.clear()
        self._changed()
        self.tag = tag
        self.reads.clear()

    def _changed(self) -> None:
        self.frozen = {}
        self.relaxed = {}

    def told_of_all(self, rows: np.ndarray) -> bool:
        """Whether a clock that all lanes have acquired includes what each did since they last met; if so, they have
        met. An mbarrier's clock does if all lanes have arrived at it."""
        return all(
            part.component < rows.shape[1] and rows[BASE, part.component] >= self.rows[BASE, part.component]
            for part in self.loose
        )

    def tell(self, rows: np.ndarray) -> None:
        """All lanes have acquired a clock: they know of what some of them did before they arrived."""
        for part in self.loose:
            if part.component < rows.shape[1]:
                self.told[part.component] = int(rows[BASE, part.component])

    def acquire(self, rows: np.ndarray, foreign: Foreign) -> None:
        """Acquire what a synchronisation object published."""
        self.join(rows, foreign)
        self._changed()

    def known_to(self, mask: int) -> np.ndarray:
        """The rows as known to some lanes: without other lanes' accesses since they met."""
        strange = [part for part in self.loose if part.mask & ~mask]
        if not strange:
            return self.rows
        rows = self.rows.copy()
        for part in strange:
            column = rows[: BARRIERS + 1, part.component]
            np.minimum(column, part.synced, out=column)
        return rows

    def release(
        self,
        into: Clock,
        mask: int,
        relaxed: bool = False,
        narrow: bool = False,
        pending: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Publish lanes' knowledge to a synchronisation object. relaxed: only what precedes a fence. narrow: the object
        is another CTA's, outside the scope: only writes that precede a fence of its scope. pending: the warp's loads
        that may be in flight, as (component, count)."""
        rows = self.published(mask, relaxed)
        if narrow or pending:
            rows = rows[:PUBLISHED].copy()
        if narrow:
            np.minimum(rows[WRITES], self.rows[CLUSTER_FENCED], out=rows[WRITES])
        for component, count in pending:
            rows[LOADED, component] = min(rows[LOADED, component], count - 1)
        into.join(rows, self.foreign)

    def published(self, mask: int, relaxed: bool = False) -> np.ndarray:
        """The rows that lanes publish now, without later accesses. A relaxed publication also omits accesses since the
        last fence, so it begins no new count; its rows do not change later."""
        if not relaxed:
            rows = self.known_to(mask)
            self.epoch += 1
            return rows
        rows = self.relaxed.get(mask)
        if rows is None:
            rows = self.relaxed[mask] = self.known_to(mask)[:PUBLISHED].copy()
            np.minimum(rows[: ASYNC_GLOBAL + 1], self.rows[FENCED], out=rows[: ASYNC_GLOBAL + 1])
        return rows

    def freeze(self, mask: int) -> Snapshot:
        """The clock for an asynchronous operation that lanes issue now."""
        found = self.frozen.get(mask)
        if found is None:
            rows = self.known_to(mask)
            self.epoch += 1
            found = Snapshot(self.domain, self.rows.copy() if rows is self.rows else rows, self.foreign)
            self.frozen[mask] = found
        return found

    def fence(self, source: int, target: int, mask: int = FULL_MASK) -> None:
        """Copy lanes' knowledge from one row to another, without later accesses."""
        rows = self.known_to(mask)
        np.maximum(self.rows[target], rows[source], out=self.rows[target])
        self.epoch += 1
        self._changed()

    def passed(self, row: int, component: int, count: int) -> None:
        """This thread has waited for a component's events."""
        self.raise_to(row, component, count)
        self._changed()

    def wait_passes(self) -> tuple[int, int]:
        """Count a wait for an mbarrier that has passed; returns its (component, count). Whatever the warp executes
        from now on, relaxed arrivals included, comes after it."""
        if self.wait_component is None:
            self.wait_component = self.domain.component()
        self.waits += 1
        for row in (BASE, FENCED):
            self.raise_to(row, self.wait_component, self.waits)
        self._changed()
        return self.wait_component, self.waits

    def see(self, rows: np.ndarray) -> None:
        """A relaxed read: the published events are known from the next fence on."""
        mine = self.rows
        width = rows.shape[1]
        if width > mine.shape[1]:
            mine = self.rows = wider(mine, width)
        np.maximum(mine[SEEN, :width], rows[BASE], out=mine[SEEN, :width])
        np.maximum(mine[1:PUBLISHED, :width], rows[1:PUBLISHED], out=mine[1:PUBLISHED, :width])
        self._changed()

    def foreign_seen(self, domain: int, rows: np.ndarray, relaxed: bool) -> None:
        """A read of another cluster's clock: like ``see`` if relaxed, else an acquire."""
        if relaxed:
            self.seen_foreign = merged(self.seen_foreign, {domain: rows})
        else:
            self.foreign = merged(self.foreign, {domain: rows})
        self._changed()

    def acquire_seen(self) -> None:
        """A fence: relaxed reads before it count as acquires."""
        np.maximum(self.rows[BASE], self.rows[SEEN], out=self.rows[BASE])
        self.foreign = merged(self.foreign, self.seen_foreign)
        self._changed()
