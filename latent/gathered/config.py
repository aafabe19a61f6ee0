"""Configuration of the gathered-attention kernels. Plain Python.

Four producer warps gather rows by slot and put them, in bf16, where TMA would have put them. FP8 rows go through shared
memory and registers to be converted; bf16 rows are only copied. All other roles are those of the attention kernels of
D 512 whose K and V are one tensor. On sm_90a these are the two consumers of ``fmha.sm90.pair``, which share 64 query
heads of one query and each have half of O's columns; on sm_100a they are the roles of ``fmha.sm100``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from warpspec.common import memory
from warpspec.common.barriers import Barrier
from warpspec.common.hardware import BF16_BYTES, VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS, WORD_BYTES
from warpspec.common.memory import ROW_BYTES
from warpspec.common.operands import BFLOAT16, FLOAT16, FLOAT32, UINT32
from warpspec.fmha.config import Output, Schedule, TileScheduler
from warpspec.fmha.features import Format, Mask
from warpspec.fmha.heads import BLOCK, LATENT, MMA_K, HeadSizes
from warpspec.fmha.line import TILE_OVERHEAD
from warpspec.fmha.sm90.config import AttentionConfig
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS, Shape
from warpspec.fmha.sm100 import config as sm100
from warpspec.fmha.sm100.shapes import SHARED_SHAPES
from warpspec.latent.cache.formats import LATENT_FORMATS, RowFormat

MAX_KEY_SETS = 3
# Rows of codes alone, whose one scale is an operand (``latent.mla``).
E4M3_ROWS = RowFormat("e4m3", "latent", LATENT[0], LATENT[0], "e4m3")
GATHERED_FORMATS = {**LATENT_FORMATS, E4M3_ROWS.name: E4M3_ROWS}
PAGE_ROWS = 64  # rows of a page, and of a KV tile, where a page table tells where keys are
VALUE_DIM = LATENT[1]  # the first numbers of a row, of which O is made
ROPE_DIM = 64  # the last numbers of a row, which are rotated
MASK_BYTES = 4
SCALES_BYTES = 4  # bytes of the scales of a key's column group, one byte a block
TASK_STAGES = 2  # tasks whose rows' factors are in shared memory
CLUSTER = 2  # CTAs that may share the work on a query's keys
GATHERED = Shape(2, 64, 2, 1, 208, 88, column_groups=2)
RECORDS = 2  # tasks that are in shared memory
TASK_OVERHEAD = 3  # length of a task's start and end on the line, in KV tiles
LINE = TileScheduler(
    Schedule.LINE, has_warp=True, by_producer=True, record_count=RECORDS, in_step=True, adds_up=True
)


@dataclass(frozen=True)
class Gathers:
    """The options that gathering adds to a configuration.

    row_format: row format of all key sets. sets: number of key sets. lengths: for each set, whether it has lengths.
    rotate_back: rotate the result back. float8: store the result in FP8. paged: the slots of the only set are a page
    table of requests. Each request has the same number of neighbouring queries, which are the last of its tokens.
    has_kv_scale: all keys have one scale, which is an operand. has_q_scale: likewise Q, which is in e4m3. keys: keys of
    a KV tile. pack: heads of a task; with fewer than a task has rows, it has several queries of a request. cluster:
    CTAs that share the work on a query's keys, each for another of its head groups (``cluster``).
    """

    row_format: str = "v4-fp8"
    sets: int = 1
    lengths: tuple[bool, ...] = (True,)
    rotate_back: bool = False
    float8: bool = False
    paged: bool = False
    has_kv_scale: bool = False
    has_q_scale: bool = False
    keys: int = PAGE_ROWS
    pack: int = WARPGROUP_ROWS
    cluster: int = 1

    def __post_init__(self):
        assert WARPGROUP_ROWS % self.pack == 0 and (self.paged or self.pack == WARPGROUP_ROWS)
        assert 1 <= self.sets <= MAX_KEY_SETS == 3 and len(self.lengths) == self.sets
        assert self.warps_of_group * self.keys_of_warp * self.cluster == self.keys
        assert self.keys_of_warp * self.cluster == WARP_THREADS, "a lane looks up a key"
        assert self.cluster == 1 or (self.cluster == CLUSTER and self.fmt.scale_bytes > 0 and not self.paged)
        assert self.copies or self.fmt.tail * BF16_BYTES in (0, ROW_BYTES), "the tail fills a block"
        assert not self.paged or (self.sets == 1 and self.lengths[0] and self.keys == PAGE_ROWS)

    @property
    def fmt(self) -> RowFormat:
        return GATHERED_FORMATS[self.row_format]

    @property
    def heads(self) -> HeadSizes:
        """Head sizes of rows and results."""
        return HeadSizes(self.fmt.dim, VALUE_DIM)

    @property
    def copies(self) -> bool:
        """Whether rows are stored as the products take them, so that they are copied without passing registers."""
        return self.row_format == "bf16"

    # Half of the producer warps fill each column group; each of them fills its own keys of the tile.

    @property
    def kv_groups(self) -> int:
        """Number of a row's column groups; two producer warps fill each."""
        return 2

    @property
    def warps_of_group(self) -> int:
        return WARPGROUP_THREADS // WARP_THREADS // self.kv_groups

    @property
    def keys_of_warp(self) -> int:
        return self.keys // self.warps_of_group // self.cluster

    @property
    def group_blocks(self) -> int:
        """Blocks of 64 columns of a column group."""
        return self.heads.qk_blocks // self.kv_groups

    @property
    def group_bytes(self) -> int:
        """Bytes of a tile's column group in shared memory."""
        return self.group_blocks * self.keys * ROW_BYTES

    @property
    def tail_apart(self) -> bool:
        """Whether a row has a block behind both column groups, which holds its bf16 tail, or codes like the other
        blocks.

        The warps of the two groups take turns at loading it, and there is no room for raw keys ahead of a tile. Without
        such a block, the tail is the second group's last block.
        """
        return self.heads.qk_blocks > self.kv_groups * self.group_blocks

    @property
    def raw_vectors(self) -> int:
        """Number of 16-byte vectors that each of an FP8 key's four lanes copies before conversion.

        A lane copies one vector of every e4m3 block. For the group's last block it copies two if that block is bf16 in
        the second group.
        """
        return self.group_blocks + (0 if self.tail_apart else 1)

    @property
    def scale_words(self) -> int:
        """32-bit words of scales of a key's column group."""
        return self.fmt.scale_bytes // self.kv_groups // WORD_BYTES if self.tail_apart else 1

    @property
    def scales_of_group(self) -> int:
        """Bytes between the scales of a key's column groups."""
        return self.scale_words * WORD_BYTES if self.tail_apart else self.group_blocks

    @property
    def raw_bytes(self) -> int:
        """Bytes in which a producer warp keeps eight FP8 keys before conversion: vectors and a word of scales a
        lane."""
        if self.copies or self.tail_apart or self.cluster > 1:
            return 0
        return WARP_THREADS * (self.raw_vectors * VECTOR_BYTES + SCALES_BYTES)

    def mask_words(self, stages: int) -> int:
        """Words of the masks of ``stages`` stages. A mask has a bit for each key of a tile, 1 if the key is there."""
        return stages * self.keys // (8 * MASK_BYTES)

    def regions(self, stages: int) -> tuple[memory.Region, ...]:
        """Regions of shared memory that gathering needs behind attention's, with ``stages`` stages of KV tiles."""
        raw = "of each producer warp the next tile's first eight, as they are"
        size = WARPGROUP_THREADS // WARP_THREADS * self.raw_bytes
        return (
            memory.Region(
                "masks", self.mask_words(stages), "uint32", 0, "", "which keys of each KV tile are there"
            ),
            memory.Region("raw", size, "uint8", VECTOR_BYTES, "FP8 keys", raw),
        )


def gathered_barriers(
    table: tuple[Barrier, ...], groups: int, converts_q: bool = False
) -> tuple[Barrier, ...]:
    """An attention kernel's barriers, with the producers of K and V replaced by the gathering warps.

    groups: number of a tile's column groups that have their own mbarriers. converts_q: whether they convert Q, too.
    """
    producers = WARPGROUP_THREADS // WARP_THREADS
    queries = {"arrivals": 1, "producer": "first producer warp, expect_tx + TMA bytes"}
    if converts_q:
        queries = {"arrivals": producers, "producer": "producer warps, one thread each"}
    changed = {
        "tile_full": {"producer": "first producer warp", "consumer": "consumers and producer warps"},
        "tile_empty": {
            "arrivals": GATHERED.consumers * producers + producers,
            "producer": "consumers and producer warps, one thread a warp",
            "consumer": "first producer warp",
        },
        "q_full": queries,
        "k_full": {
            "arrivals": producers // groups,
            "producer": "the column group's producer warps, one thread each",
            "meaning": "the column group of the gathered keys is in shared memory, in bf16",
        },
        "k_empty": {"consumer": "the column group's producer warps"},
    }
    return tuple(replace(row, **changed.get(row.name, {})) for row in table)


def peers_barriers(table: tuple[Barrier, ...]) -> tuple[Barrier, ...]:
    """The barriers of a gathering kernel whose CTAs share the work on the keys."""
    (full,) = (row for row in table if row.name == "k_full")
    (empty,) = (row for row in table if row.name == "k_empty")
    mended = replace(full, producer=f"{full.producer}, expect_tx + bytes from the peer")
    own = {"name": "peer_empty", "producer": "the column group's consumer in the peer, one thread a warp"}
    return (*(mended if row is full else row for row in table), replace(empty, **own))


def gathered_records(
    *,
    has_sink: bool = False,
    has_lse: bool = False,
    normalize: bool = True,
    splits: bool = False,
    means: bool = False,
    **options,
) -> dict:
    """The records of a gathered kernel's configuration. options: fields of ``Gathers``."""
    gathers = Gathers(**options)
    assert normalize or not gathers.float8
    dtype, size = (UINT32, VALUE_DIM // WORD_BYTES) if gathers.float8 else (BFLOAT16, VALUE_DIM)
    if not normalize:
        dtype = FLOAT16 if means else FLOAT32
    return {
        "mask": Mask(sparse=True),
        "heads": gathers.heads,
        "format": Format(BFLOAT16, shared_kv=True),
        "output": Output(dtype, size, has_sink, has_lse, normalize, splits, means),
        "pack": gathers.pack,
        "gathers": gathers,
    }


class LineOfQueries:
    """Base of configurations whose CTAs may take chunks of the line of all queries' KV tiles (``device.line``)."""

    @property
    def tile_overhead(self) -> int:
        """As in ``AttentionKernel``."""
        return TILE_OVERHEAD

    @property
    def leaves_means(self) -> bool:
        """Whether pieces of a task leave means of codes, which fit fp16. States that a caller gets are sums in
        fp32."""
        return self.gathers.fmt is E4M3_ROWS and self.output.normalize

    @property
    def scales_means(self) -> bool:
        """As in ``sm90.AttentionConfig``."""
        return self.gathers.fmt is not E4M3_ROWS

    @property
    def line_source(self):
        """As in ``AttentionKernel``."""
        from warpspec.latent.gathered.task import QUERIES

        return QUERIES


@dataclass(frozen=True)
class GatheredConfig(LineOfQueries, AttentionConfig):
    """The kernel for sm_90a."""

    shape: Shape = GATHERED
    gathers: Gathers = Gathers()

    def __post_init__(self):
        super().__post_init__()
        assert self.paired and self.tile_n == self.gathers.keys

    @classmethod
    def of(cls, *, line: bool = False, ahead: bool = False, **options) -> GatheredConfig:
        """A configuration with the given options (``gathered_records``); all else is fixed. line: CTAs take chunks of
        the line of all queries' KV tiles (``device.line``), all head groups of a query in step. ahead: it is cut before
        the launch before has ended (``device.cut_ahead``)."""
        found = cls(**gathered_records(**options))
        if line:
            found = replace(found, scheduler=replace(LINE, cuts_ahead=ahead))
        return found

    @property
    def tile_overhead(self) -> int:
        """As in ``AttentionKernel``; of lists and e4m3 rows alike (docs/notebook/latent.md)."""
        return TASK_OVERHEAD if self.scheduler.adds_up else super().tile_overhead

    @property
    def subtiles(self) -> int:
        """Pieces in which a tile arrives: one for each column group, because a warp copies all columns of a group
        together."""
        return self.kv_groups

    def subtile_of(self, block: int, consumer: int) -> int:
        """The subtile that a block of columns arrives with, as in ``AttentionConfig``.

        The columns behind both groups come with the group that the tile's consumer does not release.
        """
        column_group = block * MMA_K // (self.group_blocks * BLOCK)
        return column_group if column_group < self.kv_groups else 1 - consumer

    prepares_divisors: ClassVar[bool] = False  # of tokens: they would take registers that are not there

    @property
    def clears_unseen(self) -> bool:
        """Whether rows of a task see different keys (``unseen``)."""
        return self.rows.queries > 1

    @property
    def barrier_groups(self) -> int:
        """Parts of a tile that have mbarriers of their own."""
        return self.kv_groups

    @property
    def pv_first(self) -> bool:
        """Whether rows are FP8: consumers wait for their tiles, and can do the PV product of the previous one
        meanwhile."""
        return not self.gathers.copies

    @property
    def qk_at_once(self) -> bool:
        """Whether rows are codes alone, and of one query: with several the kernel is slower that way
        (docs/notebook/latent.md)."""
        return self.gathers.fmt is E4M3_ROWS and not self.clears_unseen

    @property
    def p_dtype(self) -> str:
        """dtype of products: codes without scales of their own are converted to fp16, which takes a quarter of the
        instructions; queries are scaled to fit (``fmha.sm90.narrow``)."""
        return "float16" if self.gathers.fmt is E4M3_ROWS else super().p_dtype

    @property
    def smem_regions(self) -> tuple[memory.Region, ...]:
        factors = TASK_STAGES * WARPGROUP_ROWS if self.narrows_q else 0
        rows = memory.Region("factors", factors, "float32", 0, "", "of the scores of rows, of two tasks")
        return (*super().smem_regions, *self.gathers.regions(self.kv_stages), rows)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        found = gathered_barriers(super().barriers, self.barrier_groups)
        return peers_barriers(found) if self.gathers.cluster > 1 else found


@dataclass(frozen=True)
class Sm100GatheredConfig(sm100.AttentionConfig):
    """The kernel for sm_100a, one CTA a task.

    Warps 0 to 3 do softmax and epilogue, 4 to 7 gather keys, 8 issues products. Three more warps complete the MMA
    warp's warpgroup, whose registers go to softmax.
    """

    shape: object = SHARED_SHAPES[512][0]
    softmax_registers: int = 232
    producer_registers: int = 184
    other_registers: int = 88
    gathers: Gathers = Gathers()

    def __post_init__(self):
        super().__post_init__()
        assert self.tile_n == self.gathers.keys

    @classmethod
    def of(cls, **options) -> Sm100GatheredConfig:
        """A configuration with the given options (``gathered_records``); all else is fixed."""
        return cls(**gathered_records(**options))

    prepares_divisors: ClassVar[bool] = True

    @property
    def clears_unseen(self) -> bool:
        """Whether rows of a task see different keys (``unseen``)."""
        return self.rows.queries > 1

    @property
    def barrier_groups(self) -> int:
        return 1

    @property
    def smem_regions(self) -> tuple[memory.Region, ...]:
        return (*super().smem_regions, *self.gathers.regions(self.kv_stages))

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return gathered_barriers(super().barriers, self.barrier_groups, self.gathers.has_q_scale)

    @property
    def load_warp(self) -> int:
        """The first producer warp."""
        return 4

    @property
    def mma_warp(self) -> int:
        return 8

    @property
    def threads(self) -> int:
        return 3 * WARPGROUP_THREADS

    @property
    def role_registers(self) -> int:
        """Registers of a CTA after the roles have reallocated theirs."""
        per_lane = self.softmax_registers + self.producer_registers + self.other_registers
        return per_lane * WARPGROUP_THREADS
