"""Starving schedules: priorities leave some warps and asynchronous operations waiting for long.

In a uniformly random schedule every warp advances at about the same pace, which hides defects that show only when one
warp is far behind the others. Here the highest priority always goes first. A warp, or all warps of one index, and the
operations that one instruction issues have a priority each, drawn from the seed; so the lowest runs only when nothing
else can. At first, and occasionally later, one drops below all others. After Burckhardt et al., "A Randomized Scheduler
with Probabilistic Guarantees of Finding Bugs" (ASPLOS 2010).

Among eight seeds, one is uniformly random, four starve warps, and one each starves copies into shared memory, copies
out of it, and the operations of half of all instructions: everything that does not wait for these runs as far as it can
before they take effect.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from warpspec.sim.operation import Op
from warpspec.sim.warp import Warp

# Chance at each step that another one is starved; one is drawn for each run.
CHANGE_RATES = (1 / 2048, 1 / 256)
WARPS = 2 / 3  # chance that it is warps, not the operations of an instruction, where warps are starved
# Chance that an instruction's operations are below all others at once, where operations are starved.
LATE = 1 / 2
# Chances that a bounded wait gives up at once. Often, and a retry that is missing shows. Half the time, and more warps
# wait instead of spinning: those that are starved stay behind, and so a wait that is missing elsewhere shows.
OFTEN, HALF = 7 / 8, 1 / 2
IDLE_TURNS = 16  # turns in a row without any event after which a warp, which spins, goes behind all others


class Starved(Enum):
    """The kinds of things that a schedule starves."""

    WARPS = "warps"
    LOADS = "copies into shared memory"
    STORES = "copies out of shared memory"
    OPERATIONS = "asynchronous operations"


class Schedule(NamedTuple):
    """What a schedule starves, and the chance that a bounded wait gives up at once."""

    what: Starved
    gives_up: float


# By seed modulo their number.
SCHEDULES = (
    None,
    Schedule(Starved.WARPS, HALF),
    Schedule(Starved.LOADS, OFTEN),
    Schedule(Starved.WARPS, OFTEN),
    Schedule(Starved.OPERATIONS, HALF),
    Schedule(Starved.WARPS, HALF),
    Schedule(Starved.STORES, OFTEN),
    Schedule(Starved.WARPS, OFTEN),
)


def starved(seed: int) -> Schedule | None:
    """A seed's starving schedule; None: it is uniformly random."""
    return SCHEDULES[seed % len(SCHEDULES)]


def _direction(opcode: str) -> Starved | None:
    """Whether an instruction copies into shared memory or out of it, asynchronously; None: neither."""
    if not opcode.startswith("cp."):
        return None
    to = next((part for part in opcode.split(".") if part.startswith(("shared", "global"))), "")
    return Starved.STORES if to == "global" else Starved.LOADS if to else None


class Starving:
    """The priorities of one run. what: is starved."""

    def __init__(self, rng: random.Random, what: Starved):
        self._rng = rng
        self._what = what
        self._by_index = rng.random() < 0.5  # warps of one index share a priority in all CTAs
        self._rate = rng.choice(CHANGE_RATES)
        self._warps: dict[Hashable, float] = {}
        self._ops: dict[Hashable, float] = {}
        self._spinning: dict[
            Warp, float
        ] = {}  # instead of the priority above, until something happens in its turn
        self._floor = 0.0
        self._idle = 0

    def _warp_key(self, w: Warp) -> Hashable:
        return w.index if self._by_index else (w.cta.number, w.index)

    def _op_key(self, op: Op) -> Hashable:
        if op.origin is None:
            return "operations of nobody"
        w, ins = op.origin
        return self._warp_key(w), ins.index

    def _of_warp(self, w: Warp) -> float:
        key = self._warp_key(w)
        found = self._warps.get(key)
        if found is None:
            found = self._warps[key] = self._rng.random()
        return found

    def _of_op(self, op: Op) -> float:
        key = self._op_key(op)
        found = self._ops.get(key)
        if found is None:
            found = self._ops[key] = self._lowest() if self._late(op) else self._rng.random()
        return found

    def _late(self, op: Op) -> bool:
        """Whether operations of an instruction are below all others from the first on."""
        if self._what is Starved.OPERATIONS:
            return self._rng.random() < LATE
        return op.origin is not None and _direction(op.origin[1].opcode) is self._what

    def choose(
        self, ready: Sequence[Warp], queues: Mapping[Hashable, deque[Op]], keys: Sequence[Hashable]
    ) -> tuple[bool, int]:
        """Choose what goes next: (whether it is an operation, position in `keys` or in `ready`); one of them is not
        empty."""
        best, chosen = -1e9, (False, 0)
        for position, w in enumerate(ready):
            priority = self._spinning.get(w)
            if priority is None:
                priority = self._of_warp(w)
            if priority > best:
                best, chosen = priority, (False, position)
        for position, key in enumerate(keys):
            priority = self._of_op(queues[key][0])
            if priority > best:
                best, chosen = priority, (True, position)
        if self._floor == 0 or self._rng.random() < self._rate:
            self._starve_another()
        return chosen

    def _starve_another(self) -> None:
        warps = self._what is Starved.WARPS and (self._rng.random() < WARPS or not self._ops)
        of = self._warps if warps else self._ops
        if of:
            of[self._rng.choice(list(of))] = self._lowest()

    def _lowest(self) -> float:
        self._floor -= 1
        return self._floor

    def ran(self, w: Warp, event: bool) -> None:
        """A turn of a warp ended, with an event or without: one that only spins must let those go that it waits for."""
        self._idle = 0 if event else self._idle + 1
        if event:
            self._spinning.pop(w, None)
        elif self._idle > IDLE_TURNS:
            self._idle = 0
            self._spinning[w] = self._lowest()
