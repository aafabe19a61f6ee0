"""Shared memory as configurations list it: sizes, alignment, tables."""

import pytest

from warpspec.common.barriers import Barrier
from warpspec.common.memory import TMEM_ADDRESS, Region, barrier_region, budget_rows, smem_bytes, tile_region

TABLE = (
    Barrier("full", 3, 1, "load warp", "MMA warp", ""),
    Barrier("empty", 3, 1, "MMA warp", "load warp", ""),
)


def test_regions_are_counted_with_their_alignment():
    regions = (
        barrier_region(TABLE),
        TMEM_ADDRESS,
        tile_region("q", 2048, "Q", "[16, 64]"),
        Region("absent", 0, "float32", 1024),
        Region("sums", 3, "float32", 16, "", "of rows"),
    )
    assert [each.bytes for each in regions] == [48, 4, 2048, 0, 12]
    assert smem_bytes(regions) == 1024 + 2048 + 12
    assert budget_rows(regions) == [
        ("barriers", 48, "6 mbarriers"),
        ("TMEM address", 4, "where the allocation begins"),
        ("Q", 2048, "[16, 64], 128-byte swizzle"),
        ("sums", 12, "of rows"),
        ("padding", 972, "in front of aligned regions"),
    ]


def test_a_table_has_room():
    assert barrier_region(TABLE, 64).bytes == 512
    with pytest.raises(AssertionError):
        barrier_region(TABLE, 5)
