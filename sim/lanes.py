"""The lanes of a warp and sets of them: a set is an int whose bit i stands for lane i."""

from __future__ import annotations

from functools import lru_cache

WARP_SIZE = 32
FULL_MASK = 0xFFFFFFFF


@lru_cache(maxsize=4096)
def _lane_tuple(mask: int) -> tuple[int, ...]:
    return tuple(lane for lane in range(WARP_SIZE) if mask >> lane & 1)


def lanes(mask: int) -> list[int]:
    """The lane numbers in a mask, ascending."""
    return list(_lane_tuple(mask))
