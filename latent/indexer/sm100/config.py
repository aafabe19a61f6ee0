"""Configuration of the scores kernels for sm_100a."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common.barriers import Barrier
from warpspec.common.hardware import (
    MAX_SMEM_PER_CTA,
    TMEM_COLUMNS,
    VECTOR_BYTES,
    WARP_THREADS,
    WARPGROUP_THREADS,
)
from warpspec.common.memory import TMEM_ADDRESS, Region, barrier_region, smem_bytes, tile_region
from warpspec.latent.cache.formats import INDEX_FORMATS, RowFormat
from warpspec.latent.indexer.scores_config import BEGIN_TILES, FORMATS, MAX_HEADS, MOST_SPLITS

COLUMNS_STEP = 16  # N of tcgen05.mma is a multiple of this if M is 128
ATOM_COLUMNS = 4  # columns of tensor memory that the scales of 128 rows take
ATOM_BYTES = 512  # bytes of shared memory that they take
ATOM_ALIGNMENT = 128
PRODUCT_BYTES = 32  # bytes of a row that one product takes along K, in every format
SPARE_ACCUMULATORS = 1  # accumulators beside one for each warpgroup, where the launch also selects
SCORE_BARRIER = 1  # named barrier of the threads that score


@dataclass(frozen=True)
class Sm100ScoresConfig:
    """Configuration of the scores kernel for sm_100a.

    Keys go to the tensor core as they are stored: FP4 with its scales, or e4m3. The first ``warpgroups`` warpgroups
    compute scores: they take tiles in turn, and each thread has one key of a tile. Four warps load, and one issues the
    products.

    format: format of keys and queries. heads: heads of a query. page_size: rows of the pool's pages. stages: tiles of
    keys in shared memory. accumulators: accumulators in tensor memory.
    """

    format: str
    heads: int
    page_size: int
    warpgroups: int = 1
    accumulators: int = 2
    stages: int = 4

    tile_keys = 128  # M of tcgen05.mma
    loaders = 4  # warps
    least_ctas, dependent, balanced = 0, False, False  # as in ``ScoresConfig``

    def __post_init__(self):
        assert self.format in FORMATS and 0 < self.heads <= MAX_HEADS
        assert self.tmem_columns <= TMEM_COLUMNS and self.smem_bytes <= MAX_SMEM_PER_CTA

    @classmethod
    def of(
        cls, format: str, heads: int, page_size: int, queries: int, columns: int, sm_count: int
    ) -> Sm100ScoresConfig:
        """The configuration for a call; the same for all sizes."""
        return cls(format, heads, page_size)

    @classmethod
    def streaming(cls, format: str, heads: int, page_size: int, warpgroups: int) -> Sm100ScoresConfig:
        """The configuration for a launch that also selects (``config.StreamConfig``)."""
        return cls(format, heads, page_size, warpgroups, warpgroups + SPARE_ACCUMULATORS)

    @property
    def fmt(self) -> RowFormat:
        return INDEX_FORMATS[self.format]

    @property
    def scaled(self) -> bool:
        """Whether the tensor core applies block scales; otherwise the threads that score multiply by the row's one
        scale."""
        return self.format == "mxfp4"

    # Warps.

    @property
    def score_threads(self) -> int:
        return self.warpgroups * WARPGROUP_THREADS

    @property
    def first_loader(self) -> int:
        return self.score_threads // WARP_THREADS

    @property
    def mma_warp(self) -> int:
        return self.first_loader + self.loaders

    @property
    def threads(self) -> int:
        return (self.mma_warp + 1) * WARP_THREADS

    @property
    def weights_in_registers(self) -> bool:
        """Whether a thread that scores keeps the heads' weights in registers; only where warps are few."""
        return self.warpgroups == 1

    # Rows in shared memory.

    @property
    def columns(self) -> int:
        """Columns of an accumulator: the heads, padded with zeros to an N that the product takes."""
        return -(-self.heads // COLUMNS_STEP) * COLUMNS_STEP

    @property
    def row_vectors(self) -> int:
        """16-byte vectors of a row, and so lanes that load it together."""
        return self.fmt.data_bytes // VECTOR_BYTES

    @property
    def products(self) -> int:
        """Products of a tile along K."""
        return self.fmt.data_bytes // PRODUCT_BYTES

    @property
    def key_bytes(self) -> int:
        """Bytes of a tile's values."""
        return self.tile_keys * self.fmt.data_bytes

    @property
    def query_bytes(self) -> int:
        return self.columns * self.fmt.data_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of block scales: those of each stage's keys and of the query."""
        return (self.stages + 1) * ATOM_BYTES if self.scaled else 0

    @property
    def smem_regions(self) -> tuple[Region, ...]:
        """Shared memory, in order."""
        tile = f"[{self.tile_keys}, {self.fmt.data_bytes} bytes]"
        return (
            barrier_region(self.barriers),
            TMEM_ADDRESS,
            Region("weights", self.columns, "float32", VECTOR_BYTES, "", "of the heads"),
            tile_region("keys", self.stages * self.key_bytes, "", f"{self.stages} x {tile}"),
            tile_region("query", self.query_bytes, "", f"[{self.columns}, {self.fmt.data_bytes} bytes]"),
            Region(
                "scales", self.scale_bytes, "uint8", ATOM_ALIGNMENT, "", "of each stage's keys, of the query"
            ),
        )

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.smem_regions)

    # Tensor memory, in columns: accumulators, the scales of each stage's keys, the query's scales.

    @property
    def tmem_key_scales(self) -> int:
        return self.accumulators * self.columns

    @property
    def tmem_query_scales(self) -> int:
        return self.tmem_key_scales + self.stages * ATOM_COLUMNS

    @property
    def tmem_columns(self) -> int:
        return self.tmem_key_scales + ((self.stages + 1) * ATOM_COLUMNS if self.scaled else 0)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        commit, scorers = "MMA warp, tcgen05.commit", "a warpgroup that scores, every thread"
        return (
            Barrier(
                "full",
                self.stages,
                self.loaders * WARP_THREADS,
                "loaders, every thread, when its copies are done",
                "MMA warp",
                "the keys are there",
            ),
            Barrier("empty", self.stages, 1, commit, "loaders", "the product has read the keys"),
            Barrier(
                "sum_full",
                self.accumulators,
                1,
                commit,
                "a warpgroup that scores",
                "the accumulator is complete",
            ),
            Barrier(
                "sum_empty", self.accumulators, WARPGROUP_THREADS, scorers, "MMA warp", "it has been read"
            ),
        )

    def choose_splits(self, queries: int, columns: int, sm_count: int) -> int:
        """CTAs of a query, for the least time: waves over the SMs, each one CTA start and the tiles of a split."""
        tiles = -(-columns // self.tile_keys)

        def time(splits):
            return -(-queries * splits // sm_count) * (BEGIN_TILES + -(-tiles // splits))

        return min(range(1, min(MOST_SPLITS, tiles) + 1), key=time)
