"""Conflicts between shares of a launch that run separately: what two of them accessed in one place of global memory.

Clusters of different shares cannot see each other (`runtime.independent`), so nothing orders their accesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warpspec.sim.order.findings import Access, Finding
from warpspec.sim.order.shadow import Ledger, Shadow, distinct

RACE = "accesses that nothing orders"
REMEDY = "another place for one of them: CTAs of a launch are ordered by atomics or by the launch's end only"


Units = tuple[np.ndarray, np.ndarray]  # numbers of units, ascending, and of the access to each


@dataclass(frozen=True)
class Touched:
    """A share's accesses to one allocation. unit: bytes of a unit; nbytes: bytes of the allocation. early: the accesses
    that may overlap an earlier launch (`launches`). texts: number -> (description, PTX line, strong).
    """

    name: str
    unit: int
    nbytes: int
    writes: Units
    reads: Units
    early_writes: Units
    early_reads: Units
    texts: dict[int, tuple[str, int, bool]]


def touched(name: str, unit: int, shadow: Shadow, early: Shadow | None, ledger: Ledger, mine) -> Touched:
    """Collect the touched places of an allocation from its shadow.

    early: the shadow of accesses that may take place beside an earlier launch. mine: a function that tells whether an
    access belongs to this launch and the next launch must know of it.
    """
    texts: dict[int, tuple[str, int, bool]] = {}

    def named(access: Access) -> int:
        number = ledger.number(access)
        texts[number] = (access.describe(), access.ins.line, access.strong)
        return number

    def of(numbers: np.ndarray, access_of) -> Units:
        at = np.flatnonzero(numbers)
        if not at.size:
            return nothing
        found = numbers[at]
        kinds = distinct(found)
        names = np.zeros(max(kinds) + 1, np.int32)
        for kind in kinds:
            access = access_of(kind)
            if mine(access):
                names[kind] = named(access)
        found = names[found]
        return (at, found) if found.all() else (at[found != 0], found[found != 0])

    nothing = (np.zeros(0, np.intp), np.zeros(0, np.int32))
    return Touched(
        name, unit, shadow.writes.size * unit,
        of(shadow.writes, lambda number: ledger.accesses[number]),
        of(shadow.reads, lambda number: ledger.sets[number][-1]),
        nothing if early is None else of(early.writes, lambda number: ledger.accesses[number]),
        nothing if early is None else of(early.reads, lambda number: ledger.accesses[number]),
        texts,
    )  # fmt: skip


def pairs(one: Units, two: Units):
    """(unit, access of the first, access of the second), one unit of each pair of accesses that touch the same."""
    if not (one[0].size and two[0].size):
        return
    touched_units = np.zeros(max(one[0][-1], two[0][-1]) + 1, bool)
    touched_units[one[0]] = True
    if not touched_units[two[0]].any():
        return
    _, at, other = np.intersect1d(one[0], two[0], assume_unique=True, return_indices=True)
    both = np.stack([one[1][at], two[1][other]], axis=1)
    _, chosen = np.unique(both, axis=0, return_index=True)
    for i in chosen.tolist():
        yield int(one[0][at[i]]), int(both[i, 0]), int(both[i, 1])


def conflicts(one: dict[int, Touched], two: dict[int, Touched]) -> dict[tuple, Finding]:
    """Findings between accesses of two shares, by allocation."""
    found: dict[tuple, Finding] = {}
    for address in one.keys() & two.keys():
        a, b = one[address], two[address]
        for first, second in ((a.writes, b.writes), (a.writes, b.reads), (a.reads, b.writes)):
            for at, number, other_number in pairs(first, second):
                text, line, strong = a.texts[number]
                other, other_line, other_strong = b.texts[other_number]
                if strong and other_strong and not {"cta", "cluster"}.intersection((strong, other_strong)):
                    continue  # morally strong (PTX ISA): two atomics, say
                place = f"global memory, {a.name} at byte {at * a.unit}"
                lines = (line, other_line)
                found.setdefault((RACE, lines), Finding(RACE, place, text, other, REMEDY, lines))
    return found
