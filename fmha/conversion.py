"""Rings of K and V in FP8 or NVFP4, and of NVFP4's block scales, in shared memory: a part of a configuration. The role
that makes 16-bit tiles of them is ``device.convert``."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common import memory
from warpspec.common.barriers import Barrier
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.features import Format

RAW_ALIGNMENT = 128  # bytes, for TMA loads without a swizzle
CONVERTER_WARPS = WARPGROUP_THREADS // WARP_THREADS


@dataclass(frozen=True)
class CodeRings:
    """Tiles of codes as they are loaded.

    numbers: numbers of a row of K or V. keys: keys of a tile. stages: stages of each ring of block scales. raw_stages:
    stages of each ring of codes that are converted; 0: the rings of the products' operands hold the codes. row_span:
    most bytes of a row in one box; None: all.
    """

    format: Format
    numbers: int
    keys: int
    stages: int
    raw_stages: int = 0
    row_span: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes in one box."""
        size = self.format.kv_row(self.numbers)
        return size if self.row_span is None else min(size, self.row_span)

    @property
    def tile_bytes(self) -> int:
        """Bytes of the codes of a K or V tile."""
        return self.keys * self.format.kv_row(self.numbers) if self.format.kv_format else 0

    @property
    def ring_bytes(self) -> int:
        """Bytes of a ring of such tiles that are converted."""
        return self.raw_stages * self.tile_bytes

    @property
    def row_blocks(self) -> int:
        """Block scales of a row, one byte each; 0 without."""
        return self.numbers // self.format.kv_block if self.format.kv_block else 0

    @property
    def scale_tile_bytes(self) -> int:
        """Bytes of the block scales of a K or V tile."""
        return self.keys * self.row_blocks

    @property
    def scale_ring_bytes(self) -> int:
        """Bytes of a ring of block scales."""
        return self.stages * self.scale_tile_bytes

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
    def regions(self) -> tuple[memory.Region, ...]:
        """The regions that the rings of codes to convert, and of block scales, add to ``smem_regions``."""
        regions, rings = [], len(self.format.rings)
        if self.raw_stages:
            holds = f"{self.raw_stages} x [{self.keys}, {self.row_bytes}] of each, as they are loaded"
            size = rings * self.ring_bytes
            regions.append(memory.Region("raw", size, "uint8", RAW_ALIGNMENT, "codes", holds))
        if self.format.kv_block:
            holds = f"{self.stages} x [{self.keys}, {self.row_blocks}] of each"
            size = rings * self.scale_ring_bytes
            regions.append(memory.Region("scales", size, "uint8", VECTOR_BYTES, "block scales", holds))
        return tuple(regions)

    def barriers(
        self, stages: int, readers: str, v_readers: str, released: str, releases: int
    ) -> tuple[Barrier, ...]:
        """mbarriers of K and V that are converted to 16-bit tiles, in rings of this many stages. readers, v_readers:
        who waits for tiles of K, and of V or of the tensor that is both. released: who releases them, with this many
        arrivals."""
        loaded, mine, table = self.loaded, "converter, one thread a warp", []
        for name in self.format.rings:
            tile = name.upper()
            table += [
                Barrier(
                    f"raw_{name}_full",
                    self.raw_stages,
                    self.loaders,
                    loaded,
                    "converter",
                    f"{tile} tile is here in codes",
                ),
                Barrier(
                    f"raw_{name}_empty",
                    self.raw_stages,
                    CONVERTER_WARPS,
                    mine,
                    "load warp",
                    "it is in 16 bits",
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
