"""Configuration of the scores kernel for sm_90a, and constants of all scores kernels. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpspec.common.hardware import MAX_SMEM_PER_CTA, WARP_THREADS, WARPGROUP_THREADS
from warpspec.common.nvfp4 import E2M1_VALUES
from warpspec.latent.cache.formats import INDEX_FORMATS, RowFormat

TILE_KEYS = 64  # M of wgmma
WARP_ROWS = 16  # rows of a tile that a warp has
BLOCKS = 4  # blocks of 32 numbers in a row; each of the four lanes that share the row has one
HEADS_STEP = 8  # N of wgmma is a multiple of it
MAX_HEADS = 64
E4M3_SHIFT = 6  # e2m1's largest number times 2**6 is the largest such product that e4m3 can represent
SCALE_STEPS = 16  # steps of scale between a row's blocks that are exact, but for the last one
FORMATS = ("mxfp4", "fp8")
EVEN_CTAS = 0.94  # fraction of the SMs that is enough, if it lets queries be cut evenly
MOST_SPLITS = 256  # most CTAs of a query
BEGIN_TILES = 4  # time to start a CTA, in tiles of a warpgroup
COPIED_DEPTH = 4
COPIED_MOST_TILES = 12  # tiles a warpgroup up to which copied FP8 keys are no slower than keys in registers


@dataclass(frozen=True)
class ScoresConfig:
    """Configuration of the scores kernel for sm_90a.

    format: format of keys and queries. heads: heads of a query. page_size: rows of the pool's pages. warpgroups:
    warpgroups of a CTA, each with its own tiles. depth: tiles whose loads are in flight. copied: each warp copies its
    keys to shared memory (``sm90.ring``); otherwise they are loaded to registers. balanced: warpgroups take equal
    shares of the tiles that have keys (``sm90.balanced``), for at most as many queries as a CTA has threads; otherwise
    the CTAs of a query take its tiles in turn.
    """

    format: str
    heads: int
    page_size: int
    warpgroups: int = 4
    depth: int = 2
    copied: bool = False
    balanced: bool = False

    tile_keys = TILE_KEYS

    def __post_init__(self):
        assert self.format in FORMATS
        assert self.heads % HEADS_STEP == 0 and HEADS_STEP <= self.heads <= MAX_HEADS
        assert self.smem_bytes <= MAX_SMEM_PER_CTA
        if self.copied:
            assert not self.balanced
            assert self.format == "fp8" and self.page_size % WARP_ROWS == 0, "a warp's keys are of one page"
        assert self.threads >= self.heads * BLOCKS, "a thread prepares a block of a head"

    @classmethod
    def of(
        cls, format: str, heads: int, page_size: int, queries: int, columns: int, sm_count: int
    ) -> ScoresConfig:
        """The configuration for a call. All configurations give the same bits.

        The host does not know the lengths, and any of them may be short. Tiles are therefore dealt by length, except
        for a single query of FP4. FP8 keys of a single query are copied if warpgroups have few tiles: copying starts
        sooner but takes longer a tile.
        """
        found = cls(format, heads, page_size)
        few = -(-columns // TILE_KEYS) <= COPIED_MOST_TILES * found.warpgroups * sm_count
        if format == "fp8" and queries == 1 and few and page_size % WARP_ROWS == 0:
            return replace(found, depth=COPIED_DEPTH, copied=True)
        balanced = queries <= found.threads and (queries > 1 or format == "fp8")
        return replace(found, balanced=balanced)

    @classmethod
    def streaming(cls, format: str, heads: int, page_size: int, warpgroups: int) -> ScoresConfig:
        """The configuration for a launch that also selects (``config.StreamConfig``); all warps do both."""
        return cls(format, heads, page_size, warpgroups, depth=2 if format == "mxfp4" else 1)

    @property
    def fmt(self) -> RowFormat:
        return INDEX_FORMATS[self.format]

    @property
    def pages_by_lane(self) -> bool:
        """Whether a lane looks up the pages of 32 tiles at once (``keys.LanePages``). FP8 keys leave no registers for
        that and are slower with it."""
        return self.format == "mxfp4" and self.page_size % WARP_ROWS == 0

    @property
    def early(self) -> bool:
        """Whether a CTA's first keys are in flight before its query is prepared."""
        return self.format == "mxfp4" or self.copied

    @property
    def dependent(self) -> bool:
        """Whether this is a programmatic dependent launch, which starts while the previous kernel ends."""
        return self.copied or self.balanced

    @property
    def least_ctas(self) -> int:
        """CTAs an SM that ptxas is told of. 0 tells it nothing, so that the loop of FP8 keys in registers does not
        spill."""
        return 1 if self.copied else 0

    @property
    def lap(self) -> int:
        """Tiles of a warpgroup that one iteration of the loop takes."""
        return 1 if self.copied else self.depth

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage, 0 if keys are not copied.

        A stage holds one tile for every warpgroup: for each lane, its numbers of two keys and one scale.
        """
        return self.threads * (2 * self.fmt.data_bytes // BLOCKS + self.fmt.scale_bytes) if self.copied else 0

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPGROUP_THREADS

    @property
    def warps(self) -> int:
        return self.threads // WARP_THREADS

    @property
    def score_threads(self) -> int:
        """Threads that score: all of them."""
        return self.threads

    def choose_splits(self, queries: int, columns: int, sm_count: int) -> int:
        """CTAs of a query, or of all queries if balanced.

        Chosen for the least estimated time: an SM runs CTAs one after another, and each takes some time to start and
        then its tiles, ``lap`` of every warpgroup at a time. If balanced, no CTA has splits of two queries when all
        queries are equally long.
        """
        tiles = -(-columns // TILE_KEYS)
        if self.balanced:
            most = min(sm_count, -(-queries * tiles // self.warpgroups))
            even = (c for c in range(most, int(EVEN_CTAS * most), -1) if c % queries == 0 or queries % c == 0)
            return next(even, most)

        def time(splits):
            turns = -(-tiles // (splits * self.warpgroups * self.lap))
            return -(-queries * splits // sm_count) * (BEGIN_TILES + turns * self.lap)

        choices = range(1, max(1, min(MOST_SPLITS, tiles // self.warpgroups)) + 1)
        return min(choices, key=lambda splits: (time(splits), -splits if self.copied else splits))

    @property
    def smem_bytes(self) -> int:
        table, copies, plan = (SCALE_STEPS + 2) * 8, 1, 0
        if self.balanced:  # a query for each warpgroup, and ``balanced.DealtTiles``
            copies, plan = self.warpgroups, (3 * self.threads + 1 + self.warpgroups + self.warps) * 4
        return copies * self.heads * (self.fmt.dim + 4) + table + plan + self.depth * self.stage_bytes


def e4m3_table() -> list[tuple[int, int]]:
    """Entry n has the eight e2m1 magnitudes times 2**(E4M3_SHIFT - n) as e4m3 codes, four to a word; the last is
    zeros."""
    numbers = [c % 8 * 2.0**-9 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)]
    entries = []
    for n in range(SCALE_STEPS):
        codes = []
        for value in E2M1_VALUES:
            x = value * 2.0 ** (E4M3_SHIFT - n)
            codes.append(min(range(127), key=lambda c: (abs(x - numbers[c]), c % 2)))
        entries.append(tuple(sum(c << 8 * i for i, c in enumerate(codes[at : at + 4])) for at in (0, 4)))
    return [*entries, (0, 0)]
