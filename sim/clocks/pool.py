"""Concurrent native code of several warps, modelled as fluid: each progresses at the rate that its pipes allow.

A stretch of code that alone takes T clocks and D of a pipe loads that pipe by D / T. Where the stretches of one
scheduler (for shared memory: of one SM) load a pipe by more than 1, those that use it slow down by that factor. A
warp's wgmma is a stretch, too: wgmmas of a scheduler's warps share its tensor core, and concurrent code is slower. What
they read from shared memory goes before all other accesses.
"""

from __future__ import annotations

from warpspec.sim.clocks.costs import PIPES, Pipe

SCHEDULERS = 4
LIGHT = 0.04  # load of a pipe below which a stretch is not slowed down when the pipe is full
NEVER = float("inf")
SCHEDULERS_OWN = (Pipe.ISSUE, Pipe.FMA, Pipe.ALU, Pipe.MUFU, Pipe.TENSOR)


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

    __slots__ = ("active", "changed", "crowd", "first", "next", "squeeze", "totals")

    def __init__(self, first: float, crowd: float):
        self.first = first  # part of the operands' share of shared memory that other accesses do without
        self.crowd = crowd  # how much more the tensor core costs code of several warps of its scheduler
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
        shared = operands = 0.0
        for totals in self.totals:
            shared += totals[Pipe.SHARED]
            operands += totals[Pipe.OPERANDS] / max(1.0, totals[Pipe.TENSOR])
        squeeze = max(1.0, shared / (1.0 - self.first * min(operands, 1.0)))
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
        tensor = min(totals[Pipe.TENSOR], 1.0)
        if tensor and sum(not one.loads[Pipe.TENSOR] for one in active) > 1:
            tensor *= self.crowd
        full = [(pipe, totals[pipe]) for pipe in SCHEDULERS_OWN if totals[pipe] > 1.0]
        if self.squeeze > 1.0:
            full.append((Pipe.SHARED, self.squeeze))
        for stretch in active:
            slow = 1.0
            for pipe, total in full:
                if total > slow and stretch.loads[pipe] > LIGHT:
                    slow = total
            slow *= 1.0 + tensor * stretch.loads[Pipe.BESIDE]
            if slow != stretch.slow:
                stretch.change(now, slow)


class Pool:
    """Everything that runs on the SMs. used: for each SM, clocks that each pipe was taken. first, crowd: see `_Sm`."""

    def __init__(self, sms: int, first: float, crowd: float):
        self.sms = [_Sm(first, crowd) for _ in range(sms)]
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
        """The time at which the next stretch ends; None if nothing runs."""
        end = NEVER
        for place in self.sms:
            if place.changed:
                place.settle(self.now)
            end = min(end, _end(place))
        return None if end == NEVER else end


def _end(place: _Sm) -> float:
    return NEVER if place.next is None else place.next.end
