"""Split KV: how many parts the keys are cut into, which KV tiles a part has, who combines what. Plain Python.

``choose_splits`` compares split counts by a model of the clocks that the launch and its combine launch take.
Its constants are counted from the instruction set and data sheets, or assumed; none was measured:

- A CTA takes SETUP_CLOCKS, then per KV tile what the busiest unit of the SM needs for it: the tensor core,
  the exponential unit, or filling shared memory. CTAs on one SM, up to ``ctas_per_sm``, share those units: a tile
  of one takes as many times as long as there are.
- CTAs run in waves of ``sm_count * ctas_per_sm``, each as long as its longest CTA.
- With more than one split, every row's o is written in fp32 once a split and read again by the combine
  launch, at FILL_BYTES by all SMs; reading takes at least LOAD_CLOCKS a round of loads that a thread makes.
  COMBINE_CLOCKS come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from warpspec.fmha.problem import HEAD_DIMS

SM_COUNT = 148  # of a B200: what ``num_splits=None`` assumes where there is no device to ask

MMA_FLOPS = 8192  # bf16, a clock and SM, 128 rows
MMA_FULL_ROWS = 128  # with 64 rows the tensor core runs at half the rate
EXPONENTIALS = 16  # a clock and SM
FILL_BYTES = 32  # a clock and SM, all SMs loading: 8 TB/s over 148 SMs at 1.9 GHz is 28
ELEMENT_BYTES = 2
FP32_BYTES = 4

SETUP_CLOCKS = 4000  # assumed: barriers, TMEM, the first loads' latency, the last PV, the epilogue
COMBINE_CLOCKS = 4000  # assumed: 2 microseconds from one launch's end to the next one's first loads
LOAD_CLOCKS = 800  # assumed: a round of loads from L2, all SMs loading

# The combine kernel.
WARP_THREADS = 32
THREADS = 256
VECTOR = 4  # fp32 columns of a thread: one 16-byte load a split
CHUNK = WARP_THREADS * VECTOR  # most columns of D that one group of threads covers
BATCH = 4  # splits a thread loads at a time: enough loads under way, few repeated where there are few splits


@dataclass(frozen=True)
class CombineConfig:
    """Compile-time shape of one combine kernel (combine_splits.py).

    A group of ``lanes`` threads holds ``chunk`` columns of one row, VECTOR to a thread; ``ways`` groups
    share the splits of it (way w takes w, w + ways, ...) and add up through shared memory. normalize: o is
    divided and the sink applied; otherwise o, row_max and row_sum are an un-normalised state.
    """

    head_dim: int
    ways: int = 1
    normalize: bool = True
    has_sink: bool = False
    has_lse: bool = False

    def __post_init__(self):
        assert self.head_dim in HEAD_DIMS
        assert self.ways in (1, 2, 4, 8, 16) and self.ways <= self.groups
        assert self.normalize or not (self.has_sink or self.has_lse)

    @classmethod
    def of(cls, head_dim: int, num_splits: int, **options) -> CombineConfig:
        """The configuration for so many splits; options: the other fields."""
        config, ways = cls(head_dim, **options), 1
        # A split more than a batch is a second round of loads: better another group's first.
        while ways * BATCH < num_splits and ways < config.groups:
            ways *= 2
        return replace(config, ways=ways)

    @property
    def chunk(self) -> int:
        """Columns of D of one group."""
        return min(self.head_dim, CHUNK)

    @property
    def chunks(self) -> int:
        """Groups of columns in a row."""
        return self.head_dim // self.chunk

    @property
    def lanes(self) -> int:
        """Threads of a group, part of one warp."""
        return self.chunk // VECTOR

    @property
    def groups(self) -> int:
        """Groups of a CTA."""
        return THREADS // self.lanes

    @property
    def parts(self) -> int:
        """(row, chunk) pairs of a CTA."""
        return self.groups // self.ways

    @property
    def smem_bytes(self) -> int:
        """Shared memory: partial sums of o and of the row sum, where groups share a row."""
        return THREADS * (VECTOR + 1) * FP32_BYTES if self.ways > 1 else 0


@lru_cache(maxsize=4096)
def choose_splits(
    *,
    m_tiles: int,
    kv_tiles: int,
    rows: int,
    head_dim: int,
    tile_m: int,
    tile_n: int,
    shared_kv: bool = False,
    sm_count: int = SM_COUNT,
    ctas_per_sm: int = 1,
) -> int:
    """Number of splits with the fewest clocks by the model above; the fewest splits among equals.

    m_tiles: CTAs without splits. kv_tiles: KV tiles of the M tile that visits most (``visited_tiles``). rows:
    B * Sq * Hq. tile_m, tile_n: rows and keys of a tile. shared_kv: K and V are one tile. Never more than
    kv_tiles; 1 where the M tiles fill the device. No split has no tile of the longest M tile.
    """
    slots = sm_count * ctas_per_sm
    if m_tiles >= slots or kv_tiles <= 1:
        return 1
    alone = tile_clocks(head_dim, tile_m, tile_n, shared_kv)

    def clocks(splits):
        waves = -(-m_tiles * splits // slots)
        tile = alone * min(ctas_per_sm, -(-m_tiles * splits // sm_count))
        attention = waves * (SETUP_CLOCKS + -(-kv_tiles // splits) * tile)
        return attention + combine_clocks(splits, rows, head_dim, sm_count)

    # Of the counts that give the longest part the same number of tiles, only the fewest splits.
    parts = {-(-kv_tiles // splits) for splits in range(1, min(kv_tiles, 2 * slots) + 1)}
    return min(sorted(-(-kv_tiles // part) for part in parts), key=clocks)


def tile_clocks(head_dim: int, tile_m: int, tile_n: int, shared_kv: bool) -> float:
    """Clocks of the SM's busiest unit for one tile of tile_m rows by tile_n keys."""
    rate = MMA_FLOPS if tile_m >= MMA_FULL_ROWS else MMA_FLOPS // 2
    mma = 2 * 2 * tile_m * tile_n * head_dim / rate  # QK and PV
    exponentials = tile_m * tile_n / EXPONENTIALS
    fill = (1 if shared_kv else 2) * tile_n * head_dim * ELEMENT_BYTES / FILL_BYTES
    return max(mma, exponentials, fill)


def combine_clocks(splits: int, rows: int, head_dim: int, sm_count: int) -> float:
    """Clocks that splitting adds: partial o written and read once each, and the combine launch. 0 for one."""
    if splits == 1:
        return 0.0
    transfer = splits * rows * head_dim * FP32_BYTES / (sm_count * FILL_BYTES)
    rounds = -(-splits // (CombineConfig.of(head_dim, splits).ways * BATCH))
    return COMBINE_CLOCKS + transfer + max(transfer, rounds * LOAD_CLOCKS)


def visited_tiles(
    *, seq_k: int, queries: int, tile_n: int, left: int | None = None, right: int | None = None, causal=False
) -> int:
    """Most KV tiles that one M tile of ``queries`` queries visits, from shapes alone.

    left, right: the window; causal bounds the right side like a window of 0 (at key_stride 1, the only one
    with a window).
    """
    tiles = -(-seq_k // tile_n)
    right = min(right, 0) if causal and right is not None else 0 if causal else right
    if left is None or right is None:
        return tiles
    keys = left + queries + right  # an interval; it may begin at the last key of a tile
    return min(tiles, (keys + tile_n - 2) // tile_n + 1)


def split_part(split, splits, tiles):
    """(first, count): the part of ``tiles`` KV tiles that a split does. Parts are contiguous, differ by at
    most one tile, and cover all; with fewer tiles than splits, some are empty.

    Ints on the host, Int32 in a kernel (splits * tiles within int32).
    """
    first = split * tiles // splits
    return first, (split + 1) * tiles // splits - first
