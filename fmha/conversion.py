"""The part of a configuration for K and V in FP8 or NVFP4 that become 16-bit tiles in shared memory: who converts them,
and through which rings. The same on every architecture; the role is ``device.convert``."""

from __future__ import annotations

from warpspec.common import memory
from warpspec.common.barriers import Barrier
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS

RAW_ALIGNMENT = 128  # bytes, for TMA loads without a swizzle
CONVERTER_WARPS = WARPGROUP_THREADS // WARP_THREADS


class ConversionFeatures:
    """Properties that follow from kv_format and from a configuration's ``shape``, whose raw_stages is the number of K
    tiles, and of V tiles, that are loaded ahead of their conversion. A configuration adds ``convert_warp``, the first
    of CONVERTER_WARPS."""

    @property
    def converts(self) -> bool:
        """Whether four warps convert K and V to 16 bits (``device.convert``)."""
        return self.format.kv_format is not None

    @property
    def p_dtype(self) -> str:
        """dtype of P, and of V in products: fp16 for codes, which it represents exactly, and in which P has three more
        bits."""
        return "float16" if self.format.kv_format and not self.format.shared_kv else self.format.dtype

    @property
    def qk_dtype(self) -> str:
        """dtype of Q and K in products."""
        return self.format.dtype

    def ring_dtype(self, ring: str) -> str:
        """dtype of a ring's 16-bit tiles."""
        return self.p_dtype if ring == "v" else self.qk_dtype

    def load_ring(self, ring: str) -> str:
        """Name of the ring that TMA fills with a ring's tiles."""
        return f"raw_{ring}" if self.converts else ring

    @property
    def load_stages(self) -> int:
        """Stages of each load ring."""
        return self.shape.raw_stages if self.converts else self.kv_stages

    def load_tile_bytes(self, ring: str) -> int:
        """Bytes that TMA loads for a tile of a ring."""
        return self.code_tile_bytes if self.converts else self.kv.bytes_of(ring)

    @property
    def code_tile_bytes(self) -> int:
        """Bytes of the codes of a K or V tile."""
        return self.tile_n * self.format.kv_row(self.heads.qk) if self.format.kv_format else 0

    @property
    def code_bytes(self) -> int:
        """Bytes of a ring of such tiles."""
        return self.shape.raw_stages * self.code_tile_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes in one box."""
        return self.format.kv_row(self.heads.qk)

    @property
    def row_blocks(self) -> int:
        """Block scales of a row, one byte each; 0 without."""
        return self.heads.qk // self.format.kv_block if self.format.kv_block else 0

    @property
    def scale_tile_bytes(self) -> int:
        """Bytes of the block scales of a K or V tile."""
        return self.tile_n * self.row_blocks

    @property
    def scale_bytes(self) -> int:
        """Bytes of a ring of block scales."""
        return self.load_stages * self.scale_tile_bytes

    @property
    def loaders(self) -> int:
        """Arrivals at the mbarrier of a stage that the load warp fills: TMA's, and each lane's for its copies of block
        scales."""
        return 1 + (WARP_THREADS if self.format.kv_block else 0)

    @property
    def loaded(self) -> str:
        """Names of these arrivals."""
        lanes = "; each lane, by its copies" if self.format.kv_block else ""
        return f"load warp, expect_tx + TMA bytes{lanes}"

    @property
    def code_regions(self) -> tuple[memory.Region, ...]:
        """Regions that the rings of codes to convert, and of block scales, add to ``smem_regions``."""
        regions = []
        if self.converts:
            size = len(self.format.rings) * self.code_bytes
            holds = f"{self.shape.raw_stages} x [{self.tile_n}, {self.row_bytes}] of each, as they are loaded"
            regions.append(memory.Region("raw", size, "uint8", RAW_ALIGNMENT, "codes", holds))
        if self.format.kv_block:
            size = len(self.format.rings) * self.scale_bytes
            holds = f"{self.load_stages} x [{self.tile_n}, {self.row_blocks}] of each"
            regions.append(memory.Region("scales", size, "uint8", VECTOR_BYTES, "block scales", holds))
        return tuple(regions)

    def conversion_barriers(
        self, readers: str, v_readers: str, released: str, releases: int
    ) -> tuple[Barrier, ...]:
        """mbarriers of K and V that are converted. readers, v_readers: who waits for 16-bit tiles of K, and of V or of
        the tensor that is both. released: who releases them, with so many arrivals."""
        stages, raw_stages = self.kv_stages, self.shape.raw_stages
        loaded, mine = self.loaded, "converter, one thread a warp"
        table = []
        for name in self.format.rings:
            tile = name.upper()
            table += [
                Barrier(
                    f"raw_{name}_full",
                    raw_stages,
                    self.loaders,
                    loaded,
                    "converter",
                    f"{tile} tile is here in codes",
                ),
                Barrier(
                    f"raw_{name}_empty", raw_stages, CONVERTER_WARPS, mine, "load warp", "it is in 16 bits"
                ),
                Barrier(
                    f"{name}_full",
                    stages,
                    CONVERTER_WARPS,
                    mine,
                    v_readers if name == self.format.v_ring else readers,
                    f"{tile} tile is here in 16 bits",
                ),
                Barrier(
                    f"{name}_empty", stages, releases, released, "converter", "the products have read it"
                ),
            ]
        return tuple(table)
