"""Attention on sm_90a: tile shapes, warp roles, memory budgets, barrier table.

Plain Python, fixed at compile time. One ``AttentionConfig`` is one compiled kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

from warpspec.common import memory
from warpspec.common.barriers import Barrier
from warpspec.common.hardware import (
    FP32_BYTES,
    MAX_SMEM_PER_CTA,
    SMEM_PER_SM,
    SMEM_RESERVED_PER_CTA,
    WARP_THREADS,
    WARPGROUP_THREADS,
    registers_at_launch,
)
from warpspec.common.launch import Target
from warpspec.common.operands import BFLOAT16
from warpspec.fmha.config import AttentionKernel, Schedule, TileScheduler, check_call, common_fields
from warpspec.fmha.conversion import CodeRings
from warpspec.fmha.heads import BLOCK, MMA_K
from warpspec.fmha.line import (
    FEW_HEADS,
    FEW_MEANS,
    FEW_ROWS_OVERHEAD,
    PAIR_OVERHEAD,
    TILE_OVERHEAD,
)
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import sortable
from warpspec.fmha.sm90.barriers import WEIGHT_STAGES, barriers_of
from warpspec.fmha.sm90.calls import lengths_decide, reads_ranges, splits_as_means
from warpspec.fmha.sm90.float8 import STATISTICS, WarpMerge
from warpspec.fmha.sm90.regions import regions_of
from warpspec.fmha.sm90.shapes import (
    FLOAT8,
    TWO_CONSUMERS,
    WARPGROUP_ROWS,
    Shape,
    shapes_of,
)
from warpspec.fmha.tiles import ELEMENT_BYTES, KvTile, TileRows, choose_pack

# Named barriers in which consumers take turns at the tensor core: one each from here on.
FIRST_ORDER_BARRIER = 1
CLEAR_BARRIER = 5  # named barrier of all consumers, or two of one each, after rows of V have been cleared
SUMS_BARRIER = 7  # named barrier of paired consumers that add up their row sums
SCORED_BARRIER = 8  # named barriers of one paired consumer each: all its warps have read the tile's K
INSTRUCTION_REGISTERS = 30  # registers that ptxas needs for a wgmma besides those of its result


@dataclass(frozen=True)
class AttentionConfig(AttentionKernel):
    """Compile-time shape of one kernel. shape: its tiles."""

    scheduler: TileScheduler = TileScheduler(Schedule.PERSISTENT)
    shape: Shape = TWO_CONSUMERS

    def __post_init__(self):
        super().__post_init__()
        self._check_budgets()

    @functools.lru_cache(maxsize=1024)  # noqa: B019 (a planner makes the same few again and again)
    def _check_budgets(self) -> None:
        assert 1 <= self.rows.pack <= WARPGROUP_ROWS
        assert self.consumers % self.column_groups == 0
        assert self.smem_bytes <= self.smem_limit
        # So that a warp sees every use of a stage: it would mistake a phase for that of two uses before.
        if self.by_warp:
            assert self.kv_stages % self.consumer_warps == 0
        assert self.kv_stages % self.rows.kv_heads == 0, "a stage is of one consumer"
        if self.paired:
            assert self.consumers == 2 and self.kv_stages == 2 and self.tile_n <= BLOCK
            assert self.scheduler.adds_up == self.scheduler.cuts_tiles
        assert self.role_registers <= self.register_pool, "setmaxnreg would wait for ever"

    @classmethod
    def check(cls, problem: AttentionProblem, target: Target) -> None:
        """Raise UnsupportedProblem, naming what this kernel does not support on the target."""
        check_call("sm90", problem, tuple(FLOAT8))

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        target: Target,
        *,
        shape: Shape | None = None,
        splits: bool = False,
        schedule: Schedule = Schedule.PERSISTENT,
        pack: int | None = None,
    ):
        """The kernel for a problem. UnsupportedProblem names what this kernel does not support.

        shape: tiles; None: the first of ``shapes``. splits: the keys are split, and another kernel combines results.
        schedule: which CTA has which tiles, in which order. pack: heads of a KV group that share a tile; None: the best
        for the longest request.
        """
        cls.check(problem, target)
        shape = shape or shapes_of(problem)[0]
        has_warp = shape.column_groups == 1 or schedule is not Schedule.PERSISTENT or reads_ranges(problem)
        if shape.column_groups > 1 and has_warp:
            shape = shape.scheduling
        pack = pack or choose_pack(problem.group, problem.seq_q, shape.most_rows)
        tile_m = shape.groups // shape.kv_heads * shape.most_rows
        fields = common_fields(problem, rows_of_cta=tile_m, pack=pack, splits=splits)
        sorts = schedule is Schedule.QUEUE and (splits or sortable(problem))
        adds_up = schedule is Schedule.LINE and shape.column_groups > 1
        records = 2 if shape.row_tiles or adds_up else 1  # ``rereads``
        heads = problem.heads_kv * -(-problem.group // pack)
        query_tiles = -(-problem.seq_q // (tile_m // pack)) if adds_up else 1
        in_step = schedule is Schedule.LINE and shape.steps_together(heads * query_tiles, target.sm_count)
        scheduler = TileScheduler(
            schedule,
            has_warp=has_warp,
            record_count=records,
            sorts=sorts,
            in_step=in_step,
            queries_in_step=in_step and query_tiles > 1,
            adds_up=adds_up,
            cuts_ahead=adds_up and lengths_decide(problem),
        )
        if splits and shape.column_groups > 1 and splits_as_means(problem, pack):
            fields["output"] = fields["output"].as_means()
        return cls(**fields, scheduler=scheduler, shape=shape)

    @property
    def consumers(self) -> int:
        return self.shape.consumers

    @property
    def column_groups(self) -> int:
        """Number of neighbouring consumers that share 64 rows, each with a column group of O."""
        return self.shape.column_groups

    @functools.cached_property
    def rows(self) -> TileRows:
        """Rows of an M tile; a row group belongs to one consumer, or to those that share it."""
        shape = self.shape
        return TileRows(self.pack, shape.groups, shape.group_rows, shape.most_rows, shape.heads_apart)

    @functools.cached_property
    def kv(self) -> KvTile:
        """A KV tile, in codes if warps convert it in registers. If keys are loaded in subtiles, a box is at most one
        subtile."""
        tile = self.plain_kv
        if self.by_warp:
            return replace(
                tile.of_codes(self.format), bits=self.format.kv_bits, span=self.codes.row_bytes, swizzled=True
            )
        if self.converts:
            return tile.of_codes(self.format)
        return replace(tile, box_spans=self.heads.qk_blocks // self.subtiles) if self.subtiles > 1 else tile

    @functools.cached_property
    def codes(self) -> CodeRings:
        raw = self.shape.raw_stages if self.converts else 0
        sizes = (self.heads.qk, self.tile_n, raw or self.kv_stages, raw)
        return CodeRings(self.format, *sizes, row_span=memory.ROW_BYTES if self.by_warp else None)

    @functools.cached_property
    def merge(self) -> WarpMerge:
        """Where warps with KV tiles of their own merge their states."""
        return WarpMerge(self.consumer_warps, self.shape.row_tiles, self.heads.v, self.shape.merge_stages)

    @property
    def converts(self) -> bool:
        """Whether the last warpgroup converts K and V to 16 bits (``device.convert``)."""
        return self.format.kv_format is not None and not self.by_warp

    @property
    def by_warp(self) -> bool:
        """Whether each warp of the consumers takes its own KV tiles and converts them in registers (``by_warp``)."""
        return self.shape.row_tiles > 0

    @property
    def p_dtype(self) -> str:
        """dtype of P and V in products. Converting codes to fp16 takes fewer instructions, and P has more bits in
        it."""
        return "float16" if self.format.kv_format else self.format.dtype

    @property
    def qk_dtype(self) -> str:
        """dtype of Q and K in products: for codes fp16, as above; bf16 queries are scaled to fit (``narrow``)."""
        return self.p_dtype

    @property
    def narrows_q(self) -> bool:
        """Whether Q comes in bf16 and is multiplied in fp16."""
        return self.qk_dtype != self.format.dtype

    @property
    def recompute_elements(self) -> int:
        """Elements of Q and K that ``device.unseen.recompute`` has in registers at a time: O takes most of them."""
        return 16

    @property
    def recompute_passes(self) -> int:
        """Number of passes in which a thread sums up its values: loaded codes take registers, too."""
        return 4 if self.format.kv_format and self.heads.qk > 128 else 1

    @property
    def bias_alignment(self) -> int | None:
        """Alignment of the bias's rows in bytes; None: that of an element."""
        return None

    @property
    def o_columns(self) -> int:
        """Columns of O of one consumer."""
        return self.heads.v // self.column_groups

    @property
    def pv_columns(self) -> int:
        """N of PV. ptxas accepts no instruction that needs more registers than a thread has at launch, whatever
        setmaxnreg gives a consumer later; with a converter those are few."""
        columns, room = self.o_columns, self.register_pool // self.threads - INSTRUCTION_REGISTERS
        while self.converts and columns // 2 > room:  # a thread has half a column's fp32 numbers
            columns //= 2
        return columns

    @property
    def paired(self) -> bool:
        """Whether two consumers share 64 rows and pass each other P through shared memory (``pair``)."""
        return self.column_groups == 2

    @property
    def shares_end(self) -> bool:
        """Whether paired consumers share the code of a tile's end, whichever consumer's KV tiles came before. With a
        copy for each, MLA's kernels are much larger than the instruction cache. Sinks, and states that a caller gets,
        would take registers that this needs; whole tiles of many queries and of lists were not timed."""
        divided = self.output.normalize or self.output.means
        plain = divided and not self.output.has_sink and self.p_in_keys
        short = self.output.exact_maximum and not self.mask.sparse
        return plain and (self.rereads if self.scheduler.adds_up else short)

    @property
    def lags_if_light(self) -> bool:
        """As in ``AttentionKernel``; an lse would be off by what weights are rounded. Whole calls are short, and few
        rows wait for memory: there such sums cost more than O's factors."""
        plain = self.shares_end and self.output.exact_maximum and not self.output.has_lse
        timed = self.scheduler.adds_up and self.rows.pack > FEW_HEADS and not self.mask.sparse
        return plain and timed and self.p_dtype == "bfloat16"

    @property
    def in_groups(self) -> bool:
        """Whether paired consumers' K and V are one tensor, whose tiles are loaded and released by column group."""
        return self.paired and self.format.shared_kv

    @property
    def p_in_keys(self) -> bool:
        """Whether P of a tile overwrites the columns of its keys that are not V's: QK has read them, and there is no
        other room."""
        return self.in_groups and self.heads.qk_blocks > self.heads.v_blocks

    @property
    def p_stage_bytes(self) -> int:
        """Shared memory from one P to the next."""
        return self.kv.k_bytes if self.p_in_keys else self.p_bytes

    @property
    def caps_small(self) -> bool:
        """Whether small scores are capped by a polynomial (``softmax.cap_scores``). At D 256 it does not pay."""
        plain = self.logits.softcap and self.logits.bias is None and not self.narrows_q
        return plain and self.heads.v <= 128

    @property
    def leaves_means(self) -> bool:
        """Whether pieces leave means of values in fp16 (``add_up``): half the bytes, and an eighth of what rounding to
        bf16 adds to o. States that a caller gets are sums in fp32; those of few rows are small, and take longer as
        means (docs/notebook/latent.md)."""
        few = self.rows.pack <= FEW_MEANS and not self.mask.causal
        bf16 = self.output.normalize and self.format.dtype == BFLOAT16
        return self.scheduler.adds_up and bf16 and not few

    scales_means: ClassVar[bool] = True  # by a power of two for each row

    @property
    def mean_groups(self) -> int:
        """As in ``AttentionKernel``: one for each consumer of a row."""
        return self.column_groups if self.output.means and self.scales_means else 0

    qk_at_once: ClassVar[bool] = False  # QK does not wait for PV of ``pv_first``

    @property
    def pv_first(self) -> bool:
        """Whether paired consumers issue PV of the other's tile before QK, not in the middle of it."""
        return False

    @property
    def waits_late(self) -> bool:
        """As in ``AttentionKernel``. Chunks of work that is cut by length are placed by all threads, at the start."""
        return not self.scheduler.places_chunks

    @property
    def tile_overhead(self) -> int:
        """As in ``AttentionKernel``. With paired consumers little of it lies under other tiles, but few heads of one
        query have small states."""
        if self.scheduler.adds_up:
            few = self.rows.pack <= FEW_HEADS and not self.mask.causal
            return FEW_ROWS_OVERHEAD if few else PAIR_OVERHEAD
        return TILE_OVERHEAD

    @property
    def takes_turns(self) -> bool:
        """Whether consumers issue their products in turns."""
        return self.consumers > 1 and not self.paired and not self.by_warp

    @property
    def skips_idle(self) -> bool:
        """Whether consumers without rows in a tile leave the SM to the others, as for decode tiles among prefill
        tiles."""
        apart = self.rows.heads_apart  # all have the tile's queries
        return self.rows.groups > 1 and not apart and (self.scheduler.cuts_tiles or self.requests.packed_q)

    @property
    def tile_m(self) -> int:
        """Query rows of a CTA."""
        return self.rows.count

    @property
    def tile_n(self) -> int:
        """Keys of a KV tile."""
        return self.shape.tile_n

    @property
    def kv_stages(self) -> int:
        return self.shape.kv_stages

    # Warp roles: consumer warpgroups, then the producer's, of which one warp works, or one for each of ``kv_groups``.

    @property
    def threads(self) -> int:
        return (self.consumers + 1 + self.converts) * WARPGROUP_THREADS

    @property
    def load_warp(self) -> int:
        return self.consumers * WARPGROUP_THREADS // WARP_THREADS

    @property
    def convert_warp(self) -> int:
        """First warp of the warpgroup that converts, if one does."""
        return self.load_warp + WARPGROUP_THREADS // WARP_THREADS

    @property
    def scheduler_warp(self) -> int:
        """Warp of the producer's warpgroup that computes the tiles for the other roles, if one does."""
        return self.load_warp + self.kv_groups

    @property
    def join_warp(self) -> int:
        """Warp of the producer's warpgroup that writes the join record of work that is cut by length."""
        return self.load_warp + 2

    @property
    def value_warp(self) -> int:
        """Warp of the producer's warpgroup that loads V, if the load warp does not."""
        return self.load_warp + 3

    @property
    def loads_apart(self) -> bool:
        """Whether K and V have a load warp each. Single warps release the stages of their own KV tiles: K long before
        V, and out of turn; so do paired consumers, each its K. One warp that waits for a V stage would leave K stages
        empty meanwhile."""
        return (self.by_warp or self.paired) and not self.format.shared_kv

    @property
    def pages_ahead(self) -> bool:
        """Whether load warps read page numbers a KV tile ahead. Tiles of codes have so few bytes that a load warp would
        spend half of its time on waiting for page numbers."""
        return self.by_warp and self.requests.page_size > 0

    @property
    def rereads(self) -> bool:
        """Whether consumers read a tile's record again behind its KV tiles, to have registers for them."""
        return self.scheduler.has_warp and (self.by_warp or self.scheduler.adds_up)

    @property
    def consumer_threads(self) -> int:
        return self.consumers * WARPGROUP_THREADS

    @property
    def consumer_warps(self) -> int:
        return self.consumer_threads // WARP_THREADS

    @property
    def register_pool(self) -> int:
        """Registers of a CTA."""
        return registers_at_launch(self.threads, self.shape.ctas_per_sm) * self.threads

    @property
    def role_registers(self) -> int:
        """Registers of a CTA once the roles have set theirs."""
        per_lane = self.consumers * self.shape.consumer_registers + self.shape.producer_registers
        per_lane += self.shape.converter_registers
        return per_lane * WARPGROUP_THREADS

    # KV tiles: a column group is loaded and released together, a subtile completes together.

    @property
    def kv_groups(self) -> int:
        """Number of a KV tile's column groups, each loaded by a warp and released by a consumer of its own."""
        return self.column_groups if self.in_groups else 1

    @property
    def subtiles(self) -> int:
        """Subtiles of a KV tile, each with an mbarrier: if tiles are few and large, QK begins with the first."""
        return self.heads.qk_blocks if self.in_groups else 1

    @property
    def group_blocks(self) -> int:
        """Blocks of 64 columns that each load warp loads."""
        return self.heads.qk_blocks // self.kv_groups

    @property
    def odd_blocks(self) -> int:
        """Remaining blocks: the last load warp loads them; those of keys, either warp in turn (``group_subtiles``)."""
        return self.heads.qk_blocks % self.kv_groups

    @property
    def group_subtiles(self) -> int:
        """Subtiles of V's columns in a column group. If paired consumers' keys are wider than V, the last subtile
        belongs to no column group: it is loaded and released with the half of its tile that the tile's consumer does
        not release."""
        return self.subtiles // self.kv_groups

    def subtile_of(self, block: int, consumer: int) -> int:
        """Subtile with a block of MMA_K columns of a paired consumer's tile. block: its number."""
        return block * MMA_K // (self.heads.qk_room // self.subtiles)

    @property
    def prefetches(self) -> bool:
        """Whether load warps prefetch into L2 what does not fit shared memory yet. With few queries this takes more of
        L2's speed than it gives."""
        return self.in_groups and not self.streams_keys

    @property
    def streams_keys(self) -> bool:
        """Whether Q and keys are loaded so that they leave L2 first. Few queries read keys once, or in CTAs that are in
        step. So the kernel's code, which is read again by the next launch, stays there."""
        return self.in_groups and self.output.exact_maximum

    # Tiles.

    @property
    def q_box(self) -> tuple[int, int, int]:
        """(D, HEAD, QUERY) of a Q load: one block of D of one row group."""
        return (BLOCK, self.rows.pack, self.rows.group_queries)

    # Shared memory, in bytes.

    @property
    def q_bytes(self) -> int:
        """Q of one row group."""
        return self.rows.group_size * self.heads.qk_room * ELEMENT_BYTES

    @property
    def smem_regions(self) -> tuple[memory.Region, ...]:
        return regions_of(self)

    @property
    def p_bytes(self) -> int:
        """Bytes of one P tile of paired consumers, if P has a place of its own; it has room for a block of columns,
        for O leaves through it."""
        return WARPGROUP_ROWS * BLOCK * ELEMENT_BYTES if self.paired and not self.p_in_keys else 0

    @property
    def statistics_bytes(self) -> int:
        return WEIGHT_STAGES * WARPGROUP_ROWS * STATISTICS * FP32_BYTES if self.paired else 0

    @property
    def sums_bytes(self) -> int:
        """Bytes of a number for each of a thread's two rows."""
        return (self.task_place + self.scheduler.adds_up * self.consumers) * FP32_BYTES if self.paired else 0

    @property
    def task_place(self) -> int:
        """Words before those by which paired consumers learn what to add up (``add_up``)."""
        return 2 * self.consumer_threads * 2

    @property
    def smem_bytes(self) -> int:
        return memory.smem_bytes(self.smem_regions)

    @property
    def smem_limit(self) -> int:
        """Bytes that a CTA may have when so many share an SM."""
        return min(SMEM_PER_SM // self.shape.ctas_per_sm - SMEM_RESERVED_PER_CTA, MAX_SMEM_PER_CTA)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return barriers_of(self)
