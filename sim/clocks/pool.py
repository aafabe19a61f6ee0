"""Native code of several warps at once, as a fluid: each progresses at a rate that its pipes allow.

A stretch of code that alone takes T clocks and D of a pipe loads that pipe by D / T. Where the stretches of one
scheduler (for shared memory: of one SM) load a pipe by more than 1, those that use it slow down by that factor.
"""

from __future__ import annotations

from warpspec.sim.clocks.costs import PIPES, Pipe

SCHEDULERS = 4
LIGHT = 0.04  # a load of a pipe below which a stretch does not suffer from the pipe's being full
DONE = 1e-6  # clocks


class Stretch:
    """Native code in progress."""

    __slots__ = ("left", "loads", "rate", "scheduler", "sm", "warp")

    def __init__(self, warp: int, sm: int, scheduler: int, left: float, loads: tuple[float, ...]):
        self.warp, self.sm, self.scheduler, self.left, self.loads = warp, sm, scheduler, left, loads
        self.rate = 1.0


class Pool:
    """Everything that runs on the SMs. used: of each SM, clocks that each pipe was taken for."""

    def __init__(self, sms: int):
        self.active: list[list[list[Stretch]]] = [[[] for _ in range(SCHEDULERS)] for _ in range(sms)]
        self.full: list[list[list[float]]] = [[[0.0] * PIPES for _ in range(SCHEDULERS)] for _ in range(sms)]
        self.shared = [0.0] * sms
        self.used = [[0.0] * PIPES for _ in range(sms)]
        self.now = 0.0
        self.all: list[Stretch] = []
        self._next: Stretch | None = None
        self._next_end: float | None = None
        self._stale = False

    def add(self, now: float, warp: int, sm: int, scheduler: int, alone: float, demand: list[float]) -> None:
        """Begin a stretch of `alone` clocks."""
        self._advance(now)
        alone = max(alone, 1.0)
        loads = tuple(clocks / alone for clocks in demand)
        stretch = Stretch(warp, sm, scheduler, alone, loads)
        for pipe in range(PIPES):
            self.used[sm][pipe] += demand[pipe]
        self.active[sm][scheduler].append(stretch)
        self.all.append(stretch)
        self._stale = True

    def take(self, now: float) -> int:
        """End the stretch that is through; its warp."""
        self._advance(now)
        stretch = self._next
        self.active[stretch.sm][stretch.scheduler].remove(stretch)
        self.all.remove(stretch)
        self._stale = True
        return stretch.warp

    def next_end(self) -> float | None:
        """When the next stretch is through; None: nothing runs."""
        if self._stale:
            self._settle()
        return self._next_end

    def _advance(self, now: float) -> None:
        passed = now - self.now
        if passed > 0:
            if self._stale:
                self._settle()
            for stretch in self.all:
                stretch.left -= passed * stretch.rate
            self.now = now

    def _settle(self) -> None:
        """Rates of all, and which is through next."""
        best, soonest = None, None
        for schedulers in self.active:
            shared = 0.0
            for stretches in schedulers:
                for stretch in stretches:
                    shared += stretch.loads[Pipe.SHARED]
            for stretches in schedulers:
                if not stretches:
                    continue
                if len(stretches) == 1:
                    issue = fma = alu = mufu = 1.0
                else:
                    issue = fma = alu = mufu = 0.0
                    for stretch in stretches:
                        a, b, c, d, _ = stretch.loads
                        issue += a
                        fma += b
                        alu += c
                        mufu += d
                for stretch in stretches:
                    a, b, c, d, e = stretch.loads
                    slow = 1.0
                    if issue > slow and a > LIGHT:
                        slow = issue
                    if fma > slow and b > LIGHT:
                        slow = fma
                    if alu > slow and c > LIGHT:
                        slow = alu
                    if mufu > slow and d > LIGHT:
                        slow = mufu
                    if shared > slow and e > LIGHT:
                        slow = shared
                    stretch.rate = 1.0 / slow
                    end = self.now + max(stretch.left, 0.0) * slow
                    if soonest is None or end < soonest:
                        best, soonest = stretch, end
        self._next, self._next_end, self._stale = best, soonest, False
