"""Distinguishes spinning warps from warps with long computations: spinning warps return to an earlier state."""

from __future__ import annotations

from collections.abc import Sequence

from warpspec.sim.codegen.program import Program
from warpspec.sim.warp import Warp

IDLE_TURNS = 50_000  # turns without any event after which warps are watched
WATCHED_TURNS = 256  # turns of each ready warp in which it must come back to an earlier state, or it computes
CLOCK_ROUNDS = 8  # rounds of watching after which a kernel that reads a clock, and so never comes back, spins


class SpinWatch:
    """Sees every turn of a machine that ends without an event.

    The state of a warp (`Warp.state_hash`) holds its registers and local memory. Other memory is excluded: a loop that
    changes only other memory, and whose values do not outlive an iteration, counts as spinning.
    """

    def __init__(self, program: Program):
        self.turns = 0
        self.rounds = 0
        self._seen: dict[Warp, set[int]] = {}
        self._spinning: set[Warp] = set()
        self._reads_clock = program.reads_clock

    def event(self) -> None:
        """Something happened that may unblock somebody."""
        self.turns = self.rounds = 0
        if self._seen:
            self._forget()

    def stuck(self, warp: Warp, ready: Sequence[Warp]) -> bool:
        """A turn of the warp ended without an event; whether all ready warps do nothing but spin."""
        self.turns += 1
        if self.turns <= IDLE_TURNS:
            return False
        seen = self._seen.setdefault(warp, set())
        state = warp.state_hash()
        if state in seen:
            self._spinning.add(warp)
        seen.add(state)
        if all(other in self._spinning for other in ready):
            return True
        if self.turns > IDLE_TURNS + WATCHED_TURNS * len(ready):
            self.turns = 0
            self.rounds += 1
            self._forget()
        return self._reads_clock and self.rounds >= CLOCK_ROUNDS

    def _forget(self) -> None:
        self._seen.clear()
        self._spinning.clear()
