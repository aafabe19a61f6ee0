"""Whether CTAs share out the KV tiles of all queries (``fmha.device.line``), or take equal splits of them.

The choice compares the expected clocks of both on sm_90a. A KV tile takes TILE, a task's start and end as long as ENDS
tiles. Equal splits take as many rounds as there are tasks to a CTA, each as long as the longest query's split, and
SECOND for the launch that combines them. If tiles are shared out, every CTA has the same number of tiles and two ends
on average; cutting the line takes SCAN before anything starts, and adding up the states of pieces takes ADD. SCAN and
ADD were fitted to 22 calls on an H200; for four of these the choice is 3 to 10% slower than the other way. If only the
device knows the lengths, they are expected to be full in half of the calls and half as long in the others.
"""

from __future__ import annotations

from warpspec.fmha.line import LEAST_TILES, TILE_OVERHEAD

TIMED = ("e4m3", "v3.2-fp8")  # row formats whose clocks these are
TILE = 4400
ENDS = TILE_OVERHEAD  # as on the line
SCAN = 12000
SECOND = 5000
ADD = 35000
MOST_TASKS = 8  # tasks of a CTA up to which they are shared out: more of them balance
MEAN_LENGTHS = (1.0, 0.5)  # of lengths that only the device knows, on average, as a share of the longest


def equal_clocks(tasks: int, tiles: int, splits: int, ctas: int) -> float:
    """Clocks of equal splits. tasks: 64 rows each. tiles: KV tiles of the longest."""
    rounds = -(-tasks * splits // ctas)
    return rounds * (-(-tiles // splits) + ENDS) * TILE + (SECOND if splits > 1 else 0)


def line_clocks(tasks: int, tiles: float, ctas: int) -> float:
    """Clocks of tasks that are shared out. tiles: KV tiles of a task on average."""
    each = max(tasks * (tiles + ENDS) / ctas, LEAST_TILES)
    return (each + ENDS) * TILE + SCAN + ADD


def shares_out(tasks: int, tiles: int, splits: int, ctas: int, known: bool) -> bool:
    """Whether sharing out is expected to be faster. splits: equal ones to compare with. known: lengths are full."""
    if tasks > MOST_TASKS * ctas:
        return False
    shares = MEAN_LENGTHS[:1] if known else MEAN_LENGTHS
    expected = sum(line_clocks(tasks, tiles * share, ctas) for share in shares) / len(shares)
    return expected < equal_clocks(tasks, tiles, splits, ctas)
