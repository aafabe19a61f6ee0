"""The device's cut of the key tiles of packed requests: the fewest equal pieces of a tile with at most L steps each.

Only the device knows the requests' lengths. It predicts the time of LENGTHS values of L, a lane of a warp for each, and
takes the best; the host decides whether there is anything to cut, from lengths that it guesses. For L, in steps:

    max(longest + start,
        M = share (S + start P), plus max(TAIL longest, longest - last M) if P share > 1,
        ceil(share N) (long + start)) + cost C

A KV head has S steps and P pieces, of which C belong to tiles that are cut; the longest piece has ``longest`` steps,
and N pieces have at least LONG L, on average ``long``. share: KV heads over SMs. start: start and end of a CTA, in
steps. last: part of the KV heads in the last section (``schedule``), 1 where requests come one after another. cost:
what a piece adds to the launch, for the sums that it writes and the last kernel reads. The first line is the longest
CTA alone; the second is the mean load of an SM and what it waits for at the end: the longest CTAs of the last section
begin when the sections before are done; the third says that some SM has that many long pieces. In a simulation of list
scheduling, at random packed shapes, the choice takes 1.04 times the best L's time on average. If dQ's order is fixed,
CTAs come in the order of whole key tiles, so that the last ones are of the shortest tiles, and TAIL is ORDERED_TAIL.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

LENGTHS = 32  # values of L: a lane for each
LEAST, MOST = 0.5, 4.0  # L over an SM's mean steps in a section
FURTHER = 3.0  # pieces of an SM, at most, beside one of each key tile: CTAs that turn out to have none take time, too
TAIL, ORDERED_TAIL, LONG = 0.25, 0.1, 0.5
NEARLY = 1e-3  # of a rounded product that should be a whole number


def parts_of(steps: int, limit: float) -> int:
    """Pieces of a key tile of so many steps, none longer than ``limit``."""
    return max(math.ceil(steps / limit - NEARLY), 1)


class PieceLength(NamedTuple):
    """start, share, cost, last: see above. further: how many pieces fit beside one of each key tile."""

    start: float
    share: float
    cost: float
    last: float
    further: int


class Load(NamedTuple):
    """The load of a KV head with one L. cut: pieces of cut tiles. long, long_steps: pieces of at least LONG L steps,
    and the steps of all of these."""

    pieces: float = 0.0
    cut: float = 0.0
    long: float = 0.0
    long_steps: float = 0.0
    longest: float = 0.0


def most_further(share: float, last: float, total: float) -> int:
    """How many pieces fit beside one of each key tile, for at most ``total`` steps of a KV head."""
    return math.ceil(min(1 / (LEAST * last * share), FURTHER / share, max(total, 1.0))) + 1


def limit_of(length: PieceLength, total, lane, exp2=math.exp2):
    """The lane's value of L, but for the last lane's, which cuts nothing; at least lane + 1, at most the longest tile,
    for N counts pieces of LONG L. Floats or Float32."""
    rise = math.log2(MOST / LEAST) / (LENGTHS - 1)
    return total * (length.share * length.last * LEAST) * exp2(lane * rise)


def expected_steps(
    length: PieceLength, total, load: Load, tail=TAIL, maximum=max, minimum=min, ceil=math.ceil
):
    """The formula above, for S = ``total``, TAIL = ``tail`` and the load of one L. Floats or Float32."""
    mean = length.share * (total + length.start * load.pieces)
    # 1 if there are more pieces than SMs.
    waits = minimum(ceil(length.share * load.pieces - NEARLY) - 1.0, 1.0)
    mean += waits * maximum(tail * load.longest, load.longest - length.last * mean)
    long = load.long_steps / maximum(load.long, 1.0)
    crowded = ceil(length.share * load.long - NEARLY) * (long + length.start)
    return maximum(maximum(load.longest + length.start, mean), crowded) + length.cost * load.cut


def may_cut(length: PieceLength, tiles: Iterable[int]) -> bool:
    """Whether some value of L is better than no cut, for a KV head's key tiles of this many steps. Tries every
    fourth."""
    tiles = Counter(tiles)
    total, longest = sum(steps * count for steps, count in tiles.items()), max(tiles, default=0)
    tried = range(0, LENGTHS, 4)
    limits = {min(max(int(limit_of(length, total, i)) + 1, i + 1), max(longest, 1)) for i in tried}

    return min(time_of(length, tiles, limit) for limit in limits) < time_of(length, tiles, max(longest, 1))


def time_of(length: PieceLength, tiles: Counter[int], limit: int) -> float:
    """The formula above for L = ``limit``. tiles: how many key tiles of a KV head have as many steps."""
    parts = [(steps, max(-(-steps // limit), 1), count) for steps, count in tiles.items()]
    pieces = sum(part * count for _, part, count in parts)
    cut = sum(part * count for _, part, count in parts if part > 1)
    those = [each for each in parts if each[0] >= LONG * limit * each[1]]
    long = sum(part * count for _, part, count in those)
    long_steps = sum(steps * count for steps, _, count in those)
    most = max((steps / part for steps, part, _ in parts), default=0.0)
    total = sum(steps * count for steps, count in tiles.items())
    return expected_steps(length, total, Load(pieces, cut, long, long_steps, most))
