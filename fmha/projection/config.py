"""What a projection kernel is compiled for: tiles, budgets, barriers. Plain Python.

A stage is 128 bytes of K of both operands, one span of the swizzle, in either precision: 64 bf16 numbers or 128 of
e4m3, which is what a scale stands for.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common import tma
from warpspec.common.hardware import MAX_SMEM_PER_CTA, REGISTERS_PER_SM, WARP_THREADS, WARPGROUP_THREADS
from warpspec.common.pipeline import Barrier
from warpspec.common.wgmma import WARPGROUP_ROWS

PRODUCER_REGISTERS = 40
BARRIER_BYTES = 1024
MOST_STAGES = 8
COLUMN_TILES = (64, 128, 256)  # N of a tile


@dataclass(frozen=True)
class ProjectionConfig:
    """The kernel for sm_90a. float8: in FP8, else bf16. consumers: warpgroups of 64 tokens each. tile_n: columns."""

    float8: bool
    consumers: int
    tile_n: int

    def __post_init__(self):
        assert self.consumers in (1, 2) and self.tile_n in COLUMN_TILES
        assert not self.float8 or self.tile_n <= 128, "a column tile has one scale"
        assert self.smem_bytes <= MAX_SMEM_PER_CTA and self.stages >= 3
        registers = self.consumers * self.consumer_registers + PRODUCER_REGISTERS
        assert registers * WARPGROUP_THREADS <= REGISTERS_PER_SM

    @property
    def tile_m(self) -> int:
        """Tokens of a tile."""
        return self.consumers * WARPGROUP_ROWS

    @property
    def stage_depth(self) -> int:
        """Numbers of K of a stage."""
        return tma.ROW_BYTES if self.float8 else tma.ROW_BYTES // 2

    @property
    def a_bytes(self) -> int:
        """One consumer's rows of a stage."""
        return WARPGROUP_ROWS * tma.ROW_BYTES

    @property
    def b_bytes(self) -> int:
        return self.tile_n * tma.ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.consumers * self.a_bytes + self.b_bytes

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, (MAX_SMEM_PER_CTA - BARRIER_BYTES) // self.stage_bytes)

    @property
    def smem_bytes(self) -> int:
        return BARRIER_BYTES + self.stages * self.stage_bytes

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def consumer_registers(self) -> int:
        return 232

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        warps = self.consumers * WARPGROUP_THREADS // WARP_THREADS
        return (
            Barrier(
                "full",
                self.stages,
                1,
                "load warp, expect_tx + TMA bytes",
                "consumers",
                "the stage is in shared memory",
            ),
            Barrier(
                "empty",
                self.stages,
                warps,
                "consumers, one thread a warp",
                "load warp",
                "products have read it",
            ),
        )


def choose(float8: bool, tokens: int, groups: int, columns: int, sm_count: int) -> ProjectionConfig:
    """The tiles with the least time by a count: rounds of CTAs, each as long as its tile.

    A tile takes the longer of its products (4096 bf16 or 8192 FP8 operations a clock) and of its bytes' way from L2
    (about 40 a clock and SM), and some time before its first product where it is the CTA's first.
    """
    best, least = None, None
    consumers = 1 if tokens <= WARPGROUP_ROWS else 2
    for tile_n in COLUMN_TILES:
        if columns % tile_n or (float8 and tile_n > 128):
            continue
        config = ProjectionConfig(float8, consumers, tile_n)
        tiles = -(-tokens // config.tile_m) * groups * (columns // tile_n)
        clocks = max(2 * config.tile_m * tile_n * 64 / 4096, config.stage_bytes / 40)
        time = -(-tiles // sm_count) * clocks
        if least is None or time < least:
            best, least = config, time
    return best
