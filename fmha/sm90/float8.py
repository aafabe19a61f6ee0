"""The part of an sm_90a configuration for FP8 and NVFP4 keys and values: who converts them, and where."""

from __future__ import annotations

from warpspec.common import memory
from warpspec.common.barriers import Barrier
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.conversion import ConversionFeatures
from warpspec.fmha.sm90.shapes import COLUMN_ROWS

STATISTICS = 3  # numbers of a row stored with a P tile, or with a warp's O: reference, maximum, factor or sum


class Float8Features(ConversionFeatures):
    """Properties that follow from kv_format and from ``AttentionConfig``'s shape."""

    @property
    def converts(self) -> bool:
        """Whether the last warpgroup converts K and V to 16 bits (``device.convert``)."""
        return self.format.kv_format is not None and not self.by_warp

    @property
    def by_warp(self) -> bool:
        """Whether each warp of the consumers takes its own KV tiles and converts them in registers (``by_warp``)."""
        return self.shape.row_tiles > 0

    @property
    def p_dtype(self) -> str:
        """dtype of P and V in products. Converting codes to fp16 takes fewer instructions, and P has more bits in
        it."""
        return "float16" if self.format.kv_format else self.format.dtype

    @property
    def qk_dtype(self) -> str:
        """dtype of Q and K in products: for codes fp16, as above; bf16 queries are scaled to fit (``narrow``)."""
        return self.p_dtype

    @property
    def narrows_q(self) -> bool:
        """Whether Q comes in bf16 and is multiplied in fp16."""
        return self.qk_dtype != self.format.dtype

    @property
    def convert_warp(self) -> int:
        """First warp of that warpgroup."""
        return self.load_warp + WARPGROUP_THREADS // WARP_THREADS

    @property
    def row_bytes(self) -> int:
        """As in ``ConversionFeatures``; codes that warps read themselves are swizzled."""
        return min(super().row_bytes, memory.ROW_BYTES) if self.by_warp else super().row_bytes

    @property
    def merge_regions(self) -> tuple[memory.Region, ...]:
        """Regions in which warps with KV tiles of their own merge their states."""
        if not self.by_warp:
            return ()
        warps, rows = self.consumer_warps, self.shape.row_tiles * COLUMN_ROWS
        return (
            memory.Region(
                "parts", warps * COLUMN_ROWS * self.merge_row, "float32", VECTOR_BYTES, "O of each warp",
                f"{warps} x [{COLUMN_ROWS}, {self.heads.v}], padded",
            ),
            memory.Region(
                "states", warps * rows * STATISTICS, "float32", VECTOR_BYTES, "", "of the rows of each warp"
            ),
        )  # fmt: skip

    @property
    def merge_row(self) -> int:
        """Stride in fp32 between rows of a warp's O: eight more than a row has, against bank conflicts."""
        return self.heads.v + 8

    @property
    def warp_barriers(self) -> tuple[Barrier, ...]:
        """mbarriers of K and V that single warps take."""
        loaded = self.loaded
        reader = "the tile's consumer warp"
        table = []
        for name in self.format.rings:
            tile, stages = name.upper(), self.kv_stages
            table += [
                Barrier(
                    f"{name}_full", stages, self.loaders, loaded, reader, f"{tile} tile is in shared memory"
                ),
                Barrier(
                    f"{name}_empty", stages, 1, reader, "load warp", f"the warp has read the {tile} tile"
                ),
            ]
        return tuple(table)
