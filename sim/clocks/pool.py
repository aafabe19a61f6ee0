"""Native code of several warps at once, as a fluid: each progresses at a rate that its pipes allow.

A stretch of code that alone takes T clocks and D of a pipe loads that pipe by D / T. Where the stretches of one
scheduler (for shared memory: of one SM) load a pipe by more than 1, those that use it slow down by that factor. A
warp's wgmma is a stretch, too: those of a scheduler's warps share its tensor core, and code beside them is slower.
"""

from __future__ import annotations

from warpspec.sim.clocks.costs import PIPES, Pipe

SCHEDULERS = 4
LIGHT = 0.04  # a load of a pipe below which a stretch does not suffer from the pipe's being full
NEVER = float("inf")


class Stretch:
    """Native code in progress, or a wgmma. owner: the warp, or what `Pool.add` was given."""

    __slots__ = ("left", "loads", "owner", "rate", "scheduler")

    def __init__(self, owner: int, scheduler: int, left: float, loads: tuple[float, ...]):
        self.owner, self.scheduler, self.left, self.loads = owner, scheduler, left, loads
        self.rate = 1.0


class _Sm:
    """What runs on one SM. now: up to when its stretches have progressed; end: when the next is through."""

    __slots__ = ("active", "beside", "end", "next", "now")

    def __init__(self, beside: float):
        self.beside = beside  # what the clocks of code are multiplied by while the tensor core works
        self.active: list[Stretch] = []
        self.now = 0.0
        self.next: Stretch | None = None
        self.end = NEVER

    def advance(self, now: float) -> None:
        passed = now - self.now
        if passed > 0:
            for stretch in self.active:
                stretch.left -= passed * stretch.rate
            self.now = now

    def settle(self) -> None:
        """Rates of all, and which is through next."""
        full = [[0.0] * PIPES for _ in range(SCHEDULERS)]
        shared = 0.0
        for stretch in self.active:
            mine = full[stretch.scheduler]
            for pipe, load in enumerate(stretch.loads):
                mine[pipe] += load
            shared += stretch.loads[Pipe.SHARED]
        self.next, self.end = None, NEVER
        multiplying = [min(mine[Pipe.TENSOR], 1.0) for mine in full]
        for mine in full:
            mine[Pipe.SHARED] = shared
        for stretch in self.active:
            slow = 1.0
            for load, total in zip(stretch.loads, full[stretch.scheduler], strict=True):
                if total > slow and load > LIGHT:
                    slow = total
            if multiplying[stretch.scheduler] and not stretch.loads[Pipe.TENSOR]:
                slow *= 1.0 + (self.beside - 1.0) * multiplying[stretch.scheduler]
            stretch.rate = 1.0 / slow
            end = self.now + (stretch.left * slow if stretch.left > 0 else 0.0)
            if end < self.end:
                self.next, self.end = stretch, end


class Pool:
    """Everything that runs on the SMs. used: of each SM, clocks that each pipe was taken for. beside: see `_Sm`."""

    def __init__(self, sms: int, beside: float):
        self.sms = [_Sm(beside) for _ in range(sms)]
        self.used = [[0.0] * PIPES for _ in range(sms)]

    def add(self, now: float, owner: int, sm: int, scheduler: int, alone: float, demand: list[float]) -> None:
        """Begin a stretch of `alone` clocks."""
        alone = max(alone, 1.0)
        used = self.used[sm]
        for pipe in range(PIPES):
            used[pipe] += demand[pipe]
        place = self.sms[sm]
        place.advance(now)
        place.active.append(Stretch(owner, scheduler, alone, tuple([clocks / alone for clocks in demand])))
        place.settle()

    def take(self, now: float) -> int:
        """End the stretch that is through; its owner."""
        place = min(self.sms, key=_end) if len(self.sms) > 1 else self.sms[0]
        place.advance(now)
        stretch = place.next
        place.active.remove(stretch)
        place.settle()
        return stretch.owner

    def next_end(self) -> float | None:
        """When the next stretch is through; None: nothing runs."""
        end = min(place.end for place in self.sms)
        return None if end == NEVER else end


def _end(place: _Sm) -> float:
    return place.end
