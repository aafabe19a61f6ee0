"""What a configuration says of K and V that come in FP8 and become 16-bit tiles in shared memory: who converts them,
through which rings they come. The same on every architecture; the role is ``device.convert``."""

from __future__ import annotations

from warpspec.common import memory
from warpspec.common.barriers import Barrier
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS

RAW_ALIGNMENT = 128  # bytes, of what TMA loads without a swizzle
CONVERTER_WARPS = WARPGROUP_THREADS // WARP_THREADS


class ConversionFeatures:
    """Properties that follow from kv_format and from a configuration's ``shape``, whose raw_stages are the tiles of
    K, and of V, are loaded ahead of their conversion. ``convert_warp``, which a configuration adds, is the first of
    CONVERTER_WARPS."""

    @property
    def converts(self) -> bool:
        """Four warps convert K and V from FP8 (``device.convert``)."""
        return self.format.kv_format is not None

    @property
    def p_dtype(self) -> str:
        """dtype of P, and of V in products."""
        return self.format.dtype

    def load_ring(self, ring: str) -> str:
        """Name of the ring that TMA fills with a ring's tiles."""
        return f"raw_{ring}" if self.converts else ring

    @property
    def load_stages(self) -> int:
        """Stages of each of them."""
        return self.shape.raw_stages if self.converts else self.kv_stages

    def load_tile_bytes(self, ring: str) -> int:
        """Bytes that TMA loads of a tile of a ring's."""
        return self.float8_tile_bytes if self.converts else self.kv.bytes_of(ring)

    @property
    def float8_tile_bytes(self) -> int:
        """A K or V tile in FP8."""
        return self.tile_n * self.heads.qk if self.format.kv_format else 0

    @property
    def float8_bytes(self) -> int:
        """A ring of such tiles."""
        return self.shape.raw_stages * self.float8_tile_bytes

    @property
    def float8_regions(self) -> tuple[memory.Region, ...]:
        """What a converter adds to ``smem_regions``."""
        if not self.converts:
            return ()
        size = len(self.format.rings) * self.float8_bytes
        holds = f"{self.shape.raw_stages} x [{self.tile_n}, {self.heads.qk}] of each, as they are loaded"
        return (memory.Region("raw", size, "uint8", RAW_ALIGNMENT, "FP8", holds),)

    def conversion_barriers(
        self, readers: str, v_readers: str, released: str, releases: int
    ) -> tuple[Barrier, ...]:
        """mbarriers of K and V that are converted. readers, v_readers: who waits for 16-bit tiles of K, and of V or of
        what is both. released: who hands them back, by so many arrivals."""
        stages, raw_stages = self.kv_stages, self.shape.raw_stages
        loaded, mine = "load warp, expect_tx + TMA bytes", "converter, one thread a warp"
        table = []
        for name in self.format.rings:
            tile = name.upper()
            table += [
                Barrier(
                    f"raw_{name}_full", raw_stages, 1, loaded, "converter", f"{tile} tile is here in FP8"
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
