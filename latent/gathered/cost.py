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

from warpspec.common.hardware import FP32_BYTES, WARPGROUP_ROWS
from warpspec.fmha.heads import LATENT
from warpspec.fmha.line import LEAST_TILES, TILE_OVERHEAD


class Costs(NamedTuple):
    """Microseconds of a kernel.

    Of equal splits: start: of the launch. tile: of a KV tile. ends: of a task's start and end. second: of the launch
    that combines splits. state: more for each MB that their states take in fp32. evens: by what share of what shorter
    tasks have less to do a round after the first is shorter.
    If tiles are shared out: scan: of the launch, which cuts the line first. shared_tile: of a KV tile. add: of adding a
    piece. cut: more where tasks are cut and CTAs share out columns: of leaving a state, waiting for the others and
    adding up a share, however many pieces there are. cut_state: more for each MB that the states take in fp32.
    overhead: KV tiles as which a task's start and end count on the line.
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
    cut_state: float = 0.0
    evens: float = 0.0
    overhead: float = TILE_OVERHEAD


CODES, LISTS = "e4m3", "v3.2-fp8"
COSTS = {  # by row format
    CODES: Costs(3.2, 1.93, 4.45, 0.028, 0.411, 6.14, 2.06, 0.0, 3.21, 0.444, 0.784, 3),
    LISTS: Costs(4.23, 2.96, 1.36, 0.46, 0.581, 10.7, 2.83, 1.49),
}
# Where two CTAs share the keys, KV tiles take less time: by 8 calls that were timed on an H200 (2026-11-27).
OF_CLUSTERS = {LISTS: COSTS[LISTS]._replace(tile=2.5, shared_tile=2.6)}
TRANSPOSED = Costs(2.85, 1.24, 2.08, 1.21, 0.475, 6.11, 1.37, 0.598)  # codes as rows of the products
# Codes of Q and keys multiplied as they are, 64 rows a task.
RAW = Costs(2.25, 1.6, 4.14, 0.928, 0.298, 5.37, 1.65, 0.143, 3.83, 0.259, 0.782)
MOST_TASKS = 8  # tasks of a CTA up to which they are shared out: more of them balance
MEAN_LENGTHS = (1.0, 0.5)  # of lengths that only the device knows, on average, as a share of the longest
ROW_MB = LATENT[1] * FP32_BYTES * 1e-6  # of a row of a state


def equal_time(
    costs: Costs, tasks: int, tiles: int, rows: int, splits: int, ctas: int, mean: float | None = None
) -> float:
    """Microseconds of equal splits. tasks: of a kernel's rows each. tiles: KV tiles of the longest. rows: of all heads.
    mean: KV tiles of a task on average; None: all are as long as the longest."""
    rounds, longest = -(-tasks * splits // ctas), -(-tiles // splits) * costs.tile
    less = 0.0 if mean is None else costs.evens * (1 - mean / tiles)
    time = costs.start + longest + costs.ends + (rounds - 1) * (longest * (1 - less) + costs.ends)
    if splits == 1:
        return time
    return time + costs.second + costs.state * splits * rows * ROW_MB


def shared_time(costs: Costs, tasks: int, mean: float, longest: int, ctas: int) -> float:
    """Microseconds of tasks that are shared out. mean: KV tiles of a task on average; longest: of the longest."""
    each = max(tasks * (mean + costs.overhead) / ctas, LEAST_TILES)
    pieces = max((longest + costs.overhead) / each, 1)
    states = min(tasks * max((mean + costs.overhead) / each, 1), ctas)
    cut = costs.cut + costs.cut_state * states * WARPGROUP_ROWS * ROW_MB
    return costs.scan + each * costs.shared_tile + costs.add * pieces + cut * min(2 * (pieces - 1), 1)


def mean_tiles(tiles: int, known: bool) -> list[float]:
    """KV tiles of a task on average, as they may be where the longest has so many. known: lengths are full."""
    return [tiles * share for share in (MEAN_LENGTHS[:1] if known else MEAN_LENGTHS)]


def expected_equal(
    costs: Costs, tasks: int, tiles: int, rows: int, splits: int, ctas: int, known: bool
) -> float:
    """``equal_time`` as far as the host knows the lengths."""
    times = [equal_time(costs, tasks, tiles, rows, splits, ctas, mean) for mean in mean_tiles(tiles, known)]
    return math.prod(times) ** (1 / len(times))


def expected_shared(costs: Costs, tasks: int, tiles: int, ctas: int, known: bool) -> float:
    """``shared_time`` as far as the host knows the lengths. tiles: KV tiles of the longest."""
    times = [shared_time(costs, tasks, mean, tiles, ctas) for mean in mean_tiles(tiles, known)]
    return math.prod(times) ** (1 / len(times))


def best_splits(costs: Costs, tasks: int, tiles: int, rows: int, ctas: int, known: bool) -> int:
    """The number of equal splits with the least time; of those whose longest splits are alike, only the fewest."""
    longest = {-(-tiles // splits) for splits in range(1, min(tiles, 2 * ctas) + 1)}
    counts = sorted(-(-tiles // most) for most in longest)
    return min(
        counts,
        key=lambda splits: expected_equal(costs, tasks, tiles, rows, splits, ctas, known),
        default=1,
    )


def shares_out(costs: Costs, tasks: int, tiles: int, rows: int, splits: int, ctas: int, known: bool) -> bool:
    """Whether sharing out is expected to be faster. splits: equal ones to compare with. known: lengths are full."""
    if tasks > MOST_TASKS * ctas:
        return False
    equal = expected_equal(costs, tasks, tiles, rows, splits, ctas, known)
    return expected_shared(costs, tasks, tiles, ctas, known) < equal
