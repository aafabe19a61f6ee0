"""The order of CTAs, and which key tiles are cut, where the host knows all key tiles: by simulated list scheduling.

CTAs are dealt in their order to whichever SM is free first. If all key tiles have the same work and there are 3.3 times
as many as SMs, the last 0.3 take as long as a whole round; under a causal mask the longest tile of the last section
begins late. Cutting every tile into pieces costs a write and a read of dK and dV in fp32 for each. So it may be best to
cut only those of the last rows: the first rows fill the SMs, and pieces fill up what is left. A formula of means
(``schedule.expected_us``) does not know which CTAs run when, and took up to 1.18 times as long as the choice made here.
A step takes longer where the rows that CTAs work on together read more than L2 holds (``Rows.step_of``), so sections of
more rows are tried only if they fill the SMs better. All candidates take a few milliseconds for a new problem, seldom
tens: most are not dealt, because their mean load is already more than the best time, and SMs that are free at one time
are dealt equal CTAs together.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

PIECES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32)  # of the longest key tile
LAST_PIECES, SECTIONS = (2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 6)  # if only the last sections are cut
MOST_CTAS = 32  # for each SM: with more, little is left to gain
MOST_PIECES = 16  # CTAs for each SM, if all rows are cut
LEAST_GAIN = 0.02  # fraction of the time that cutting tiles, or sections of more rows, must save


class Costs(NamedTuple):
    """Microseconds: of a CTA, beside its steps; of what a piece leaves for the last kernel; of that kernel's having
    pieces to add up at all."""

    cta: float
    piece: float
    join: float


class Rows(NamedTuple):
    """Rows that are dealt. tiles: steps of a row's key tiles, in order. count: how many rows there are. section_of: the
    rows of a section, if a row has this many CTAs. step_of: microseconds of a step, if a row has this many CTAs and a
    section this many rows. wider: factors by which sections may have more rows."""

    tiles: tuple[int, ...]
    count: int
    section_of: Callable[[int], int]
    step_of: Callable[[int, int], float]
    wider: Sequence[int] = (2,)


class Dealt(NamedTuple):
    """An order and its expected microseconds. pieces, section, whole: as in ``schedule.Order``."""

    time: float
    pieces: int
    section: int
    whole: int = 0


@lru_cache(maxsize=256)
def cut(tiles: tuple[int, ...], pieces: int) -> tuple[list[int], int]:
    """(steps of each CTA of a row, pieces of cut tiles). pieces: of the longest tile."""
    most = max(-(-max(tiles) // pieces), 1)
    counts = [max(-(-steps // most), 1) for steps in tiles]
    ctas = [-(-steps // count) for steps, count in zip(tiles, counts, strict=True) for _ in range(count)]
    return ctas, sum(count for count in counts if count > 1)


def times_of(rows: Rows, ctas: Sequence[int], section: int, costs: Costs) -> list[float]:
    """Microseconds of the CTAs of a row, which have this many steps."""
    step = rows.step_of(len(ctas), section)
    return [steps * step + costs.cta for steps in ctas]


def idle(sms: int) -> list[tuple[float, int]]:
    """The state from which CTAs are dealt: a heap of (when SMs are free, how many), here all of them at once."""
    return [(0.0, sms)]


def deal(
    free: list[tuple[float, int]], times: Sequence[float], rows: int, section: int, limit: float = math.inf
) -> float:
    """Deal the CTAs of this many equal rows to the SMs. free: as ``idle`` makes it. Returns when the last one ends;
    infinity, and ``free`` means nothing, as soon as one ends after ``limit``."""
    runs = [(time, len(list(equal))) for time, equal in groupby(times)]
    if len(runs) == 1:  # all CTAs are equal
        section = rows
    for first in range(0, rows, section):
        together = min(section, rows - first)
        for time, equal in runs:
            count = equal * together
            while count:
                begin, sms = free[0]
                end = begin + time
                if end > limit:
                    return math.inf
                if sms <= count:
                    heapq.heapreplace(free, (end, sms))
                    count -= sms
                else:
                    free[0] = begin, sms - count  # at its place: as early, and the least number comes first
                    heapq.heappush(free, (end, count))
                    count = 0
    return max(free)[0]


def all_rows(
    rows: Rows, sms: int, costs: Costs, pieces: int, wider: int = 1, limit: float = float("inf")
) -> Dealt:
    """The order in which the key tiles of all rows are cut into this many pieces. wider: factor of a section's rows.
    Beyond ``limit`` the time is not exact."""
    ctas, left = cut(rows.tiles, pieces)
    section = min(rows.section_of(len(ctas)) * wider, rows.count)
    times = times_of(rows, ctas, section, costs)
    join = costs.join + left * rows.count * costs.piece if left else 0.0
    time = sum(times) * rows.count / sms + join
    if time < limit:
        time = deal(idle(sms), times, rows.count, section, limit - join) + join
    return Dealt(time, pieces, section)


def last_rows(rows: Rows, sms: int, costs: Costs, limit: float = float("inf")) -> Iterator[Dealt]:
    """Orders in which only the key tiles of the last rows are cut, each better than those before and than ``limit``."""
    uncut, _ = cut(rows.tiles, 1)
    section = rows.section_of(len(uncut))
    whole_times = times_of(rows, uncut, section, costs)
    states = []  # when each section begins
    for sections in SECTIONS:
        whole = (-(-rows.count // section) - sections) * section
        if whole <= 0:
            break
        for pieces in LAST_PIECES:
            ctas, left = cut(rows.tiles, pieces)
            last, times = rows.count - whole, times_of(rows, ctas, section, costs)
            join = costs.join + left * last * costs.piece
            if (sum(whole_times) * whole + sum(times) * last) / sms + join >= limit:
                continue
            states = states or starts(whole_times, rows.count, section, sms)
            time = deal(list(states[-sections]), times, last, section, limit - join) + join
            if time < limit:
                limit = time
                yield Dealt(time, pieces, section, whole)


def starts(times: Sequence[float], rows: int, section: int, sms: int) -> list[list[tuple[float, int]]]:
    """When SMs are free as each section of these rows begins (``deal``)."""
    free, found = idle(sms), []
    for first in range(0, rows, section):
        found.append(list(free))
        deal(free, times, min(section, rows - first), section)
    return found


def with_wider(rows: Rows, sms: int, costs: Costs, pieces: int, limit: float) -> Dealt:
    """``all_rows``, with sections of more rows only where that is expected to save LEAST_GAIN: they read more together
    than the step's time accounts for (docs/notebook/gradients.md)."""
    found = all_rows(rows, sms, costs, pieces, limit=limit)
    for wider in rows.wider:
        least = (1 - LEAST_GAIN) * found.time
        other = all_rows(rows, sms, costs, pieces, wider, min(least, limit))
        if other.time < least:
            found = other
    return found


def best(rows: Rows, sms: int, costs: Costs, limit: float = float("inf")) -> Dealt:
    """The order with the least time; tiles are only cut if that saves LEAST_GAIN. limit: the time of another order; one
    that takes longer need not be exact."""
    found = with_wider(rows, sms, costs, 1, limit)
    limit = min(limit, (1 - LEAST_GAIN) * found.time)
    most = min(MOST_PIECES * sms / (len(rows.tiles) * rows.count), max(rows.tiles))
    for pieces in (pieces for pieces in PIECES if pieces <= most):
        other = with_wider(rows, sms, costs, pieces, limit)
        if other.time < limit:
            found, limit = other, other.time
    for found in last_rows(rows, sms, costs, limit):  # noqa: B007
        pass
    return found
