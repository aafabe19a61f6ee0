"""Sizes of shared-memory tiles and tensor-memory allocations, from which configurations compute their budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from warpspec.common.barriers import Barrier, barrier_count
from warpspec.common.hardware import TMEM_COLUMNS

# Shared memory: tiles that TMA loads and tensor cores read (``common.device.tma``).
ROW_BYTES = 128  # one row of a tile: the span of the 128-byte swizzle
TILE_ALIGNMENT = 1024  # bytes: the 128-byte swizzle repeats every 8 rows

# Tensor memory (``common.device.tmem``).
TMEM_LANES = 128
TMEM_COLUMN_BYTES = 4  # bytes of a column in one lane
MIN_TMEM_ALLOCATION = 32  # columns


class TensorMemoryWarps:
    """Roles by warp in kernels for sm_100a. Warps 0 to 3, a warpgroup, work on tensor memory: warp w reaches its lanes
    32 w to 32 w + 31."""

    mma_warp: ClassVar[int] = 4  # issues the MMAs
    load_warp: ClassVar[int] = 5  # issues the TMA loads


ELEMENT_BYTES = {"uint8": 1, "int32": 4, "uint32": 4, "float32": 4, "int64": 8}


@dataclass(frozen=True)
class Region:
    """One region of a CTA's shared memory. A configuration lists them in order; kernels allocate from that list
    (``common.device.storage``).

    name: the kernel's name for it. count: how many elements of type ``element``. alignment: alignment of its first
    byte; 0: the element's size. title, holds: its name in tables, and its contents.
    """

    name: str
    count: int
    element: str = "uint8"
    alignment: int = 0
    title: str = ""
    holds: str = ""

    @property
    def bytes(self) -> int:
        return self.count * ELEMENT_BYTES[self.element]

    def begin(self, end: int) -> int:
        """Offset of the first byte after another region that ends at ``end``."""
        alignment = self.alignment or ELEMENT_BYTES[self.element]
        return -(-end // alignment) * alignment


def tile_region(name: str, size: int, title: str, holds: str) -> Region:
    """A region of ``size`` bytes for tiles that TMA loads or tensor cores read."""
    return Region(name, size, "uint8", TILE_ALIGNMENT, title, f"{holds}, 128-byte swizzle")


TMEM_ADDRESS = Region("tmem_address", 1, "int32", 0, "TMEM address", "where the allocation begins")


def barrier_region(table: tuple[Barrier, ...], room: int | None = None) -> Region:
    """The region of a barrier table's mbarriers. room: mbarriers that it has room for; None: as many as there are."""
    count = barrier_count(table)
    assert room is None or count <= room
    return Region("barriers", count if room is None else room, "int64", 0, "", f"{count} mbarriers")


def smem_bytes(regions: tuple[Region, ...]) -> int:
    """Bytes of shared memory from the first region to the end of the last that is not empty."""
    end = 0
    for region in regions:
        if region.count:
            end = region.begin(end) + region.bytes
    return end


def budget_rows(regions: tuple[Region, ...]) -> list[tuple[str, int, str]]:
    """(region, bytes, what stands in it) of the regions that are not empty, and what aligning them takes."""
    rows = [(each.title or each.name, each.bytes, each.holds) for each in regions if each.count]
    padding = smem_bytes(regions) - sum(size for _, size, _ in rows)
    return [*rows, ("padding", padding, "in front of aligned regions")] if padding else rows


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
