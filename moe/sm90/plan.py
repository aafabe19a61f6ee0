"""Which tiles, from shapes alone: how the rows fall on the experts only the device knows.

Ways ("plain", "ahead", "unsorted") leave the same bits. "ahead": a GEMM's first weights are loaded before rows are
looked up, which GEMM 2 does before it waits for GEMM 1. "unsorted": of few rows, so are they, and nothing is sorted:
every choice is a tile's only row, in their order, and GEMM 1 reads the tokens themselves.

Tokens of a tile are about twice as many as an expert has on average, so that few experts have more than one tile. Two
or four row groups share a tile's tokens where there are many tiles; where rows are few, single ones spread over more
SMs, and where there are not even tiles for all SMs' CTAs, consumers take turns at one. Beyond 32 tokens the products
count: consumers of two row groups, and as many features as registers hold, for the L2's sake.
"""

from __future__ import annotations

from dataclasses import replace

from warpspec.moe.sm90.config import Shape

WAYS = ("plain", "ahead", "unsorted")
WAY = "plain"  # of all problems: no GPU has timed the others
FEW_ROWS = 8  # of a call: row groups stand alone
FEW = Shape(row_groups=1, tokens=8, stages=4, ctas_per_sm=3)
FEWEST = Shape(row_groups=1, tokens=8, stages=4, ctas_per_sm=2, splits=2)
SHAPES = {
    8: Shape(row_groups=2, tokens=8, stages=4, ctas_per_sm=2),
    16: Shape(row_groups=4, tokens=16, stages=4, ctas_per_sm=1, load_warps=4),
    32: Shape(row_groups=4, tokens=32, stages=4, ctas_per_sm=1, load_warps=4),
    64: Shape(row_groups=4, tokens=64, stages=4, ctas_per_sm=1, load_warps=4, tall=2, steps=1),
    128: Shape(row_groups=4, tokens=128, stages=4, ctas_per_sm=1, load_warps=4, tall=2, steps=1),
}
# Classes 16 tokens apart, no GPU has timed them: fewer columns of products without a row.
FINE = (replace(SHAPES[128], apart=16), replace(SHAPES[128], tokens=144, apart=16))


def choose_shape(rows: int, experts: int, row_tiles: int, sm_count: int) -> Shape:
    """Tiles for ``rows`` rows over ``experts`` experts whose weights are so many row tiles each. Of the layer's two
    GEMMs, shapes differ in nothing that the list of work depends on."""
    wanted = min(2 * rows / experts, rows)
    tokens = next((tokens for tokens in SHAPES if tokens >= wanted), max(SHAPES))
    if tokens > FEW.tokens or rows > FEW_ROWS:
        return SHAPES[tokens]
    return FEWEST if rows * row_tiles <= FEWEST.ctas_per_sm * sm_count else FEW


def is_unsorted(way: str, rows: int, choices: int, rounds: bool) -> bool:
    """Whether a layer of so many rows goes unsorted where that is its way; if it does not, it goes "ahead". choices: of
    a token, without the shared experts. rounds: of "w4a4"."""
    return way == "unsorted" and rows <= FEW_ROWS and choices > 0 and not rounds
