"""Configuration of the projection kernels: tiles, budgets, barriers. Plain Python.

A stage holds 128 bytes along K of each operand, one span of the swizzle. These are 64 bf16 numbers, or the 128 e4m3
numbers that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from warpspec.common import memory
from warpspec.common.barriers import MBARRIER_BYTES, Barrier
from warpspec.common.hardware import (
    MAX_SMEM_PER_CTA,
    REGISTERS_PER_SM,
    TMEM_COLUMNS,
    WARP_THREADS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
)
from warpspec.common.memory import TMEM_ADDRESS, Region, barrier_region, smem_bytes, tile_region

PRODUCER_REGISTERS = 40
CONTROL_BYTES = memory.TILE_ALIGNMENT  # bytes for the mbarriers, and on sm_100a for the TMEM address
BARRIERS = CONTROL_BYTES // MBARRIER_BYTES - 1  # number of mbarriers that fit, beside the address
MOST_STAGES = 8
COLUMN_TILES = (64, 128, 256)  # tile_n, the N of a tile
MOST_FLOAT8_COLUMNS = 128  # most columns of a tile in FP8: one scale for all of them
ACCUMULATORS = 2


@dataclass(frozen=True)
class ProjectionConfig:
    """Configuration that the kernels of both architectures share.

    float8: FP8 operands, otherwise bf16. tile_n: columns of a tile. row_boxes: TMA boxes that load a tile's tokens.
    """

    float8: bool
    tile_n: int
    row_boxes: int = 1
    most_boxes: ClassVar[int] = 1

    def __post_init__(self):
        assert self.tile_n in COLUMN_TILES
        assert 1 <= self.row_boxes <= self.most_boxes
        assert not self.float8 or self.tile_n <= MOST_FLOAT8_COLUMNS
        assert self.smem_bytes <= MAX_SMEM_PER_CTA and self.stages >= 3

    @property
    def box_rows(self) -> int:
        """Tokens of a box."""
        raise NotImplementedError

    @property
    def tile_m(self) -> int:
        """Tokens of a tile."""
        return self.row_boxes * self.box_rows

    @property
    def stage_depth(self) -> int:
        """Numbers along K of a stage."""
        return memory.ROW_BYTES if self.float8 else memory.ROW_BYTES // 2

    @property
    def a_bytes(self) -> int:
        """Bytes of one box of a stage of A."""
        return self.box_rows * memory.ROW_BYTES

    @property
    def b_bytes(self) -> int:
        return self.tile_n * memory.ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.row_boxes * self.a_bytes + self.b_bytes

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, (MAX_SMEM_PER_CTA - CONTROL_BYTES) // self.stage_bytes)

    @property
    def smem_regions(self) -> tuple[Region, ...]:
        """Shared memory, in order."""
        stages, boxes, depth = self.stages, self.row_boxes, self.stage_depth
        return (
            *self.control_regions,
            tile_region(
                "a", stages * boxes * self.a_bytes, "A", f"{stages} x {boxes} x [{self.box_rows}, {depth}]"
            ),
            tile_region("b", stages * self.b_bytes, "B", f"{stages} x [{self.tile_n}, {depth}]"),
        )

    @property
    def control_regions(self) -> tuple[Region, ...]:
        """The regions in front of the stages."""
        return (barrier_region(self.barriers, BARRIERS),)

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.smem_regions)


@dataclass(frozen=True)
class Sm90Config(ProjectionConfig):
    """The kernel for sm_90a: one consumer warpgroup for each box of 64 tokens, and the load warp's warpgroup."""

    most_boxes: ClassVar[int] = 2

    def __post_init__(self):
        super().__post_init__()
        registers = self.consumers * self.consumer_registers + PRODUCER_REGISTERS
        assert registers * WARPGROUP_THREADS <= REGISTERS_PER_SM

    @property
    def consumers(self) -> int:
        return self.row_boxes

    @property
    def box_rows(self) -> int:
        return WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def consumer_registers(self) -> int:
        return 232

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        warps = self.consumers * WARPGROUP_THREADS // WARP_THREADS
        filled, warp = "load warp, expect_tx + TMA bytes", "consumers, one thread a warp"
        return (
            Barrier("full", self.stages, 1, filled, "consumers", "the stage is in shared memory"),
            Barrier("empty", self.stages, warps, warp, "load warp", "products have read the stage"),
        )


@dataclass(frozen=True)
class Sm100Config(memory.TensorMemoryWarps, ProjectionConfig):
    """The kernel for sm_100a: warps 0 to 3 are the epilogue, one thread a token; warp 4 issues products, warp 5
    loads."""

    def __post_init__(self):
        super().__post_init__()
        assert self.tmem_columns <= TMEM_COLUMNS

    @property
    def control_regions(self) -> tuple[Region, ...]:
        return (*super().control_regions, TMEM_ADDRESS)

    @property
    def box_rows(self) -> int:
        return memory.TMEM_LANES

    @property
    def epilogue_threads(self) -> int:
        return memory.TMEM_LANES

    @property
    def threads(self) -> int:
        return 6 * WARP_THREADS

    @property
    def tmem_columns(self) -> int:
        return memory.tmem_allocation(ACCUMULATORS * self.tile_n)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """An accumulator is used once for each tile; in FP8 once for each block of K."""
        commit, every = "MMA warp, tcgen05.commit", "epilogue, each of 128 threads"
        filled = "load warp, expect_tx + TMA bytes"
        return (
            Barrier("full", self.stages, 1, filled, "MMA warp", "the stage is in shared memory"),
            Barrier("empty", self.stages, 1, commit, "load warp", "products have read the stage"),
            Barrier("sum_full", ACCUMULATORS, 1, commit, "epilogue", "the accumulator is complete"),
            Barrier("sum_empty", ACCUMULATORS, self.epilogue_threads, every, "MMA warp", "it has been read"),
        )


def choose(
    kind: type[ProjectionConfig], float8: bool, tokens: int, groups: int, columns: int, sm_count: int
) -> ProjectionConfig:
    """The tiles with the least estimated time: waves of CTAs, each as long as its tile.

    A stage of a tile takes the longer of two times: that of its products (64 x 64 outputs a clock on H200, for 128
    bytes of K in either precision), and that of its bytes from L2 (about 40 a clock and SM). kind: the architecture's
    class of configurations.
    """
    best, least = None, None
    boxes = min(kind.most_boxes, -(-tokens // WARPGROUP_ROWS))
    for tile_n in COLUMN_TILES:
        if columns % tile_n or (float8 and tile_n > MOST_FLOAT8_COLUMNS):
            continue
        config = kind(float8, tile_n, boxes)
        tiles = -(-tokens // config.tile_m) * groups * (columns // tile_n)
        clocks = max(config.tile_m * tile_n / 32, config.stage_bytes / 40)
        time = -(-tiles // sm_count) * clocks
        if least is None or time < least:
            best, least = config, time
    return best
