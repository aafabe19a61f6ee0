"""The order of CTAs, and which key tiles are cut, where the host knows all key tiles: by simulated list scheduling.

CTAs are dealt in their order to whichever SM is free first. If all key tiles have the same work and there are 3.3 times
as many as SMs, the last 0.3 take as long as a whole round; under a causal mask the longest tile of the last section
begins late. Cutting every tile into pieces costs a write and a read of dK and dV in fp32 for each. So it may be best to
cut only those of the last rows: the first rows fill the SMs, and pieces fill up what is left. A formula of means
(``schedule.expected_us``) does not know which CTAs run when, and took up to 1.18 times as long as the choice made here.
All candidates take some tens of milliseconds for a new problem.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

PIECES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32)  # of the longest key tile
LAST_PIECES, SECTIONS = (2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 6)  # if only the last sections are cut
MOST_CTAS = 32  # for each SM: with more, little is left to gain
MOST_PIECES = 16  # CTAs for each SM, if all rows are cut
LEAST_GAIN = 0.02  # fraction of the time that cutting tiles must save


class Costs(NamedTuple):
    """Microseconds: of a step; of a CTA, beside its steps; of what a piece leaves for the last kernel; of that kernel's
    having pieces to add up at all."""

    step: float
    cta: float
    piece: float
    join: float


class Rows(NamedTuple):
    """Rows that are dealt. tiles: steps of a row's key tiles, in order. count: how many rows there are. section_of: the
    rows of a section, if a row has this many CTAs."""

    tiles: Sequence[int]
    count: int
    section_of: Callable[[int], int]


class Dealt(NamedTuple):
    """An order and its expected microseconds. pieces, section, whole: as in ``schedule.Order``."""

    time: float
    pieces: int
    section: int
    whole: int = 0


def cut(tiles: Sequence[int], pieces: int, costs: Costs) -> tuple[list[float], int]:
    """(time of each CTA of a row, pieces of cut tiles). pieces: of the longest tile."""
    most = max(-(-max(tiles) // pieces), 1)
    counts = [max(-(-steps // most), 1) for steps in tiles]
    times = [
        -(-steps // count) * costs.step + costs.cta
        for steps, count in zip(tiles, counts, strict=True)
        for _ in range(count)
    ]
    return times, sum(count for count in counts if count > 1)


def deal(free: list[float], times: Sequence[float], rows: int, section: int) -> None:
    """Deal the CTAs of this many equal rows to the SMs. free: a heap of when each is."""
    for first in range(0, rows, section):
        together = range(min(section, rows - first))
        for time in times:
            for _ in together:
                heapq.heapreplace(free, free[0] + time)


def all_rows(rows: Rows, sms: int, costs: Costs, pieces: int) -> Dealt:
    """The order in which the key tiles of all rows are cut into this many pieces."""
    times, left = cut(rows.tiles, pieces, costs)
    section, free = rows.section_of(len(times)), [0.0] * sms
    deal(free, times, rows.count, section)
    join = costs.join + left * rows.count * costs.piece if left else 0.0
    return Dealt(max(free) + join, pieces, section)


def last_rows(rows: Rows, sms: int, costs: Costs) -> list[Dealt]:
    """Orders in which only the key tiles of the last rows are cut."""
    uncut, _ = cut(rows.tiles, 1, costs)
    section, free, states = rows.section_of(len(uncut)), [0.0] * sms, []
    for first in range(0, rows.count, section):
        states.append(list(free))
        deal(free, uncut, min(section, rows.count - first), section)
    found = []
    for sections in SECTIONS:
        if sections >= len(states):
            break
        whole = (len(states) - sections) * section
        for pieces in LAST_PIECES:
            times, left = cut(rows.tiles, pieces, costs)
            free = list(states[-sections])
            deal(free, times, rows.count - whole, section)
            join = costs.join + left * (rows.count - whole) * costs.piece
            found.append(Dealt(max(free) + join, pieces, section, whole))
    return found


def best(rows: Rows, sms: int, costs: Costs, *, last: bool) -> Dealt:
    """The order with the least time. last: whether the last rows may be cut alone."""
    uncut = all_rows(rows, sms, costs, 1)
    most = min(MOST_PIECES * sms / (len(rows.tiles) * rows.count), max(rows.tiles))
    found = [all_rows(rows, sms, costs, pieces) for pieces in PIECES if pieces <= most]
    least = min(found + (last_rows(rows, sms, costs) if last else []), default=uncut)
    return least if least.time < (1 - LEAST_GAIN) * uncut.time else uncut
