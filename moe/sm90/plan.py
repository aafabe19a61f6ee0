"""Which tiles, from shapes alone: how the rows fall on the experts only the device knows."""

from __future__ import annotations

from warpspec.moe.sm90.config import Shape

# Tokens of a tile: about twice as many as an expert has on average, so that few have more than one tile.
SHAPES = {
    8: Shape(1, 8, 4, 3),
    16: Shape(1, 16, 3, 3),
    32: Shape(2, 32, 3, 2),
    64: Shape(2, 64, 4, 1, 2),
}


def choose_shape(rows: int, experts: int) -> Shape:
    """Tiles for ``rows`` rows over ``experts`` experts."""
    wanted = min(2 * rows / experts, rows)
    return SHAPES[next((tokens for tokens in SHAPES if tokens >= wanted), max(SHAPES))]
