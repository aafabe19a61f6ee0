"""Shared memory and mbarriers of an sm_90a kernel whose warps take FP8 or NVFP4 tiles of their own (``by_warp``)."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common import memory
from warpspec.common.barriers import Barrier
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.fmha.conversion import CodeRings
from warpspec.fmha.sm90.shapes import COLUMN_ROWS

STATISTICS = 3  # numbers of a row stored with a P tile, or with a warp's O: reference, maximum, factor or sum


@dataclass(frozen=True)
class WarpMerge:
    """Shared memory in which warps that have their own KV tiles merge their states.

    warps: number of warps. row_tiles: query rows in units of COLUMN_ROWS; 0: there are no such warps. columns: columns
    of O. stages: row tiles for which there is room.
    """

    warps: int
    row_tiles: int
    columns: int
    stages: int = 1

    @property
    def row(self) -> int:
        """Stride in fp32 between rows of a warp's O: eight more than a row has, against bank conflicts."""
        return self.columns + 8

    @property
    def regions(self) -> tuple[memory.Region, ...]:
        """The regions that merging adds to ``smem_regions``."""
        if not self.row_tiles:
            return ()
        warps, stages = self.warps, self.stages
        return (
            memory.Region(
                "partial", stages * self.rows * self.row, "float32", VECTOR_BYTES, "O of each warp",
                f"{stages} x {warps} x [{COLUMN_ROWS}, {self.columns}], padded",
            ),
            memory.Region(
                "states", stages * self.rows * STATISTICS, "float32", VECTOR_BYTES, "",
                "of the rows of each warp",
            ),
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """Rows of all warps of a row tile."""
        return self.warps * COLUMN_ROWS

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """mbarriers of what the warps leave of a row tile."""
        all_, one = "consumers, one thread a warp", "the warp that merges"
        return (
            Barrier(
                "o_full", self.stages, self.warps, all_, one, "O and states of all warps are in shared memory"
            ),
            Barrier("o_empty", self.stages, 1, one, "consumers", "the warp that merges has read them"),
        )


def warp_barriers(codes: CodeRings, merge: WarpMerge) -> tuple[Barrier, ...]:
    """mbarriers of K and V that single warps take, and of the states that they merge."""
    reader, table = "the tile's consumer warp", [*merge.barriers]
    for name in codes.format.rings:
        tile, stages = name.upper(), codes.stages
        table += [
            Barrier(
                f"{name}_full",
                stages,
                codes.loaders,
                codes.loaded,
                reader,
                f"{tile} tile is in shared memory",
            ),
            Barrier(f"{name}_empty", stages, 1, reader, "load warp", f"the warp has read the {tile} tile"),
        ]
    return tuple(table)
