"""Which tiles, from shapes alone: how the rows fall on the experts only the device knows.

A tile has room for what most experts have of rows that are dealt out evenly, so that few have more than one. Four row
groups share a tile's tokens; where rows are few, single ones spread over more SMs, and where there are not even tiles
for all SMs' CTAs, consumers take turns at one. From tiles of 32 tokens on an expert's last rows have a class of their
own (``config.widths_of``), so a tile that is wider than most need costs little. Beyond 48 tokens the products count:
consumers of two row groups, and as many features as registers hold, for the L2's sake; narrower tiles than 112 save
little there, and cost experts with many rows more.
"""

from __future__ import annotations

import math

from warpspec.moe.sm90.config import Shape

UNSORTED_ROWS = 12  # of a call, at most: they are not sorted
FEW_ROWS = 12  # row groups stand alone
FEW = Shape(row_groups=1, tokens=8, stages=4, ctas_per_sm=3)
FEWEST = Shape(row_groups=1, tokens=8, stages=4, ctas_per_sm=2, splits=2)
SHAPES = {
    8: Shape(row_groups=4, tokens=8, stages=5, ctas_per_sm=1, load_warps=4),
    32: Shape(row_groups=4, tokens=32, stages=4, ctas_per_sm=1, load_warps=4),
    48: Shape(row_groups=4, tokens=48, stages=3, ctas_per_sm=1, load_warps=4),
    112: Shape(row_groups=4, tokens=112, stages=4, ctas_per_sm=1, load_warps=4, tall=2, steps=1),
    144: Shape(row_groups=4, tokens=144, stages=4, ctas_per_sm=1, load_warps=4, tall=2, steps=1),
}
DEVIATIONS = 1.5  # standard ones above the mean that a tile has room for


def choose_shape(rows: int, experts: int, row_tiles: int, sm_count: int) -> Shape:
    """Tiles for ``rows`` rows over ``experts`` experts whose weights are so many row tiles each. Of the layer's two
    GEMMs, shapes differ in nothing that the list of work depends on."""
    mean = rows / experts
    wanted = min(mean + DEVIATIONS * math.sqrt(mean), rows)
    tokens = next((tokens for tokens in SHAPES if tokens >= wanted), max(SHAPES))
    if tokens > FEW.tokens or rows > FEW_ROWS:
        return SHAPES[tokens]
    return FEWEST if rows * row_tiles <= FEWEST.ctas_per_sm * sm_count else FEW
