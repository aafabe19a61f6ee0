"""In how many splits the keys of a call are cut, or whether CTAs share out the KV tiles of all queries
(``fmha.device.line``).

The choice compares the expected time of both on sm_90a (``Costs``). Equal splits take as many rounds as there are tasks
to a CTA, each as long as the longest query's split, and a launch that combines them. If tiles are shared out, every CTA
has the same number of tiles; cutting the line takes time before anything starts, and so does adding up the pieces of a
task. If only the device knows the lengths, they are expected to be full in half of the calls and half as long in the
others. docs/notebook/latent.md says to which calls the constants were fitted, and what the choice loses on others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from warpspec.common.hardware import FP32_BYTES
from warpspec.fmha.heads import LATENT
from warpspec.fmha.line import LEAST_TILES, TILE_OVERHEAD


class Costs(NamedTuple):
    """Microseconds of a kernel.

    Of equal splits: start: of the launch. tile: of a KV tile. ends: of a task's start and end. second: of the launch
    that combines splits. state: more for each MB of states that it reads.
    If tiles are shared out: scan: of the launch, which cuts the line first. shared_tile: of a KV tile. add: of adding a
    piece. cut: more where tasks are cut and CTAs share out columns: of leaving a state, waiting for the others and
    adding up a share, however many pieces there are.
    """

    start: float
    tile: float
    ends: float
    second: float
    state: float
    scan: float
    shared_tile: float
    add: float
    cut: float = 0.0


CODES, LISTS = "e4m3", "v3.2-fp8"
COSTS = {  # by row format
    CODES: Costs(3.83, 1.91, 4.67, 0.26, 0.454, 5.93, 2.07, 0.0, 15.0),
    LISTS: Costs(4.23, 2.96, 1.36, 0.46, 0.581, 10.7, 2.83, 1.49),
}
# Where two CTAs share the keys, KV tiles take less time: by 8 calls that were timed on an H200 (2026-11-27).
OF_CLUSTERS = {LISTS: COSTS[LISTS]._replace(tile=2.5, shared_tile=2.6)}
TRANSPOSED = Costs(4.6, 1.26, 1.26, 2.0, 0.512, 10.6, 1.29, 0.604)  # codes as rows of the products
MOST_TASKS = 8  # tasks of a CTA up to which they are shared out: more of them balance
MEAN_LENGTHS = (1.0, 0.5)  # of lengths that only the device knows, on average, as a share of the longest


def equal_time(costs: Costs, tasks: int, tiles: int, rows: int, splits: int, ctas: int) -> float:
    """Microseconds of equal splits. tasks: of a kernel's rows each. tiles: KV tiles of the longest. rows: of all
    heads."""
    rounds = -(-tasks * splits // ctas)
    time = costs.start + rounds * (-(-tiles // splits) * costs.tile + costs.ends)
    if splits == 1:
        return time
    return time + costs.second + costs.state * splits * rows * LATENT[1] * FP32_BYTES * 1e-6


def best_splits(costs: Costs, tasks: int, tiles: int, rows: int, ctas: int) -> int:
    """The number of equal splits with the least time; of those whose longest splits are alike, only the fewest."""
    longest = {-(-tiles // splits) for splits in range(1, min(tiles, 2 * ctas) + 1)}
    counts = sorted(-(-tiles // most) for most in longest)
    return min(counts, key=lambda splits: equal_time(costs, tasks, tiles, rows, splits, ctas), default=1)


def shared_time(costs: Costs, tasks: int, tiles: float, longest: int, ctas: int) -> float:
    """Microseconds of tasks that are shared out. tiles: KV tiles of a task on average; longest: of the longest."""
    each = max(tasks * (tiles + TILE_OVERHEAD) / ctas, LEAST_TILES)
    pieces = max(longest / each, 1)
    return costs.scan + each * costs.shared_tile + costs.add * pieces + costs.cut * min(2 * (pieces - 1), 1)


def shares_out(costs: Costs, tasks: int, tiles: int, rows: int, splits: int, ctas: int, known: bool) -> bool:
    """Whether sharing out is expected to be faster. splits: equal ones to compare with. known: lengths are full."""
    if tasks > MOST_TASKS * ctas:
        return False
    shares = MEAN_LENGTHS[:1] if known else MEAN_LENGTHS
    times = [shared_time(costs, tasks, tiles * share, tiles, ctas) for share in shares]
    return math.prod(times) ** (1 / len(times)) < equal_time(costs, tasks, tiles, rows, splits, ctas)
