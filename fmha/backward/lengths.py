"""How long the pieces of packed key tiles are, and in which sections, by simulated list scheduling on the device.

A formula of a few sums (``pieces``) does not see how pieces fit the SMs' last rounds. So one CTA's first warps deal the
pieces to the SMs, a lane for each of the lengths that ``pieces`` considers, a warp for each of WAYS: the key tiles of
all rows are cut, or those of the last section, or of the last two, and all others are whole, which costs no sums.
Pieces count by their length, in BUCKETS, each as long as those in it are on average; SMs by when they are free, in
TIMES. The next SM is never free earlier than the one before, so that a lane goes through its times once. Of the
sections the last SECTIONS are dealt; those before them keep all SMs equally busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from warpspec.fmha.backward.dealing import Dealing
from warpspec.fmha.backward.pieces import PieceLength, parts_of

BUCKETS, TIMES, SECTIONS = 16, 64, 4
WAYS = 3  # 0: all rows are cut, n: those of the last n sections
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
        parts = parts_of(each, limit)
        bucket = min(int(each / parts / limit * BUCKETS), BUCKETS - 1)
        if each:
            counts[bucket] += parts
            steps[bucket] += each
            cut += parts * (parts > 1)
    return Pieces(counts, steps, cut)


class Sections(NamedTuple):
    """Sections of rows (``schedule``) if a way is taken. whole: rows whose tiles are whole. first: the first row that
    is dealt. count: sections from there on. section: rows of each, but the last may be short."""

    whole: int
    first: int
    count: int
    section: int

    @classmethod
    def of(cls, rows: int, section: int, way: int) -> Sections | None:
        """None if there is no such way."""
        sections = -(-rows // section)
        if way >= sections and way:
            return None
        dealt = min(sections, SECTIONS)
        return cls((sections - (way or sections)) * section, (sections - dealt) * section, dealt, section)


def dealt_steps(length: PieceLength, heads: int, tiles: Iterable[int], limit: int, way: int) -> float:
    """The time that all KV heads' key tiles of so many steps take, in steps, if pieces have at most ``limit``. Infinity
    if there is no such way, or no room for so many pieces."""
    tiles = list(tiles)
    sms, most = round(heads / length.share), max(*tiles, 1)
    sections = Sections.of(heads, round(length.last * heads), way)
    if sections is None:
        return math.inf
    found, uncut = pieces_of(tiles, limit), pieces_of(tiles, most)
    whole, first = sections.whole, sections.first
    further = sum(found.counts) - sum(uncut.counts)
    if further and (further + 1) * (heads - whole) > length.further * heads:
        return math.inf
    load, whole_load = (sum(each.steps) + length.start * sum(each.counts) for each in (found, uncut))
    base = (min(first, whole) * whole_load + max(first - whole, 0) * load) / sms
    total = (whole * whole_load + (heads - whole) * load) / sms
    longest = most if whole > first else limit
    quantum = (max(total, base + longest + length.start) * HORIZON - base) / TIMES
    dealing = Dealing(sms, TIMES)
    for number in range(sections.count):
        begin = first + number * sections.section
        own = uncut if begin < whole else found
        for bucket in reversed(range(BUCKETS)):
            count, steps = own.counts[bucket], own.steps[bucket]
            rows = min(sections.section, heads - begin)
            dealing.deal(count * rows, (steps / max(count, 1) + length.start) / quantum)
    time = max(base + dealing.last * quantum, most + length.start if whole else 0.0)
    return time + length.cost / heads * found.cut * (heads - whole)
