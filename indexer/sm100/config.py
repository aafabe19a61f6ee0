"""What the scores kernel for sm_100a is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.cache.formats import INDEX_FORMATS, RowFormat
from warpspec.common.hardware import WARP_THREADS
from warpspec.common.pipeline import Barrier
from warpspec.indexer.scores_config import BEGIN_TILES, MAX_HEADS, MOST_PARTS, MXF4_HEADS_STEP

ATOM_COLUMNS = 4  # of tensor memory, of the scales of 128 rows


@dataclass(frozen=True)
class Mxf4Config:
    """The kernel for sm_100a, of FP4 keys as they lie: warps 0 to 3 are the epilogue, a thread a key; 4 to 7 load; 8
    issues the products. heads: of a query, columns of the product. page_size: of the pool. stages: tiles of keys."""

    heads: int
    page_size: int
    stages: int = 4

    tile_keys = 128  # M of tcgen05.mma
    loaders = 4  # warps
    first_loader = 4
    mma_warp = 8
    threads = 9 * WARP_THREADS
    accumulators = 2

    def __post_init__(self):
        assert self.heads % MXF4_HEADS_STEP == 0 and 0 < self.heads <= MAX_HEADS

    @property
    def fmt(self) -> RowFormat:
        return INDEX_FORMATS["mxfp4"]

    @property
    def key_bytes(self) -> int:
        """Of a tile's values."""
        return self.tile_keys * self.fmt.data_bytes

    @property
    def query_bytes(self) -> int:
        return self.heads * self.fmt.data_bytes

    # Tensor memory, in columns: accumulators, the keys' scales, the query's.

    @property
    def tmem_key_scales(self) -> int:
        return self.accumulators * self.heads

    @property
    def tmem_query_scales(self) -> int:
        return self.tmem_key_scales + ATOM_COLUMNS

    @property
    def tmem_columns(self) -> int:
        return self.tmem_query_scales + ATOM_COLUMNS

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        commit, epilogue = "MMA warp, tcgen05.commit", "epilogue, every thread"
        rows, tiles = self.tile_keys, self.accumulators
        return (
            Barrier(
                "full",
                self.stages,
                self.loaders,
                "loaders, one thread a warp",
                "MMA warp",
                "the keys are there",
            ),
            Barrier("empty", self.stages, 1, commit, "loaders", "the product has read the keys"),
            Barrier("sum_full", tiles, 1, commit, "epilogue", "the accumulator is complete"),
            Barrier("sum_empty", tiles, rows, epilogue, "MMA warp", "it has been read"),
        )

    def choose_parts(self, queries: int, columns: int, sm_count: int) -> int:
        """CTAs of a query: rounds over the SMs, each of a begin and the tiles of a part."""
        tiles = -(-columns // self.tile_keys)

        def time(parts):
            return -(-queries * parts // sm_count) * (BEGIN_TILES + -(-tiles // parts))

        return min(range(1, min(MOST_PARTS, tiles) + 1), key=time)
