"""Shadow memory: which accesses touched each unit of memory last.

A unit (a word, or less where a kernel accesses less) holds the number of its last write and the number of the set of
reads since then that later ones do not cover. Numbers stand for accesses that many units share, so that an access to
a tile looks at a few numbers however large the tile is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from warpspec.sim.order.clocks import Clock, Snapshot
from warpspec.sim.order.findings import Access

FEW = 8  # distinct numbers that are looked for one after the other


class Shadow:
    """Numbers of one memory, in any shape."""

    __slots__ = ("reads", "writes")

    def __init__(self, shape: int | tuple[int, ...]):
        self.writes = np.zeros(shape, np.int32)
        self.reads = np.zeros(shape, np.int32)


def distinct(numbers: np.ndarray) -> list[int]:
    """The different numbers in an array."""
    if not numbers.size:
        return []
    first = numbers.item(0)
    others = numbers != first
    if not others.any():
        return [first]
    found = [first]
    rest = numbers[others]
    while rest.size:
        if len(found) == FEW:
            return found + np.unique(rest).tolist()
        first = rest.item(0)
        found.append(first)
        rest = rest[rest != first]
    return found


class Ledger:
    """The accesses and sets of reads that numbers stand for."""

    def __init__(self, known: Callable[[Access, Clock | Snapshot], bool]):
        self.accesses: list[Access | None] = [None]
        self.sets: list[tuple[Access, ...]] = [()]
        self._joined: dict[tuple[int, int], int] = {}
        self._known = known

    def number(self, access: Access) -> int:
        """The number of an access."""
        if not access.key:
            access.key = len(self.accesses)
            self.accesses.append(access)
        return access.key

    def alone(self, access: Access) -> int:
        """The number of the set that has one read only."""
        key = (0, self.number(access))
        joined = self._joined.get(key)
        if joined is None:
            joined = self._joined[key] = len(self.sets)
            self.sets.append((access,))
        return joined

    def with_reader(self, number: int, access: Access, clock: Clock | Snapshot) -> int:
        """The number of a set of reads with one more; those that happen before it (by its clock) are left out."""
        key = (number, self.number(access))
        joined = self._joined.get(key)
        if joined is None:
            before = self.sets[number]
            if access in before:
                joined = number
            else:
                kept = tuple(read for read in before if not self._known(read, clock))
                joined = len(self.sets)
                self.sets.append((*kept, access))
            self._joined[key] = joined
        return joined

    def touch(self, shadow: Shadow, where, access: Access, clock: Clock | Snapshot) -> list[Access]:
        """Note an access to the units `where` (any index); returns the earlier accesses that it may conflict with."""
        writes = shadow.writes[where]
        numbers = distinct(writes)
        conflicts = [self.accesses[number] for number in numbers if number]
        reads = shadow.reads[where]
        sets = distinct(reads)
        if access.write:
            for number in sets:
                conflicts.extend(self.sets[number])
            shadow.writes[where] = self.number(access)
            if sets != [0]:
                shadow.reads[where] = 0
        elif len(sets) == 1:
            joined = self.with_reader(sets[0], access, clock)
            if joined != sets[0]:
                shadow.reads[where] = joined
        else:
            new = reads.copy()
            for number in sets:
                new[reads == number] = self.with_reader(number, access, clock)
            shadow.reads[where] = new
        return conflicts
