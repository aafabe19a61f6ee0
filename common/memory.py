"""Sizes of shared-memory tiles and tensor-memory allocations, from which configurations compute their budgets."""

from __future__ import annotations

from warpspec.common.hardware import TMEM_COLUMNS

# Shared memory: tiles that TMA loads and tensor cores read (``common.device.tma``).
ROW_BYTES = 128  # one row of a tile: the span of the 128-byte swizzle
TILE_ALIGNMENT = 1024  # bytes: the 128-byte swizzle repeats every 8 rows

# Tensor memory (``common.device.tmem``).
TMEM_LANES = 128
TMEM_COLUMN_BYTES = 4  # of one lane
MIN_TMEM_ALLOCATION = 32  # columns


def tile_bytes(box: tuple[int, ...]) -> int:
    """Bytes of a tile in shared memory, and of its load on an mbarrier: rows that are out of bounds count too."""
    rows = 1
    for extent in box[1:]:
        rows *= extent
    return rows * ROW_BYTES


def tmem_allocation(columns: int) -> int:
    """Columns to allocate for ``columns`` used: the next power of two, at least 32. ValueError above 512."""
    if not 0 < columns <= TMEM_COLUMNS:
        raise ValueError(f"tensor memory has {TMEM_COLUMNS} columns, asked for {columns}")
    return max(MIN_TMEM_ALLOCATION, 1 << (columns - 1).bit_length())
