"""How long the pieces of packed key tiles are, by simulated list scheduling on the device.

A formula of a few sums (``pieces``) does not see how pieces fit the SMs' last rounds. So one CTA's first warp deals the
pieces to the SMs, a lane for each of the lengths that ``pieces`` considers. Pieces count by their length, in BUCKETS,
each as long as those in it are on average; SMs by when they are free, in TIMES. As pieces come longest first, the next
SM is never free earlier than the one before, so that a lane goes through its times once. Of the sections the last
SECTIONS are dealt; those before them keep all SMs equally busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from warpspec.fmha.backward.pieces import NEARLY, PieceLength

BUCKETS, TIMES, SECTIONS = 16, 32, 2
HORIZON = 1.3  # that TIMES cover: of the mean load, or of the longest piece's time if that is more
# Steps of an SM on average from which pieces are dealt, and key tiles up to which they are: else it takes too long.
LEAST_STEPS, MOST_TILES = 80.0, 512


class Pieces(NamedTuple):
    """Pieces of a KV head with one length, by bucket, and the steps of all in it. cut: those of tiles that are cut."""

    counts: list[int]
    steps: list[int]
    cut: int


def pieces_of(tiles: Iterable[int], limit: int) -> Pieces:
    """The pieces of key tiles of so many steps, none longer than ``limit``."""
    counts, steps, cut = [0] * BUCKETS, [0] * BUCKETS, 0
    for each in tiles:
        parts = max(math.ceil(each / limit - NEARLY), 1)
        bucket = min(int(each / parts / limit * BUCKETS), BUCKETS - 1)
        if each:
            counts[bucket] += parts
            steps[bucket] += each
            cut += parts * (parts > 1)
    return Pieces(counts, steps, cut)


def dealt_steps(length: PieceLength, heads: int, found: Pieces, limit: int) -> float:
    """The time that the pieces of all KV heads take, in steps."""
    sms, section = round(heads / length.share), round(length.last * heads)
    load = sum(found.steps) + length.start * sum(found.counts)
    first = max(-(-heads // section) - SECTIONS, 0) * section
    base = first * load / sms
    quantum = (max(heads * load / sms, base + limit + length.start) * HORIZON - base) / TIMES
    free = [sms] + [0] * TIMES
    time = last = 0
    for begin in range(first, heads, section):
        for bucket in reversed(range(BUCKETS)):
            count, steps = found.counts[bucket], found.steps[bucket]
            taken = max(int((steps / max(count, 1) + length.start) / quantum + 0.5), 1)
            count *= min(section, heads - begin)
            while count and time < TIMES:
                moved, end = min(free[time], count), min(time + taken, TIMES)
                free[time] -= moved
                free[end] += moved
                count -= moved
                last = max(last, end if moved else 0)
                time += count > 0
    return base + last * quantum + length.cost * found.cut
