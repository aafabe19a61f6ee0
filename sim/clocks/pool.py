"""Concurrent native code of several warps, modelled as fluid: each progresses at the rate that its pipes allow.

A stretch of code that alone takes T clocks and D of a pipe loads that pipe by D / T. Where the stretches of one
scheduler (for shared memory: of one SM) load a pipe by more than 1, those that use it slow down by that factor. A
warp's wgmma is a stretch, too: wgmmas of a scheduler's warps share its tensor core, and concurrent code is slower.
"""

from __future__ import annotations

from warpspec.sim.clocks.costs import PIPES, Pipe

SCHEDULERS = 4
LIGHT = 0.04  # load of a pipe below which a stretch is not slowed down when the pipe is full
NEVER = float("inf")


class Stretch:
    """Native code in progress, or a wgmma. owner: the warp, or the argument of `Pool.add`.

    left: clocks that it would still take alone, at the time `since`; slow: its slowdown from then on; end: when it
    ends.
    """

    __slots__ = ("end", "left", "loads", "owner", "scheduler", "since", "slow")

    def __init__(self, owner: int, scheduler: int, left: float, loads: tuple[float, ...], now: float):
        self.owner, self.scheduler, self.left, self.loads = owner, scheduler, left, loads
        self.since, self.slow, self.end = now, 1.0, now + left

    def change(self, now: float, slow: float) -> None:
        """Continue at another rate."""
        self.left -= (now - self.since) / self.slow
        self.since, self.slow = now, slow
        self.end = now + max(self.left, 0.0) * slow


class _Sm:
    """The code running on one SM, by scheduler. Rates are computed when the next end is requested."""

    __slots__ = ("active", "beside", "changed", "next", "squeeze", "totals")

    def __init__(self, beside: float):
        self.beside = beside  # extra clocks of an instruction while the tensor core works
        self.active: list[list[Stretch]] = [[] for _ in range(SCHEDULERS)]
        self.totals = [[0.0] * PIPES for _ in range(SCHEDULERS)]
        self.changed: set[int] = set()  # schedulers on which something began or ended
        self.squeeze = 1.0  # slowdown of stretches that use shared memory
        self.next: Stretch | None = None

    def settle(self, now: float) -> None:
        """Compute all rates, and which stretch ends next."""
        changed = self.changed
        for scheduler in changed:
            active = self.active[scheduler]
            self.totals[scheduler] = (
                [sum(loads) for loads in zip(*[one.loads for one in active], strict=True)]
                if active
                else [0.0] * PIPES
            )
        squeeze = max(1.0, sum(totals[Pipe.SHARED] for totals in self.totals))
        if squeeze != self.squeeze:
            self.squeeze = squeeze
            changed = range(SCHEDULERS)
        for scheduler in changed:
            self._settle(self.active[scheduler], self.totals[scheduler], now)
        self.changed.clear()
        self.next = None
        end = NEVER
        for active in self.active:
            for stretch in active:
                if stretch.end < end:
                    self.next, end = stretch, stretch.end

    def _settle(self, active: list[Stretch], totals: list[float], now: float) -> None:
        beside = self.beside * min(totals[Pipe.TENSOR], 1.0)
        full = [(pipe, total) for pipe, total in enumerate(totals) if total > 1.0 and pipe != Pipe.SHARED]
        if self.squeeze > 1.0:
            full.append((Pipe.SHARED, self.squeeze))
        for stretch in active:
            slow = 1.0
            for pipe, total in full:
                if total > slow and stretch.loads[pipe] > LIGHT:
                    slow = total
            if beside and not stretch.loads[Pipe.TENSOR]:
                slow *= 1.0 + beside * stretch.loads[Pipe.ISSUE]
            if slow != stretch.slow:
                stretch.change(now, slow)


class Pool:
    """Everything that runs on the SMs. used: for each SM, clocks that each pipe was taken. beside: see `_Sm`."""

    def __init__(self, sms: int, beside: float):
        self.sms = [_Sm(beside) for _ in range(sms)]
        self.used = [[0.0] * PIPES for _ in range(sms)]
        self.now = 0.0  # time of the last change

    def add(self, now: float, owner: int, sm: int, scheduler: int, alone: float, demand: list[float]) -> None:
        """Begin a stretch of `alone` clocks."""
        alone = max(alone, 1.0)
        used = self.used[sm]
        for pipe in range(PIPES):
            used[pipe] += demand[pipe]
        place = self.sms[sm]
        loads = tuple([clocks / alone for clocks in demand])
        place.active[scheduler].append(Stretch(owner, scheduler, alone, loads, now))
        place.changed.add(scheduler)
        self.now = now

    def take(self, now: float) -> int:
        """Remove the stretch that ends next; returns its owner."""
        place = min(self.sms, key=_end) if len(self.sms) > 1 else self.sms[0]
        stretch = place.next
        place.active[stretch.scheduler].remove(stretch)
        place.changed.add(stretch.scheduler)
        self.now = now
        return stretch.owner

    def next_end(self) -> float | None:
        """When the next stretch ends; None: nothing runs."""
        end = NEVER
        for place in self.sms:
            if place.changed:
                place.settle(self.now)
            end = min(end, _end(place))
        return None if end == NEVER else end


def _end(place: _Sm) -> float:
    return NEVER if place.next is None else place.next.end
