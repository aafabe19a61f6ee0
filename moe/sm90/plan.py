"""Choose tiles from shapes alone; only the device knows how rows are distributed over experts.

A tile has room for the rows that most experts have if rows are distributed evenly, so that few experts need more than
one. Usually four row groups share a tile's tokens. If rows are few, tiles of one row group spread over more SMs; if
there are not enough tiles even for that, consumers take turns at one. From tiles of 32 tokens on, an expert's last rows
have a class of their own (``config.widths_of``), so a tile wider than most experts need costs little. Beyond 48 tokens
the products count. Consumers then have two row groups, and tiles as many features as registers hold, to reduce L2
traffic; tiles narrower than 112 tokens save little there, and cost experts with many rows more.
"""

from __future__ import annotations

import math

from warpspec.moe.sm90.config import Shape

UNSORTED_ROWS = 12  # calls with at most this many rows do not sort them
FEW_ROWS = 12  # rows up to which tiles have one row group
FEW = Shape(row_groups=1, tokens=8, stages=4, ctas_per_sm=3)
FEWEST = Shape(row_groups=1, tokens=8, stages=4, ctas_per_sm=2, splits=2)
SHAPES = {
    8: Shape(row_groups=4, tokens=8, stages=5, ctas_per_sm=1, load_warps=4),
    32: Shape(row_groups=4, tokens=32, stages=4, ctas_per_sm=1, load_warps=4),
    48: Shape(row_groups=4, tokens=48, stages=3, ctas_per_sm=1, load_warps=4),
    112: Shape(row_groups=4, tokens=112, stages=4, ctas_per_sm=1, load_warps=4, tall=2, steps=1),
    144: Shape(row_groups=4, tokens=144, stages=4, ctas_per_sm=1, load_warps=4, tall=2, steps=1),
}
DEVIATIONS = 1.5  # a tile has room for this many standard deviations above the mean


def choose_shape(rows: int, experts: int, row_tiles: int, sm_count: int) -> Shape:
    """Tiles for ``rows`` rows over ``experts`` experts whose weights are ``row_tiles`` row tiles each.

    The shapes of the layer's two GEMMs agree in everything that the list of work depends on.
    """
    mean = rows / experts
    wanted = min(mean + DEVIATIONS * math.sqrt(mean), rows)
    tokens = next((tokens for tokens in SHAPES if tokens >= wanted), max(SHAPES))
    if tokens > FEW.tokens or rows > FEW_ROWS:
        return SHAPES[tokens]
    return FEWEST if rows * row_tiles <= FEWEST.ctas_per_sm * sm_count else FEW
