"""Into how many slices the query heads of a KV head are cut, and whether the device may cut key tiles, for packed
requests whose queries see all of their keys.

The host knows how many requests there are, the longest one's length, and the number of tokens within an eighth. It
guesses GUESSES batches of such requests, lays each out as the device would (``runs``), and deals its CTAs to the SMs.
How well CTAs fill the last round depends on chance; how many of them there are, and how long the longest, hardly does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from warpspec.fmha.backward import rounds, runs

GUESSES = 3
TOKENS = 0.125  # tokens that there may be beyond those that are known, as a part of these
LEAST_SHARE = 0.02  # mean length over the longest, at least
MOST_LENGTHS = 16  # different ones beside the longest
ENOUGH = 1.02  # time of whole tiles over the mean load, up to which nothing else is tried
CANDIDATES = (3, 12, 18, 25)  # of ``runs.candidate``, that stand for all
LEAST_GAIN = 0.01  # fraction of the time that cutting tiles or heads must save


class Costs(NamedTuple):
    """Microseconds: of a step; of a CTA, beside its steps; of having sums at all; of a key tile's sums."""

    step: float
    cta: float
    join: float
    sums: float


class Choice(NamedTuple):
    """slices: of a KV head's query heads. cut: whether the device may cut key tiles."""

    slices: int
    cut: bool


class Lengths(NamedTuple):
    """Requests of one length."""

    length: int
    count: int


def guessed_lengths(requests: int, longest: int, tokens: int) -> list[list[Lengths]]:
    """Lengths of requests in each guess: the longest, and the others as powers of their rank, so that all of them have
    so many tokens; neighbours are equal where there are many. tokens: as many as are known, fewer than an eighth too
    few."""
    found = []
    for guess in range(GUESSES):
        total = tokens * (1 + TOKENS * (guess + 0.5) / GUESSES)
        first, others = min(longest, round(total)), requests - 1
        rest = max(total - first, others)
        lengths = [Lengths(first, 1)]
        if others:
            power = 1 / min(max(rest / others / first, LEAST_SHARE), 1.0) - 1
            place = ((2 * guess + 1) % GUESSES + 0.5) / GUESSES  # of each between two ranks
            ranks = min(others, MOST_LENGTHS)
            counts = [(others * (rank + 1)) // ranks - others * rank // ranks for rank in range(ranks)]
            sizes = [first * ((rank + place) / ranks) ** power for rank in range(ranks)]
            scale = rest / sum(size * count for size, count in zip(sizes, counts, strict=True))
            sizes = [min(max(round(size * scale), 1), first) for size in sizes]
            lengths += map(Lengths, sizes, counts)
        found.append(lengths)
    return found


def choose(
    guesses: Sequence[Sequence[runs.Request]], heads: int, numbers: Sequence[int], sms: int, costs: Costs
) -> Choice:
    """Choose what is expected to take the least time; whole tiles of all heads, if others gain little.

    guesses: requests with the steps of all query heads of a KV head. heads: KV heads. numbers: of slices, 1 the first.
    """
    whole, load = 0.0, 0.0
    for requests in guesses:
        layout = runs.lay_out(requests, heads, sms, math.inf, 0.0, 0)
        whole += dealt_us(layout, sms, costs)
        load += sum(count * (steps * costs.step + costs.cta) for count, steps in layout.parts) / sms
    times = {Choice(1, False): whole}
    for slices in numbers if whole > ENOUGH * load else ():
        sliced = [[runs.Request(steps // slices, tiles) for steps, tiles in requests] for requests in guesses]
        found = [expected_us(requests, heads * slices, slices, sms, costs) for requests in sliced]
        times[Choice(slices, True)] = sum(found) * (1 + LEAST_GAIN)
    return min(times, key=times.__getitem__)


def expected_us(requests: Sequence[runs.Request], rows: int, slices: int, sms: int, costs: Costs) -> float:
    """Microseconds of a guess whose tiles the device may cut. Pieces of slices add to sums that all key tiles have."""
    found = []
    for number in CANDIDATES:
        kept, least = runs.candidate(number)
        limits = (least * costs.cta / costs.step, kept * sms)
        layout = runs.lay_out(requests, rows, sms, *limits, runs.FURTHER * sms)
        tiles = sum(tiles for _, tiles in requests) * rows // slices if slices > 1 else layout.cut
        found.append(dealt_us(layout, sms, costs) + (costs.join + tiles * costs.sums if tiles else 0.0))
    return min(found)


def dealt_us(layout: runs.Layout, sms: int, costs: Costs) -> float:
    """When the last CTA of a layout ends."""
    free, end = rounds.idle(sms), 0.0
    for count, steps in layout.parts:
        end = rounds.deal(free, [steps * costs.step + costs.cta], count, count)
    return max(end, 0.0)
