"""Barrier tables: which mbarriers a kernel has, as data that its configuration, its code and docs/budgets.md share."""

from __future__ import annotations

from dataclasses import dataclass

MBARRIER_BYTES = 8


@dataclass(frozen=True)
class Barrier:
    """One row of a kernel's barrier table: what stands in shared memory and in docs/budgets.md alike.

    stages: mbarriers in the row, one a buffer. arrivals: arrivals that complete a phase (TMA bytes come on
    top). producer: who arrives, and how. consumer: who waits. meaning: what holds once a phase is complete.
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
