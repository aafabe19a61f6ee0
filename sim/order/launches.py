"""Launches of one stream that overlap: programmatic dependent launch (PTX ISA, "griddepcontrol").

A launch with the attribute may begin as soon as every CTA of the launch before it has executed
griddepcontrol.launch_dependents or has exited. Only griddepcontrol.wait, which waits for the end of the previous
launch, orders the accesses of that launch, and of those that it ran beside, before the new launch's. An earlier launch
is over, too, if the previous launch has waited for it. "If the prerequisite grid is using
griddepcontrol.launch_dependents, then the dependent grid must use griddepcontrol.wait to ensure correct functional
execution." If no CTA executes launch_dependents, nothing overlaps. A release fence of gpu scope before
launch_dependents orders what precedes it before the start of the new launch.

The simulator runs launches one after another. `Stream` keeps the memory touched by launches that the next one may
overlap; the next one's checker finds these in its shadow memory, as accesses that only `wait` makes known. A dependent
launch without a known predecessor, the first of a run, is compared with itself, as if the same call ran twice in a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from warpspec.sim.memory import Allocation, GlobalMemory
from warpspec.sim.order.clocks import PUBLISHED, Domain
from warpspec.sim.order.findings import Access, Finding
from warpspec.sim.order.shadow import Ledger, Shadow
from warpspec.sim.order.shares import Touched, pairs

EARLIER = Domain(-1)  # domain of accesses by earlier launches; a launch's component is its age
OVERLAP = "accesses of launches that overlap"
REMEDY = (
    "griddepcontrol.wait before the second, by its thread or by one that a barrier orders before it, in this launch "
    "and in those between the two"
)


class EarlierAccess(Access):
    """An access of an earlier launch, with its description there."""

    __slots__ = ("text",)

    def __init__(self, age: int, text: str, line: int, strong: bool, write: bool):
        ins = SimpleNamespace(line=line, opcode="", parts=(), source="")
        super().__init__(
            EARLIER, age, 1, ins=ins, agent="", cta=(), write=write, generic=True, strong=strong, queued=True
        )
        self.text = text

    def describe(self) -> str:
        return self.text


@dataclass
class Seen:
    """A launch's use of its dependencies, as seen by the checker. triggered: some CTA executed launch_dependents;
    waited: some thread executed wait; in_order: one executed launch_dependents after a wait, so that all earlier
    launches are over when the next one begins."""

    triggered: bool = False
    waited: bool = False
    in_order: bool = False

    def merge(self, other: Seen) -> None:
        """Add what another share of the launch did."""
        self.triggered |= other.triggered
        self.waited |= other.waited
        self.in_order |= other.in_order


@dataclass(eq=False)
class Past:
    """A launch that is over in the simulator. places: (allocation, address of the caller's memory that it stands for or
    None, what each share touched of it)."""

    kernel: str
    places: list[tuple[Allocation, int | None, Touched]]

    def of(self, allocation: Allocation, host: int | None):
        """(byte of the allocation at which a touched part begins, the part) of those that lie in it."""
        for other, address, touched in self.places:
            if other is allocation:
                yield 0, touched
            elif None not in (address, host) and -touched.nbytes < address - host < allocation.nbytes:
                yield address - host, touched


@dataclass
class Overlap:
    """The launches that a launch may overlap. dependent: whether it has the attribute. first: it is the first of its
    stream. before: launches that may still run while it does; known: which of them are over after its wait. past, seen:
    filled in by its run."""

    dependent: bool = False
    first: bool = True
    before: list[Past] = field(default_factory=list)
    known: list[bool] = field(default_factory=list)
    past: Past | None = None
    seen: Seen = field(default_factory=Seen)

    def waited(self) -> dict[int, np.ndarray]:
        """The clock of earlier launches that wait brings; component 0 is the same launch before."""
        rows = np.zeros((PUBLISHED, 1 + len(self.before)), np.int32)
        rows[:, 0] = 1
        rows[:, 1:] = self.known
        return {EARLIER.number: rows}

    def over(self, kernel: str, gmem: GlobalMemory, parts: list[dict[int, Touched]]) -> None:
        """The launch is over. parts: what each share touched, by address."""
        self.past = Past(
            kernel,
            [
                (allocation, gmem.host_address(allocation), touched)
                for part in parts
                for address, touched in part.items()
                if (allocation := gmem.find(address)) is not None
            ],
        )


class Stream:
    """Consecutive launches, each with a checker of memory order."""

    def __init__(self) -> None:
        self._last: Overlap | None = None

    def next(self, dependent: bool) -> Overlap:
        """The launches that the next launch may run beside."""
        last = self._last
        overlap = self._last = Overlap(dependent, last is None)
        if not dependent or last is None:
            return overlap
        behind_wait = [past for past, known in zip(last.before, last.known, strict=True) if not known]
        outlive = behind_wait if last.seen.waited else last.before  # may still run when `last` is over
        if last.seen.triggered:
            overlap.before = [*(behind_wait if last.seen.in_order else last.before), last.past]
        else:
            overlap.before = list(outlive)
        overlap.known = [past not in outlive for past in overlap.before]
        return overlap


def load(shadow: Shadow, unit: int, ledger: Ledger, touched: Touched, at: int, age: int, kernel: str) -> None:
    """Put what an earlier launch touched into the shadow of an allocation, `at` bytes after its start."""
    accesses: dict[tuple[int, bool], int] = {}

    def number(old: int, write: bool) -> int:
        found = accesses.get((old, write))
        if found is None:
            text, line, strong = touched.texts[old]
            access = EarlierAccess(age, f"kernel {kernel} before it, {text}", line, strong, write)
            found = accesses[old, write] = ledger.number(access) if write else ledger.alone(access)
        return found

    for into, (units, numbers), write in (
        (shadow.writes, touched.writes, True),
        (shadow.reads, touched.reads, False),
    ):
        first = (units * touched.unit + at) // unit
        mine = np.array([number(old, write) for old in numbers.tolist()], np.int32)
        for k in range(max(1, touched.unit // unit)):
            inside = (first + k >= 0) & (first + k < into.size)
            into[first[inside] + k] = mine[inside]


def with_itself(parts: list[dict[int, Touched]]) -> dict[tuple, Finding]:
    """Findings of a launch that begins while the same one before it is still running: accesses ahead of its wait
    against all of that one's."""
    found: dict[tuple, Finding] = {}
    for early in parts:
        for late in parts:
            for address in early.keys() & late.keys():
                a, b = early[address], late[address]
                for mine, theirs in (
                    (a.early_writes, b.writes),
                    (a.early_writes, b.reads),
                    (a.early_reads, b.writes),
                ):
                    for at, number, other in pairs(mine, theirs):
                        text, line, strong = a.texts[number]
                        other_text, other_line, other_strong = b.texts[other]
                        if strong and other_strong:
                            continue
                        place = f"global memory, {a.name} at byte {at * a.unit}"
                        first = f"the same call before, {other_text}"
                        key = (OVERLAP, (other_line, line))
                        found.setdefault(key, Finding(OVERLAP, place, first, text, REMEDY, key[1]))
    return found
