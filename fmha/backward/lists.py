"""Into how many slices the query heads of a KV head are cut, and in which sections, with lists of blocks.

Only the device knows which blocks of queries visit a key tile, so the host cuts no tile by length. But a key tile of
many heads whose block many visit is the longest CTA by far: with a window and some keys that all queries see, the first
key tile has all query tiles. Slices of heads shorten it, for the price of more CTAs' starts and ends, and of additions
of dK and dV to one sum. So a CTA takes as many heads of a tile as have some number of steps (``heads_of``): with such a
window all heads of all tiles but the first. CTAs that are left over end at once. In each section the longest tiles
begin first (``block_mask.BlockMask.q_counts``).

The host knows the mean steps of a key tile and the most. It takes the lengths in between for powers of their rank, and
deals CTAs to SMs (``rounds``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from warpspec.fmha.backward import rounds
from warpspec.fmha.plan.work import UNKNOWN_SHARE
from warpspec.fmha.problem import AttentionProblem

MOST_CTAS = 128  # for each SM: with more, nothing is left to gain
LEAST_GAIN = 0.03  # fraction of the time that slices must save
SECTION_GAIN = 0.03  # the same of sections of all rows, which may read more together than L2 holds
ROUNDS = 8  # CTAs for each SM, the last ones, that are dealt, at least
IDLE_US = 1.5  # of a CTA that is left over


def steps_of(forward: AttentionProblem, tile_m: int, tile_n: int) -> list[float]:
    """Expected steps of the key tiles of one query head, the most first. tile_m, tile_n: queries and keys of a tile.

    Where more visit some block of keys than any block of queries visits, that is taken for one block that nearly all
    queries see, and others for as long as those of queries at most."""
    rows, keys = forward.mask.block_size
    visiting, visited = max(-(-forward.seq_q // rows), 1), max(-(-forward.seq_k // keys), 1)
    known = forward.visited
    mean = known.mean * visiting / visited if known else max(UNKNOWN_SHARE * visiting, 1.0)
    most = min(max(mean, known.visitors if known else 2 * mean), visiting)
    lengths = []
    if known and known.most < most and visited > 1:
        lengths, visited = [most], visited - 1
        mean = max(mean + (mean - most) / visited, 0.0)
        most = max(known.most, mean)
    power = most / min(max(mean, 0.5), most) - 1 if most else 0.0
    lengths += (most * (1 - (block + 0.5) / visited) ** power for block in range(visited))
    return [steps * rows / tile_m for steps in lengths for _ in range(keys // tile_n)]


def heads_of(steps, group, slices, most, minimum=min, maximum=max):
    """Query heads that a CTA takes of a key tile with so many steps of a head; the last CTA may have fewer.

    slices: CTAs of the tile, at most. most: steps of a CTA up to which it takes more heads. Ints or Int32.
    """
    heads = minimum(maximum(most // maximum(steps, 1), (group + slices - 1) // slices), group)
    ctas = (group + heads - 1) // heads
    return (group + ctas - 1) // ctas


class Starts(NamedTuple):
    """Microseconds: of a CTA beside its steps, without slices and with them; of what slices take beside CTAs."""

    whole: float
    sliced: float
    join: float


class Choice(NamedTuple):
    """slices: of a KV head's query heads. section: rows of a section, one for each slice. most: as in ``heads_of``."""

    slices: int
    section: int
    most: int


def choose(
    steps: Sequence[float],
    heads: tuple[int, int],
    numbers: Sequence[int],
    sms: int,
    starts: Starts,
    section_of: Callable[[int], int],
    step_of: Callable[[int, int], float],
) -> Choice:
    """Choose what takes the least time; one slice, or the section of ``section_of``, if others gain little.

    steps: of the key tiles of a row and head, the most first. heads: (KV heads of all batch rows, query heads of each).
    numbers: of slices, 1 the first. section_of: rows of a section for a number of slices, so that what they read stays
    in L2. All rows make one section if that is faster: then no long tile begins late. step_of: microseconds of a step
    of (slices, rows of a section).
    """
    rows, group = heads
    orders = []  # (the least that it may take, number, choice, CTAs' times, rows, section, join, cost)
    for slices in numbers:
        if slices > 1 and len(steps) * rows * slices > MOST_CTAS * sms:
            break
        join = starts.join if slices > 1 else 0.0
        gain = 1 + LEAST_GAIN * (slices > 1)
        few = section_of(slices)
        sections = {few: gain, -(-few // slices) * slices: gain}  # also of all slices of some KV heads
        for section, cost in {rows * slices: gain * (1 + SECTION_GAIN), **sections}.items():
            for most in {0, round(steps[0]) * -(-group // slices)} if slices > 1 else {0}:
                # CTAs of a key tile stand together where they do not have as many heads.
                uneven = most or group % slices
                own = -(-section // slices) * slices if uneven else section
                step = step_of(slices, own)
                if uneven:
                    ctas, times = slices, times_of(steps, (group, slices, most), step, starts)
                else:
                    start = starts.sliced if slices > 1 else starts.whole
                    ctas, times = 1, [each * group / slices * step + start for each in steps]
                count = rows * slices // ctas
                bound = (max(sum(times) * count / sms, times[0]) + join) * cost
                choice = Choice(slices, own, most)
                orders.append((bound, len(orders), choice, times, count, own // ctas, join, cost))
    found, least = (math.inf, 0), orders[0][2]
    for bound, number, choice, times, count, section, join, cost in sorted(orders):
        if (bound, number) >= found:
            break  # no order takes less than the mean load or the longest CTA
        time = time_of(times, count, section, sms, found[0] / cost - join)
        if ((time + join) * cost, number) < found:
            found, least = ((time + join) * cost, number), choice
    return least


def time_of(times: Sequence[float], rows: int, section: int, sms: int, limit: float) -> float:
    """What the CTAs of this many equal rows take. Only sections that begin in the last ROUNDS are dealt: those before
    keep all SMs equally busy. Infinity if it is found to be more than ``limit``."""
    sections = max(math.ceil(ROUNDS * sms / (len(times) * section)), 1)
    first = max(-(-rows // section) - sections, 0) * section
    free = [(first * sum(times) / sms, sms)]
    return rounds.deal(free, times, rows - first, section, limit)


def times_of(steps: Sequence[float], heads: tuple[int, int, int], step: float, starts: Starts) -> list[float]:
    """Microseconds of the CTAs of a KV head, tile by tile. heads: the last arguments of ``heads_of``. step: of a
    step."""
    group, slices, most = heads
    each = np.asarray(steps)[:, None]
    own = heads_of(np.rint(each).astype(int), group, slices, most, minimum=np.minimum, maximum=np.maximum)
    count = np.minimum(own, group - np.arange(slices) * own)  # of some CTAs past the last head
    return np.where(count > 0, each * count * step + starts.sliced, IDLE_US).ravel().tolist()
