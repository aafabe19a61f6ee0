"""What a scores kernel for sm_90a is compiled for; what all of them take. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpspec.common.hardware import MAX_SMEM_PER_CTA, WARP_THREADS, WARPGROUP_THREADS
from warpspec.common.nvfp4 import E2M1_VALUES
from warpspec.latent.cache.formats import INDEX_FORMATS, RowFormat

TILE_KEYS = 64  # M of wgmma
WARP_ROWS = 16  # of them a warp's
BLOCKS = 4  # of 32 numbers, of a row: one for each lane that shares it
HEADS_STEP = 8  # N of wgmma is a multiple of it
MAX_HEADS = 64
E4M3_SHIFT = 6  # e2m1's largest number times 2**6 is the largest that e4m3 has of that kind
SCALE_STEPS = 16  # powers of two that a row's blocks may be apart, exactly but for the last one
FORMATS = ("mxfp4", "fp8")
EVEN_CTAS = 0.94  # of the SMs are enough, where queries are then cut alike
MOST_PARTS = 256  # CTAs of a query
BEGIN_TILES = 4  # what a CTA's begin takes, in tiles of a warpgroup
COPIED_DEPTH = 4
COPIED_MOST_TILES = 12  # of a warpgroup, where copied FP8 keys are as fast as those in registers, or faster


@dataclass(frozen=True)
class ScoresConfig:
    """format: of keys and queries. heads: of a query. page_size: of the pool. warpgroups: of a CTA, each with tiles of
    its own. depth: tiles whose loads are under way. copied: keys are copied to shared memory, each warp its own
    (``sm90.ring``); else they are loaded to registers. balanced: warpgroups take equal shares of the tiles that have
    keys (``sm90.balanced``), of as many queries as a CTA has threads at most; else CTAs take turns at a query's."""

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
        """The way for a call, whose lengths nobody on the host knows: each may be short, so tiles are dealt by length,
        but for one query of FP4. FP8 keys of one query are copied where warpgroups have few tiles: that begins sooner,
        and takes longer for each tile. Scores are the same bits."""
        found = cls(format, heads, page_size)
        few = -(-columns // TILE_KEYS) <= COPIED_MOST_TILES * found.warpgroups * sm_count
        if format == "fp8" and queries == 1 and few and page_size % WARP_ROWS == 0:
            return replace(found, depth=COPIED_DEPTH, copied=True)
        balanced = queries <= found.threads and (queries > 1 or format == "fp8")
        return replace(found, balanced=balanced)

    @classmethod
    def streaming(cls, format: str, heads: int, page_size: int, warpgroups: int) -> ScoresConfig:
        """Where the same launch selects (``config.StreamConfig``): all warps do."""
        return cls(format, heads, page_size, warpgroups, depth=2 if format == "mxfp4" else 1)

    @property
    def fmt(self) -> RowFormat:
        return INDEX_FORMATS[self.format]

    @property
    def pages_by_lane(self) -> bool:
        """Whether a lane looks up the pages of 32 tiles at once (``keys.LanePages``); FP8 keys leave no registers for
        it, and are slower so."""
        return self.format == "mxfp4" and self.page_size % WARP_ROWS == 0

    @property
    def early(self) -> bool:
        """Whether a CTA's first keys are on their way before its query is prepared."""
        return self.format == "mxfp4" or self.copied

    @property
    def dependent(self) -> bool:
        """Whether the launch is a programmatic dependent one, which comes up while the one before ends."""
        return self.copied or self.balanced

    @property
    def least_ctas(self) -> int:
        """Of an SM, that ptxas is told of; 0: none, and the loop of FP8 keys in registers does not spill."""
        return 1 if self.copied else 0

    @property
    def lap(self) -> int:
        """Tiles of a warpgroup that the loop takes at once."""
        return 1 if self.copied else self.depth

    @property
    def stage_bytes(self) -> int:
        """Of a tile of every warpgroup, as lanes copy it: a lane's numbers of two keys and a scale, 0 without
        copies."""
        return self.threads * (2 * self.fmt.data_bytes // BLOCKS + self.fmt.scale_bytes) if self.copied else 0

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPGROUP_THREADS

    @property
    def warps(self) -> int:
        return self.threads // WARP_THREADS

    @property
    def score_threads(self) -> int:
        """All make scores."""
        return self.threads

    def choose_parts(self, queries: int, columns: int, sm_count: int) -> int:
        """CTAs of a query, for the least time by a count: an SM takes CTAs one after another, each some time to begin
        and then its tiles, ``lap`` of every warpgroup at a time. Balanced, CTAs of all queries: where these are equally
        long, none has a part of two."""
        tiles = -(-columns // TILE_KEYS)
        if self.balanced:
            most = min(sm_count, -(-queries * tiles // self.warpgroups))
            even = (c for c in range(most, int(EVEN_CTAS * most), -1) if c % queries == 0 or queries % c == 0)
            return next(even, most)

        def time(parts):
            turns = -(-tiles // (parts * self.warpgroups * self.lap))
            return -(-queries * parts // sm_count) * (BEGIN_TILES + turns * self.lap)

        choices = range(1, max(1, min(MOST_PARTS, tiles // self.warpgroups)) + 1)
        return min(choices, key=lambda parts: (time(parts), -parts if self.copied else parts))

    @property
    def smem_bytes(self) -> int:
        table, copies, plan = (SCALE_STEPS + 2) * 8, 1, 0
        if self.balanced:  # a query for each warpgroup, and ``balanced.Plan``
            copies, plan = self.warpgroups, (3 * self.threads + 1 + self.warpgroups + self.warps) * 4
        return copies * self.heads * (self.fmt.dim + 4) + table + plan + self.depth * self.stage_bytes


def e4m3_table() -> list[tuple[int, int]]:
    """Entry n: the eight e2m1 magnitudes times 2**(E4M3_SHIFT - n) as e4m3 codes, four to a word; the last is zeros."""
    numbers = [c % 8 * 2.0**-9 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)]
    entries = []
    for n in range(SCALE_STEPS):
        codes = []
        for value in E2M1_VALUES:
            x = value * 2.0 ** (E4M3_SHIFT - n)
            codes.append(min(range(127), key=lambda c: (abs(x - numbers[c]), c % 2)))
        entries.append(tuple(sum(c << 8 * i for i, c in enumerate(codes[at : at + 4])) for at in (0, 4)))
    return [*entries, (0, 0)]
