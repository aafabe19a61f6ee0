"""What a gathered-attention kernel for sm_90a is compiled for. Plain Python.

The two consumers are those of ``fmha.sm90.pair``: 64 query heads of one query, half of O's columns each. The
producer's four warps gather rows by slot, convert them to bf16 and write them where TMA would have put them.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.cache.formats import LATENT_FORMATS, RowFormat
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.common.pipeline import Barrier
from warpspec.fmha.sm90.config import AttentionConfig
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS, Shape

MAX_KEY_SETS = 3
GATHERED_FORMATS = ("v4-fp8", "bf16")
MASK_BYTES = 4
GATHERED = Shape(2, 64, 2, 1, 200, 104, column_parts=2)


@dataclass(frozen=True)
class RowsConfig:
    """The kernel that brings rows together (``rows``). Fields as in ``GatheredConfig``."""

    format: str
    sets: int
    lengths: tuple[bool, ...]

    def __post_init__(self):
        assert self.format in GATHERED_FORMATS and 1 <= self.sets <= MAX_KEY_SETS == 3
        assert len(self.lengths) == self.sets

    @property
    def fmt(self) -> RowFormat:
        return LATENT_FORMATS[self.format]


@dataclass(frozen=True)
class GatheredConfig(AttentionConfig):
    """format: of all key sets' rows. sets: how many. lengths: which of them have lengths. rotate_back: of the result.
    depth: groups of eight keys that a producer warp has under way."""

    shape: Shape = GATHERED
    format: str = "v4-fp8"
    sets: int = 1
    lengths: tuple[bool, ...] = (True,)
    rotate_back: bool = False
    depth: int = 2

    def __post_init__(self):
        super().__post_init__()
        assert self.paired and self.head_dim == self.fmt.dim and self.format in GATHERED_FORMATS
        assert 1 <= self.sets <= MAX_KEY_SETS and len(self.lengths) == self.sets
        assert self.warps_of_part * self.keys_of_warp == self.tile_n
        assert self.keys_of_warp == WARP_THREADS, "a lane looks up a key"

    @classmethod
    def of(cls, **options) -> GatheredConfig:
        """The configuration with the fixed part filled in."""
        return cls(dtype="bfloat16", head_dim=512, shared_kv=True, pack=WARPGROUP_ROWS, **options)

    @property
    def fmt(self) -> RowFormat:
        return LATENT_FORMATS[self.format]

    @property
    def pieces(self) -> int:
        """A part of a tile is complete as a whole: all of a warp's columns of a key arrive together."""
        return self.parts

    @property
    def ends_in_tile(self) -> bool:
        """What no query sees was never written to shared memory: zeros stand there."""
        return False

    @property
    def kv_box(self) -> tuple[int, int, int]:
        raise AssertionError("keys are gathered, not loaded by TMA")

    # The producer's warps: half of them fill each part of the columns, each for its keys of the tile.

    @property
    def warps_of_part(self) -> int:
        return WARPGROUP_THREADS // WARP_THREADS // self.parts

    @property
    def keys_of_warp(self) -> int:
        return self.tile_n // self.warps_of_part

    @property
    def mask_words(self) -> int:
        """Words of the masks: a bit for each key of a tile that is there, of every stage."""
        return self.kv_stages * self.tile_n // (8 * MASK_BYTES)

    @property
    def smem_regions(self) -> tuple[tuple[str, int, str], ...]:
        masks = ("masks", self.mask_words * MASK_BYTES, "which keys of each KV tile are there")
        return (*super().smem_regions, masks)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """As paired consumers have them, but for who fills the tiles."""
        table = []
        for row in super().barriers:
            if row.name == "q_full":
                row = Barrier(
                    row.name,
                    row.stages,
                    1,
                    "first producer warp, expect_tx + TMA bytes",
                    row.consumer,
                    row.meaning,
                )
            elif row.name == "k_full":
                row = Barrier(
                    row.name,
                    row.stages,
                    self.warps_of_part,
                    "the part's producer warps, one thread each",
                    row.consumer,
                    "the part of the gathered keys is in shared memory, in bf16",
                )
            elif row.name == "k_empty":
                row = Barrier(
                    row.name, row.stages, row.arrivals, row.producer, "the part's producer warps", row.meaning
                )
            table.append(row)
        return tuple(table)
