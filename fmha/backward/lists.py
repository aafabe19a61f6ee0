"""Into how many slices the query heads of a KV head are cut, and in which sections, with lists of blocks.

Only the device knows which blocks of queries visit a key tile, so the host cuts no tile by length. But a key tile of
many heads whose block many visit is the longest CTA by far: with a window and some keys that all queries see, the first
key tile has all query tiles. Slices of heads shorten all CTAs alike, for the price of their starts and ends, and of
additions of dK and dV to one sum. In each section the longest tiles begin first (``block_mask.BlockMask.q_counts``).

The host knows the mean steps of a key tile and the most. It takes the lengths in between for powers of their rank, and
deals CTAs to SMs (``rounds``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from warpspec.fmha.backward import rounds
from warpspec.fmha.plan.work import UNKNOWN_SHARE
from warpspec.fmha.problem import AttentionProblem

MOST_CTAS = 128  # for each SM: with more, nothing is left to gain
LEAST_GAIN = 0.03  # fraction of the time that slices must save
SECTION_GAIN = 0.06  # the same of sections of all rows, which may read more together than L2 holds


def steps_of(forward: AttentionProblem, tile_m: int, tile_n: int) -> list[float]:
    """Expected steps of the key tiles of one query head, the most first. tile_m, tile_n: queries and keys of a tile."""
    rows, keys = forward.mask.block_size
    visiting, visited = max(-(-forward.seq_q // rows), 1), max(-(-forward.seq_k // keys), 1)
    known = forward.visited
    mean = known.mean * visiting / visited if known else max(UNKNOWN_SHARE * visiting, 1.0)
    most = min(max(mean, known.visitors if known else 2 * mean), visiting)
    power = most / min(max(mean, 0.5), most) - 1 if most else 0.0
    lengths = (most * (1 - (block + 0.5) / visited) ** power * rows / tile_m for block in range(visited))
    return [steps for steps in lengths for _ in range(keys // tile_n)]


class Starts(NamedTuple):
    """Microseconds: of a CTA beside its steps, without slices and with them; of what slices take beside CTAs."""

    whole: float
    sliced: float
    join: float


def choose(
    steps: Sequence[float],
    rows: int,
    numbers: Sequence[int],
    sms: int,
    starts: Starts,
    section_of: Callable[[int], int],
    step_of: Callable[[int, int], float],
) -> tuple[int, int]:
    """Choose (slices, rows of a section) with the least time; one slice, or the section of ``section_of``, if others
    gain little.

    steps: of the key tiles of a row. rows: KV heads of all batch rows. numbers: of slices, 1 the first. section_of:
    rows of a section for a number of slices, so that what they read stays in L2. All rows make one section if that is
    faster: then no long tile begins late. step_of: microseconds of a step of (slices, rows of a section).
    """
    found = {}
    for slices in numbers:
        if slices > 1 and len(steps) * rows * slices > MOST_CTAS * sms:
            break
        start, join = (starts.sliced, starts.join) if slices > 1 else (starts.whole, 0.0)
        for section, cost in ((section_of(slices), 1.0), (rows * slices, 1 + SECTION_GAIN)):
            step, free = step_of(slices, section), rounds.idle(sms)
            rounds.deal(free, [each / slices * step + start for each in steps], rows * slices, section)
            time = (max(free)[0] + join) * cost * (1 + LEAST_GAIN * (slices > 1))
            found[slices, section] = min(time, found.get((slices, section), time))
    return min(found, key=found.__getitem__)
