"""What configurations of kernels whose load warp fills a ring with codes have in common. Plain Python."""

from __future__ import annotations

from typing import ClassVar

from warpspec.common import memory
from warpspec.common.hardware import (
    MAX_SMEM_PER_CTA,
    QUAD,
    SMEM_PER_SM,
    SMEM_RESERVED_PER_CTA,
    registers_at_launch,
)
from warpspec.latent.gathered.config import PAGE_ROWS, LineOfQueries

MOST_UNITS = 8  # a power of two, by which it is easy to divide


class RingOfCodes(LineOfQueries):
    """Base of configurations with keys as rows of the products and a ring of codes in shared memory.

    They have ``count`` rows a task, ``threads``, ``unit_bytes``, and ``regions_of``: the regions of shared memory with
    so many units of the ring.
    """

    prepares_divisors: ClassVar[bool] = True  # as in ``GatheredConfig``

    @property
    def tile_n(self) -> int:
        """Keys of a KV tile, which is a page."""
        return PAGE_ROWS

    @property
    def columns(self) -> int:
        """Number of columns of S^T, and of O^T, that a thread has; each is a row of the task."""
        return self.count // QUAD

    @property
    def register_pool(self) -> int:
        """Registers of a CTA."""
        return registers_at_launch(self.threads, 1) * self.threads

    @property
    def smem_regions(self) -> tuple[memory.Region, ...]:
        """Shared memory, in order."""
        return self.regions_of(self.units)

    @property
    def smem_bytes(self) -> int:
        return memory.smem_bytes(self.smem_regions)

    @property
    def smem_limit(self) -> int:
        """Bytes that a CTA may have."""
        return min(SMEM_PER_SM - SMEM_RESERVED_PER_CTA, MAX_SMEM_PER_CTA)

    @property
    def units(self) -> int:
        """Units of the ring: as many as there is room for."""
        taken = memory.smem_bytes(self.regions_of(MOST_UNITS)) - MOST_UNITS * self.unit_bytes
        return min((self.smem_limit - taken) // self.unit_bytes, MOST_UNITS)
