"""Barrier tables: a kernel's mbarriers as data, from which its configuration, its code and docs/budgets.md are made."""

from __future__ import annotations

from dataclasses import dataclass

MBARRIER_BYTES = 8


@dataclass(frozen=True)
class Barrier:
    """One row of a kernel's barrier table, used for shared memory and for docs/budgets.md.

    stages: mbarriers in the row, one a buffer. arrivals: arrivals that complete a phase, in addition to TMA bytes.
    producer: who arrives, and how. consumer: who waits. meaning: what holds once a phase is complete.
    """

    name: str
    stages: int
    arrivals: int
    producer: str
    consumer: str
    meaning: str


def barrier_count(table: tuple[Barrier, ...]) -> int:
    """Number of mbarriers that a table needs."""
    return sum(barrier.stages for barrier in table)
