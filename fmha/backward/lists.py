"""Into how many slices the query heads of a KV head are cut where steps are those of lists of blocks.

Only the device knows which blocks of queries visit a key tile, so the host cuts no tile by length. But a key tile of
many heads whose block many visit is the longest CTA by far: with a window and some keys that all queries see, the first
key tile has all query tiles. Slices of heads shorten all CTAs alike, for the price of their starts and ends, and of
additions of dK and dV to one sum. In each section the longest tiles begin first (``block_mask.BlockMask.q_counts``).

The host knows the mean steps of a key tile and the most. It takes the lengths in between for powers of their rank, and
deals CTAs to SMs (``rounds``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warpspec.fmha.backward import rounds
from warpspec.fmha.plan.work import UNKNOWN_SHARE
from warpspec.fmha.problem import AttentionProblem

MOST_CTAS = 128  # for each SM: with more, nothing is left to gain
LEAST_GAIN = 0.03  # fraction of the time that slices must save


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


def choose_slices(
    steps: Sequence[float],
    rows: int,
    group: int,
    sms: int,
    step: float,
    starts: tuple[float, float],
    join: float,
    section_of: Callable[[int], int],
) -> int:
    """Choose the number of slices with the least time; 1 if others gain little.

    steps: as ``steps_of`` returns them. rows: KV heads of all batch rows. group: query heads of a KV head. step,
    starts, join: microseconds of a step, of a CTA beside its steps without slices and with them, and of what slices
    take beside CTAs. section_of: rows of a section for a number of slices.
    """
    times = {}
    for slices in (n for n in range(1, group + 1) if group % n == 0):
        if slices > 1 and len(steps) * rows * slices > MOST_CTAS * sms:
            break
        ctas, free = (
            [each * (group // slices) * step + starts[slices > 1] for each in steps],
            rounds.idle(sms),
        )
        rounds.deal(free, ctas, rows * slices, section_of(slices))
        times[slices] = max(free)[0] + (join if slices > 1 else 0.0)
    best = min(times, key=times.__getitem__)
    return best if times[best] < (1 - LEAST_GAIN) * times[1] else 1
