"""What a configuration of the sm_90a kernel says of FP8 keys and values: who converts them, in which memory."""

from __future__ import annotations

from warpspec.common import memory
from warpspec.common.barriers import Barrier
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.features import KernelFeatures
from warpspec.fmha.sm90.shapes import COLUMN_ROWS

RAW_ALIGNMENT = 128  # bytes, of what TMA loads without a swizzle
STATISTICS = (
    3  # numbers of a row that go with a P tile, or with a warp's O: reference, maximum, factor or sum
)


class Float8Features(KernelFeatures):
    """Properties that follow from kv_format and from ``AttentionConfig``'s shape."""

    @property
    def converts(self) -> bool:
        """The last warpgroup converts K and V from FP8 (``convert``)."""
        return self.kv_format is not None and not self.by_warp

    @property
    def by_warp(self) -> bool:
        """Each warp of the consumer takes KV tiles of its own, and converts them in registers (``by_warp``)."""
        return self.shape.row_tiles > 0

    @property
    def p_dtype(self) -> str:
        """dtype of P and V in products. FP8 codes become fp16 by one instruction, and P has more digits so."""
        return "float16" if self.kv_format else self.dtype

    @property
    def qk_dtype(self) -> str:
        """dtype of Q and K in products: for FP8 keys fp16, as above; bf16 queries are scaled to fit (``narrow``)."""
        return self.p_dtype

    @property
    def narrows_q(self) -> bool:
        """Q comes in bf16 and is multiplied in fp16."""
        return self.qk_dtype != self.dtype

    @property
    def convert_warp(self) -> int:
        """First warp of that warpgroup."""
        return self.load_warp + WARPGROUP_THREADS // WARP_THREADS

    def load_ring(self, ring: str) -> str:
        """Name of the ring that TMA fills with a ring's tiles."""
        return f"raw_{ring}" if self.converts else ring

    @property
    def load_stages(self) -> int:
        """Stages of each of them."""
        return self.shape.raw_stages if self.converts else self.kv_stages

    def load_tile_bytes(self, ring: str) -> int:
        """Bytes that TMA loads of a tile of a ring's."""
        return self.float8_tile_bytes if self.converts else self.ring_tile_bytes(ring)

    @property
    def float8_tile_bytes(self) -> int:
        """A K or V tile in FP8."""
        return self.tile_n * self.head_dim if self.kv_format else 0

    @property
    def float8_bytes(self) -> int:
        """A ring of such tiles."""
        return self.shape.raw_stages * self.float8_tile_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of FP8 in one box."""
        return min(self.head_dim, memory.ROW_BYTES) if self.by_warp else self.head_dim

    @property
    def swizzled_kv(self) -> bool:
        """As in ``KernelFeatures``."""
        return not self.converts

    @property
    def float8_regions(self) -> tuple[memory.Region, ...]:
        """What a converter adds to ``smem_regions``."""
        if not self.converts:
            return ()
        size = len(self.rings) * self.float8_bytes
        holds = f"{self.shape.raw_stages} x [{self.tile_n}, {self.head_dim}] of each, as they are loaded"
        return (memory.Region("raw", size, "uint8", RAW_ALIGNMENT, "FP8", holds),)

    @property
    def merge_regions(self) -> tuple[memory.Region, ...]:
        """Where warps with KV tiles of their own put their states together."""
        if not self.by_warp:
            return ()
        warps, rows = WARPGROUP_THREADS // WARP_THREADS, self.shape.row_tiles * COLUMN_ROWS
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
        """fp32 numbers from one row of a warp's O to the next: eight more than there are, for the banks."""
        return self.heads.v + 8

    @property
    def conversion_barriers(self) -> tuple[Barrier, ...]:
        """mbarriers of K and V that are converted."""
        stages, raw_stages, warps = self.kv_stages, self.shape.raw_stages, WARPGROUP_THREADS // WARP_THREADS
        loaded, mine, warp = (
            "load warp, expect_tx + TMA bytes",
            "converter, one thread a warp",
            "consumers, one thread a warp",
        )
        readers = self.consumers * warps
        table = []
        for name in self.rings:
            tile = name.upper()
            table += [
                Barrier(
                    f"raw_{name}_full", raw_stages, 1, loaded, "converter", f"{tile} tile is here in FP8"
                ),
                Barrier(f"raw_{name}_empty", raw_stages, warps, mine, "load warp", "it is in 16 bits"),
                Barrier(f"{name}_full", stages, warps, mine, "consumers", f"{tile} tile is here in 16 bits"),
                Barrier(f"{name}_empty", stages, readers, warp, "converter", "the products have read it"),
            ]
        return tuple(table)

    @property
    def warp_barriers(self) -> tuple[Barrier, ...]:
        """mbarriers of K and V that single warps take."""
        loaded = "load warp, expect_tx + TMA bytes"
        reader = "the tile's consumer warp"
        table = []
        for name in self.rings:
            tile, stages = name.upper(), self.kv_stages
            table += [
                Barrier(f"{name}_full", stages, 1, loaded, reader, f"{tile} tile is in shared memory"),
                Barrier(
                    f"{name}_empty", stages, 1, reader, "load warp", f"the warp has read the {tile} tile"
                ),
            ]
        return tuple(table)
