"""Shares of a launch that run apart: what two of them accessed in one place of global memory.

Clusters of different shares cannot see each other (`runtime.independent`), so nothing orders their accesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warpspec.sim.order.findings import Access, Finding
from warpspec.sim.order.shadow import Ledger, Shadow

RACE = "accesses that nothing orders"
REMEDY = "another place for one of them: CTAs of a launch are ordered by atomics or by the launch's end only"


@dataclass(frozen=True)
class Touched:
    """What a share accessed of one allocation. units: bytes of one; writes, reads: (units, accesses' numbers).

    texts: number -> (description, PTX line).
    """

    name: str
    unit: int
    writes: tuple[np.ndarray, np.ndarray]
    reads: tuple[np.ndarray, np.ndarray]
    texts: dict[int, tuple[str, int]]


def touched(name: str, unit: int, shadow: Shadow, ledger: Ledger) -> Touched:
    """Of an allocation's shadow."""
    texts: dict[int, tuple[str, int]] = {}

    def known(access: Access) -> int:
        number = ledger.number(access)
        texts[number] = (access.describe(), access.ins.line)
        return number

    written = np.flatnonzero(shadow.writes)
    writers = shadow.writes[written]
    for number in np.unique(writers).tolist():
        known(ledger.accesses[number])
    read = np.flatnonzero(shadow.reads)
    sets, which = np.unique(shadow.reads[read], return_inverse=True)
    firsts = np.array([known(ledger.sets[number][0]) for number in sets.tolist()], np.int32)
    return Touched(name, unit, (written, writers), (read, firsts[which] if len(sets) else which), texts)


def conflicts(one: dict[int, Touched], two: dict[int, Touched]) -> dict[tuple, Finding]:
    """Findings of accesses of two shares, by allocation."""
    found: dict[tuple, Finding] = {}
    for address in one.keys() & two.keys():
        a, b = one[address], two[address]
        for first, second in ((a.writes, b.writes), (a.writes, b.reads), (a.reads, b.writes)):
            _, at, other = np.intersect1d(first[0], second[0], assume_unique=True, return_indices=True)
            pairs = np.stack([first[1][at], second[1][other]], axis=1)
            _, chosen = np.unique(pairs, axis=0, return_index=True)
            for i in chosen.tolist():
                (text, line), (other_text, other_line) = a.texts[int(pairs[i, 0])], b.texts[int(pairs[i, 1])]
                place = f"global memory, {a.name} at byte {int(first[0][at[i]]) * a.unit}"
                lines = (line, other_line)
                found.setdefault((RACE, lines), Finding(RACE, place, text, other_text, REMEDY, lines))
    return found
