"""Bulk async-groups, by which a thread waits for its bulk copies (PTX ISA 9.7.9.25, completion mechanisms)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from warpspec.sim.instruction import Instr
from warpspec.sim.lanes import lanes
from warpspec.sim.machine import Machine
from warpspec.sim.operation import CallOp, Op, Wait
from warpspec.sim.registry import Family, handler
from warpspec.sim.tma import TensorMap
from warpspec.sim.warp import Warp


class MapRead:
    """A load's read of its tensor map: it happens with the load, or earlier if the thread's wait_group.read asks."""

    __slots__ = ("found", "group", "read")

    def __init__(self, read: Callable[[Machine], TensorMap], group: BulkGroup):
        self.read, self.group = read, group
        self.found: TensorMap | None = None
        group.maps.add(self)

    def get(self, m: Machine) -> TensorMap:
        if self.found is None:
            self.found = self.read(m)
            self.group.maps.discard(self)
        return self.found


class BulkGroup:
    """Operations that one thread committed together. Machine waits on the object itself.

    Loads complete on mbarriers and are no part of it, but their reading of tensor maps is: kernels that
    change a map between loads (CUTLASS's grouped GEMMs) commit and wait_group.read before they write it.
    """

    __slots__ = ("maps", "number", "reads", "writes")

    def __init__(self, number: int) -> None:
        self.number = number  # number among the thread's groups, from 1
        self.reads = 0  # operations that have not read their source or their tensor map yet
        self.writes = 0  # stores that are not complete
        self.maps: set[MapRead] = set()  # loads' tensor maps not read yet


class BulkGroups:
    """The bulk async-groups of one thread, oldest first."""

    __slots__ = ("committed", "open")

    def __init__(self) -> None:
        self.open = BulkGroup(1)
        self.committed: deque[BulkGroup] = deque()


def open_group(w: Warp, lane: int) -> BulkGroup:
    """The group that the next commit_group of a thread closes."""
    return _groups(w, lane).open


def _groups(w: Warp, lane: int) -> BulkGroups:
    by_lane = w.state.setdefault("bulk_groups", {})
    if lane not in by_lane:
        by_lane[lane] = BulkGroups()
    return by_lane[lane]


class BulkStore(Op):
    """shared::cta to global: reads when executed, defers the write. In the group of each issuing thread."""

    __slots__ = ("groups", "read", "write")

    def __init__(self, groups: Sequence[BulkGroup], read: Callable, write: Callable, text: str):
        super().__init__(text)
        self.groups, self.read, self.write = groups, read, write
        for group in groups:
            group.reads += 1
            group.writes += 1

    def execute(self, m: Machine) -> None:
        data = self.read(m)
        for group in self.groups:
            group.reads -= 1
            m.notify(group)
        m.defer(CallOp(lambda: self._finish(m, data), f"{self.text}: write", uses_shared=False))

    def _finish(self, m: Machine, data: np.ndarray) -> None:
        self.write(m, data)
        for group in self.groups:
            group.writes -= 1
            m.notify(group)


def issuers(mask: int, keys: Sequence[Hashable], once: bool) -> list[list[int]]:
    """The lanes of `mask`, those together whose copies are one operation.

    keys: each lane's operands. A store that lanes issue with the same operands is made once: ptxas compiles
    it to one instruction of the warp, and kernels that wait for it in one elected thread rely on that.
    Reductions (`once` false) take place for each thread; an H200 does so.
    """
    if not once:
        return [[lane] for lane in lanes(mask)]
    found: dict[Hashable, list[int]] = {}
    for lane in lanes(mask):
        found.setdefault(keys[lane], []).append(lane)
    return list(found.values())


@handler("cp.async.bulk.commit_group", family=Family.BULK_GROUP, destinations=0)
def commit_group(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.bulk.commit_group: an empty group is complete at once."""
    for lane in lanes(mask):
        groups = _groups(w, lane)
        group = groups.open
        groups.committed.append(group)
        groups.open = BulkGroup(group.number + 1)
        if group.maps:
            group.reads += 1
            m.defer(
                CallOp(lambda group=group: _read_maps(m, group), "tensor maps of loads", uses_shared=False)
            )


def _read_maps(m: Machine, group: BulkGroup) -> None:
    for read in tuple(group.maps):
        read.get(m)
    group.reads -= 1
    m.notify(group)


def _pending(committed: Sequence[BulkGroup], newest: int, reads_only: bool) -> BulkGroup | None:
    """The oldest group with pending operations, the `newest` ones excepted."""
    for i in range(len(committed) - newest):
        if committed[i].reads or (committed[i].writes and not reads_only):
            return committed[i]
    return None


@handler("cp.async.bulk.wait_group", family=Family.BULK_GROUP, destinations=0)
def wait_group(m: Machine, w: Warp, ins: Instr, mask: int) -> Wait | None:
    """cp.async.bulk.wait_group{.read} N: wait until at most the N newest groups are pending."""
    newest = w.scalar(ins.operands[0], mask)
    reads_only = ins.has("read")
    by_lane = w.state.get("bulk_groups", {})
    for lane in lanes(mask):
        groups = by_lane.get(lane)
        if groups is None:
            continue
        committed = groups.committed
        while committed and not committed[0].writes and not committed[0].reads:
            committed.popleft()
        waited = _pending(committed, newest, reads_only)
        if waited is None and m.order is not None:
            last = groups.open.number - 1 - newest
            m.order.passed(w, "bulk reads", last)
            if not reads_only:
                m.order.passed(w, "bulk writes", last)
        if waited is not None:
            what = "read" if reads_only else "complete"
            pending = waited.reads if reads_only else max(waited.reads, waited.writes)
            text = f"bulk async-group of lane {lane} to {what}: {pending} operations pending"
            return Wait(on=waited, text=text)
    return None
