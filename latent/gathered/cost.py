"""Whether CTAs share out the KV tiles of all queries (``fmha.device.line``), or take equal splits of them.

The choice compares the expected clocks of both on sm_90a (``Costs``). Equal splits take as many rounds as there are
tasks to a CTA, each as long as the longest query's split, and a launch that combines them. If tiles are shared out,
every CTA has the same number of tiles; cutting the line takes time before anything starts, and one CTA adds up the
pieces of a task. If only the device knows the lengths, they are expected to be full in half of the calls and half as
long in the others. The constants were fitted to 17 and 26 calls that were drawn at random and timed on an H200
(2026-11-27), so that the choice loses little; docs/notebook/latent.md says what it loses on others.
"""

from __future__ import annotations

from typing import NamedTuple

from warpspec.fmha.line import LEAST_TILES, TILE_OVERHEAD


class Costs(NamedTuple):
    """Clocks of a kernel: of a KV tile, of cutting the line, of the launch that combines splits, and of adding a piece.
    ends: start and end of a task, in KV tiles."""

    tile: float
    ends: float
    scan: float
    second: float
    add: float


CODES, LISTS = "e4m3", "v3.2-fp8"
TIMED = (CODES, LISTS)  # row formats whose clocks these are
GATHERED = Costs(tile=4400, ends=1, scan=15300, second=12400, add=2800)
TRANSPOSED = Costs(tile=2400, ends=4, scan=6300, second=8200, add=1300)  # keys are rows of the products
MOST_TASKS = 8  # tasks of a CTA up to which they are shared out: more of them balance
MEAN_LENGTHS = (1.0, 0.5)  # of lengths that only the device knows, on average, as a share of the longest


def equal_clocks(costs: Costs, tasks: int, tiles: int, splits: int, ctas: int) -> float:
    """Clocks of equal splits. tasks: of a kernel's rows each. tiles: KV tiles of the longest."""
    rounds = -(-tasks * splits // ctas)
    return rounds * (-(-tiles // splits) + costs.ends) * costs.tile + (costs.second if splits > 1 else 0)


def line_clocks(costs: Costs, tasks: int, tiles: float, longest: int, ctas: int) -> float:
    """Clocks of tasks that are shared out. tiles: KV tiles of a task on average; longest: of the longest."""
    each = max(tasks * (tiles + TILE_OVERHEAD) / ctas, LEAST_TILES)
    pieces = max(longest / each, 1)
    return (each + costs.ends) * costs.tile + costs.scan + costs.add * pieces


def shares_out(costs: Costs, tasks: int, tiles: int, splits: int, ctas: int, known: bool) -> bool:
    """Whether sharing out is expected to be faster. splits: equal ones to compare with. known: lengths are full."""
    if tasks > MOST_TASKS * ctas:
        return False
    shares = MEAN_LENGTHS[:1] if known else MEAN_LENGTHS
    expected = sum(line_clocks(costs, tasks, tiles * share, tiles, ctas) for share in shares) / len(shares)
    return expected < equal_clocks(costs, tasks, tiles, splits, ctas)
