"""The wgmmas of a replay: a queue a warp, whose heads share their schedulers' tensor cores.

A warp has `wgmma_depth` of them in flight; it issues the next when the first of them is through, which is some clocks
after its last multiplication.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from warpspec.sim.clocks.actions import Action
from warpspec.sim.clocks.costs import PIPES, Pipe
from warpspec.sim.clocks.pool import SCHEDULERS

Cause = tuple[str, int, float]
"""Who ends a wait: (unit that worked, number of the warp that issued its work, time of issue)."""


@dataclass(slots=True)
class Event:
    """The end of a barrier's phase: missing contributions, time and author of the last one, waiting warps."""

    missing: int
    time: float = 0.0
    cause: Cause | None = None
    waiting: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Product:
    """A warp's part of a wgmma.

    busy: clocks of its tensor core. reads: its part of the clocks that the operands take of shared memory. group: the
    group that it ends. place: (SM, scheduler). issued: when.
    """

    busy: float
    reads: float
    group: Event
    place: tuple[int, int]
    issued: float


def is_product(owner: int) -> bool:
    """Whether what has ended in the pool is a wgmma."""
    return owner < 0


def owner_of(owner: int) -> int:
    """The warp of a wgmma that has ended in the pool."""
    return -1 - owner


class Products:
    """The unfinished wgmmas of every warp of a replay."""

    def __init__(self, replay):
        self.replay = replay
        self.queues: dict[int, deque[Product]] = {}
        self.flying: dict[int, int] = {}  # each warp's wgmmas that are not through
        self.slots: dict[int, Event] = {}  # warps that cannot issue another wgmma yet

    def in_flight(self, warp: int) -> int:
        """Number of a warp's wgmmas that are not through."""
        return self.flying.get(warp, 0)

    def issue(self, warp: int, place: tuple[int, int], action: Action, group: Event) -> None:
        """A warp's part of a wgmma joins the warp's queue; the group waits for it."""
        group.missing += 1
        queue = self.queues.setdefault(warp, deque())
        queue.append(Product(action.busy, action.shared / SCHEDULERS, group, place, self.replay.now))
        self.flying[warp] = self.in_flight(warp) + 1
        sm, scheduler = place
        self.replay.sms[sm].tensor_used[scheduler] += action.busy
        if len(queue) == 1:
            self._begin(warp, action.latency)

    def _begin(self, warp: int, latency: float) -> None:
        product = self.queues[warp][0]
        demand = [0.0] * PIPES
        demand[Pipe.TENSOR], demand[Pipe.OPERANDS] = product.busy, product.reads
        self.replay.pool.add(self.replay.now, -1 - warp, *product.place, product.busy + latency, demand)

    def slot(self, warp: int) -> Event:
        """The time from which a warp that has as many wgmmas in flight as it can may issue another."""
        event = self.slots[warp] = Event(1)
        return event

    def ended(self, warp: int) -> None:
        """The head of a warp's queue has made its last multiplication."""
        replay, queue = self.replay, self.queues[warp]
        product = queue.popleft()
        cause = ("tensor", warp, product.issued)
        replay.push(replay.now + replay.chip.clocks("wgmma_through"), "through", (warp, cause))
        replay.push(replay.now + replay.chip.clocks("wgmma_tail"), "signal", (product.group, cause))
        if queue:
            self._begin(warp, 0.0)

    def through(self, warp: int, cause: Cause) -> None:
        """A wgmma of a warp counts no longer as one in flight."""
        self.flying[warp] -= 1
        if warp in self.slots:
            self.replay.signal(self.slots.pop(warp), cause)
