"""Which tiles and how many CTAs, from shapes alone: how the rows fall on the experts only the device knows."""

from __future__ import annotations

from warpspec.moe.sm100.config import PAIR, SINGLE, SWAPPED, Shape

SM_COUNT = 148  # of a B200

PAIR_ROWS = 256  # rows of an expert from which two CTAs share an MMA
SWAPPED_ROWS = 64  # rows of an expert up to which tokens are the N of the MMA


def choose_shape(rows: int, experts: int) -> Shape:
    """Tiles for ``rows`` rows over ``experts`` experts."""
    mean = -(-rows // experts)
    if mean > SWAPPED_ROWS:
        return PAIR if mean >= PAIR_ROWS else SINGLE
    return next(shape for n, shape in SWAPPED.items() if n >= min(2 * mean, SWAPPED_ROWS))


def tile_bound(shape: Shape, rows: int, experts: int, features: int) -> int:
    """Most tiles that ``rows`` rows of ``experts`` experts can make: experts each begin a tile of tokens."""
    return (rows // shape.tokens + min(experts, rows)) * -(-features // shape.features)


def group_count(shape: Shape, rows: int, experts: int, features: int, sm_count: int = SM_COUNT) -> int:
    """CTAs (or pairs) to launch: one on every SM, or as many as there may be tiles."""
    return max(1, min(sm_count // shape.ctas, tile_bound(shape, rows, experts, features)))
