"""Attention on sm_100a: tile shapes, warp roles, memory budgets, barrier table.

Everything here is plain Python, fixed at compile time. One ``AttentionConfig`` is one compiled kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from warpspec.common import memory
from warpspec.common.barriers import MBARRIER_BYTES, Barrier, barrier_count
from warpspec.common.hardware import (
    FP32_BYTES,
    MAX_SMEM_PER_CTA,
    SMEM_PER_SM,
    SMEM_RESERVED_PER_CTA,
    TMA_ALIGNMENT,
    TMEM_COLUMNS,
    WARP_THREADS,
    WORD_BYTES,
    registers_at_launch,
)
from warpspec.common.launch import Target
from warpspec.fmha.config import AttentionKernel, Schedule, TileScheduler, check_call, common_fields
from warpspec.fmha.conversion import CONVERTER_WARPS, CodeRings
from warpspec.fmha.heads import BLOCK, MMA_K, rounded
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm100.shapes import (
    FLOAT8_REGISTERS,
    FULL_ROWS,
    QUANTIZED_SHAPES,
    SHAPES,
    Shape,
    default_shape,
)
from warpspec.fmha.tiles import ELEMENT_BYTES, KvTile, TileRows, choose_pack

MMA_N_MAX = 256  # columns of D that one tcgen05.mma writes
RECORDS = 2  # softmax warps hold a tile's record while other roles go on to the next
QUARTER_LANES = 32  # lanes of tensor memory that a warp reaches


@dataclass(frozen=True)
class AttentionConfig(memory.TensorMemoryWarps, AttentionKernel):
    """Compile-time shape of one kernel.

    shape: its tiles. bias_stages: KV tiles of the bias in flight, 0 if it is read from global memory.
    softmax_registers, other_registers: registers of a thread, set by setmaxnreg.
    """

    shape: Shape = SHAPES[64][0]
    bias_stages: int = 0
    softmax_registers: int = 216
    other_registers: int = 72

    def __post_init__(self):
        super().__post_init__()
        self._check_budgets()

    @functools.lru_cache(maxsize=1024)  # noqa: B019 (a planner makes the same few again and again)
    def _check_budgets(self) -> None:
        assert 1 <= self.rows.pack <= self.tile_m
        assert self.tmem_allocation * self.ctas_per_sm <= TMEM_COLUMNS
        assert self.smem_bytes <= MAX_SMEM_PER_CTA
        assert (self.smem_bytes + SMEM_RESERVED_PER_CTA) * self.ctas_per_sm <= SMEM_PER_SM
        assert self.register_pool >= self.role_registers
        assert barrier_count(self.barriers) <= self.barrier_slots
        assert (self.barrier_slots * MBARRIER_BYTES + self.word_bytes) <= self.control_room
        assert not (self.scheduler.cuts_tiles and (self.logits.bias or self.column_groups > 1))

    @classmethod
    def check(cls, problem: AttentionProblem, target: Target) -> None:
        """Raise UnsupportedProblem, naming what this kernel does not support."""
        check_call("sm100", problem, tuple(QUANTIZED_SHAPES.get(problem.format.kv_bits, ())))

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        target: Target,
        *,
        shape: Shape | None = None,
        splits: bool = False,
        schedule: Schedule = Schedule.SINGLE,
        pack: int | None = None,
    ) -> AttentionConfig:
        """The kernel for a problem. UnsupportedProblem names what this kernel does not support.

        shape: tiles; None: the head size's default. splits: the keys are split, and another kernel combines results.
        schedule: SINGLE or LINE. pack: heads of a KV group that share a tile; None: the best for the longest request.
        """
        cls.check(problem, target)
        shape = shape or default_shape(problem)
        registers = {}
        if problem.format.kv_format:
            softmax_registers, other_registers = FLOAT8_REGISTERS[shape.ctas_per_sm]
            registers = {"softmax_registers": softmax_registers, "other_registers": other_registers}
        pack = pack or choose_pack(problem.group, problem.seq_q, shape.tile_m)
        cuts = schedule is Schedule.LINE
        config = cls(
            **common_fields(problem, rows_of_cta=shape.tile_m, pack=pack, splits=splits),
            scheduler=TileScheduler(schedule, has_warp=cuts, record_count=RECORDS if cuts else 1),
            shape=shape,
            **registers,
        )
        return config.with_bias(problem, target) if problem.bias else config

    def with_bias(self, problem: AttentionProblem, target: Target) -> AttentionConfig:
        """This kernel with a bias. Its shared memory comes from the rings of K and V, which keep two stages if they had
        them, then from the second CTA of an SM; the bias gets two stages if that suffices.
        """
        # Otherwise threads read it from global memory; so, too, where a converter's tiles fill shared memory, or those
        # of MLA's head sizes.
        streamed = problem.bias_rows == "aligned" and not self.converts
        tiles = self
        # ptxas starts a tile's loads from global memory all at once, and at 128 keys has no registers for that. In
        # fp32, half the keys leave room for two CTAs, with two stages of everything.
        if not streamed or (problem.bias.bytes == FP32_BYTES and self.ctas_per_sm > 1):
            tiles = replace(self, shape=replace(self.shape, tile_n=min(self.tile_n, BLOCK)))
        if not streamed:
            return tiles
        stage_bytes = sum(tiles.kv.bytes_of(ring) for ring in tiles.format.rings)
        for ctas in range(self.ctas_per_sm, 0, -1):
            room = min(target.architecture.smem_per_cta, SMEM_PER_SM // ctas - SMEM_RESERVED_PER_CTA)
            room -= tiles.smem_bytes - tiles.kv_stages * stage_bytes
            most = self.kv_stages * self.ctas_per_sm // ctas
            for stages in (2, 1):
                kv_stages = min((room - stages * tiles.bias_tile_bytes) // stage_bytes, most)
                if kv_stages >= min(self.kv_stages, 2):
                    shape = replace(tiles.shape, kv_stages=kv_stages, ctas_per_sm=ctas)
                    return replace(tiles, shape=shape, bias_stages=stages)
        return replace(self, shape=replace(self.shape, tile_n=min(self.tile_n, BLOCK)))

    @property
    def tile_m(self) -> int:
        """Query rows of a CTA."""
        return self.shape.tile_m

    @property
    def tile_n(self) -> int:
        """Keys of a KV tile."""
        return self.shape.tile_n

    @property
    def kv_stages(self) -> int:
        return self.shape.kv_stages

    @property
    def ctas_per_sm(self) -> int:
        return self.shape.ctas_per_sm

    @property
    def p_in_smem(self) -> bool:
        return self.shape.p_in == "smem"

    # Warp roles.

    @property
    def softmax_warps(self) -> range:
        return range(4)

    @property
    def convert_warp(self) -> int:
        """The first of the four converter warps, a warpgroup of their own; two warps before them are idle."""
        return 8

    @property
    def softmax_threads(self) -> int:
        return len(self.softmax_warps) * WARP_THREADS

    @property
    def threads(self) -> int:
        warps = self.convert_warp + CONVERTER_WARPS if self.converts else self.load_warp + 1
        return warps * WARP_THREADS

    # Tiles.

    @property
    def column_groups(self) -> int:
        """Number of threads that share a row, each with some of O's columns.

        An accumulator of 64 rows takes 16 lanes of each quarter of tensor memory; the other 16 hold the second half of
        D.
        """
        return FULL_ROWS // self.tile_m

    @property
    def o_columns(self) -> int:
        """Columns of tensor memory, and of O, of one thread."""
        return rounded(self.heads.v, MMA_K) // self.column_groups

    def o_segments(self, most: int) -> list[tuple[int, int]]:
        """(first column, columns) of the segments in which a thread takes its columns of O: ``most`` columns, and what
        is left in segments of MMA_K. A segment begins at a multiple of its columns."""
        whole = self.o_columns // most * most
        segments = [(start, most) for start in range(0, whole, most)]
        return segments + [(start, MMA_K) for start in range(whole, self.o_columns, MMA_K)]

    def row_of(self, thread):
        """Row of the M tile that a softmax thread works on."""
        if self.column_groups == 1:
            return thread
        lanes = QUARTER_LANES // self.column_groups
        return thread // QUARTER_LANES * lanes + thread % lanes

    def column_group_of(self, thread):
        """Number of a softmax thread's column group of O."""
        if self.column_groups == 1:
            return 0
        return thread % QUARTER_LANES // (QUARTER_LANES // self.column_groups)

    @functools.cached_property
    def rows(self) -> TileRows:
        """Rows of an M tile, all of one row group."""
        return TileRows(self.pack, 1, self.tile_m)

    @functools.cached_property
    def kv(self) -> KvTile:
        """A KV tile."""
        tile = self.plain_kv
        return tile.of_codes(self.format) if self.converts else tile

    @functools.cached_property
    def codes(self) -> CodeRings:
        raw = self.shape.raw_stages if self.converts else 0
        return CodeRings(self.format, self.heads.qk, self.tile_n, raw or self.kv_stages, raw)

    @property
    def recompute_elements(self) -> int:
        """Elements of Q and K that ``device.unseen.recompute`` has in registers at a time: with more it spills."""
        return 32

    @property
    def recompute_passes(self) -> int:
        """Number of steps in which a thread sums up its values, one after another."""
        return 1

    @property
    def bias_alignment(self) -> int | None:
        """Alignment of the bias's rows in bytes; None: that of an element."""
        return TMA_ALIGNMENT if self.bias_stages else None

    @property
    def q_box(self) -> tuple[int, int, int]:
        """(D, HEAD, QUERY) of a Q load: one block of D."""
        return (BLOCK, self.rows.pack, self.rows.queries)

    @property
    def bias_rows(self) -> int:
        """Rows of a bias tile: one per query if heads share them."""
        return self.rows.pack * self.rows.queries if self.logits.bias.heads else self.rows.queries

    @property
    def bias_box(self) -> tuple[int, int, int]:
        """(KEY, HEAD, QUERY) of a bias load: 128 bytes of keys."""
        keys = memory.ROW_BYTES // self.logits.bias.bytes
        return (keys, self.rows.pack if self.logits.bias.heads else 1, self.rows.queries)

    @property
    def bias_boxes(self) -> int:
        """Loads of a KV tile's bias."""
        return self.tile_n // self.bias_box[0]

    @property
    def bias_box_room(self) -> int:
        """Bytes of shared memory from one box to the next."""
        return -(-self.bias_rows * memory.ROW_BYTES // memory.TILE_ALIGNMENT) * memory.TILE_ALIGNMENT

    @property
    def bias_tile_bytes(self) -> int:
        return self.bias_boxes * self.bias_box_room

    @property
    def qk_tiler(self) -> tuple[int, int, int]:
        """(M, N, K) of S = Q K^T."""
        return (self.tile_m, self.tile_n, self.heads.qk_room)

    @property
    def pv_tiler(self) -> tuple[int, int, int]:
        """(M, N, K) of O += P V."""
        return (self.tile_m, self.heads.v_room, self.tile_n)

    @property
    def pv_instruction(self) -> tuple[int, int]:
        """(M, N) of one tcgen05.mma of PV: D above 256 is written in column tiles."""
        return (self.tile_m, min(rounded(self.heads.v, MMA_K), MMA_N_MAX))

    # Registers of a thread at launch, by CTAs per SM, and as set by setmaxnreg.

    @property
    def moves_registers(self) -> bool:
        """Whether softmax gets registers from the other roles."""
        return self.ctas_per_sm > 1 or self.converts

    @property
    def launch_registers(self) -> int:
        """Registers per thread at launch."""
        return registers_at_launch(self.threads, self.ctas_per_sm)

    @property
    def load_columns(self) -> int:
        """Columns of tensor memory that one tcgen05.ld loads. ptxas accepts no instruction whose result needs more
        registers than a thread has at launch."""
        return 32 if self.converts and self.ctas_per_sm > 1 else 128

    @property
    def register_pool(self) -> int:
        """Registers of a CTA."""
        return self.launch_registers * self.threads

    @property
    def role_registers(self) -> int:
        """Registers of a CTA once the roles have set theirs."""
        others = self.threads - self.softmax_threads
        return self.softmax_registers * self.softmax_threads + self.other_registers * others

    # Tensor memory, in 32-bit columns. S, P and O each have columns of their own: QK of the next tile
    # overwrites S as soon as it has been read, while P of this one is still being made or used.

    @property
    def tmem_s(self) -> int:
        """First column of S [tile_m, tile_n] fp32."""
        return 0

    @property
    def tmem_p(self) -> int:
        """First column of P [tile_m, tile_n], 16 bits, two keys to a column; no columns with P in SMEM."""
        return self.tmem_s + self.tile_n

    @property
    def p_columns(self) -> int:
        return 0 if self.p_in_smem else self.tile_n * ELEMENT_BYTES // memory.TMEM_COLUMN_BYTES

    @property
    def tmem_o(self) -> int:
        """First column of O fp32: a multiple of 64, which tcgen05.mma needs of an N of 256."""
        return -(-(self.tmem_p + self.p_columns) // BLOCK) * BLOCK

    @property
    def tmem_columns(self) -> int:
        return self.tmem_o + self.o_columns

    @property
    def tmem_allocation(self) -> int:
        return memory.tmem_allocation(self.tmem_columns)

    # Shared memory, in bytes.

    @property
    def q_bytes(self) -> int:
        return self.tile_m * self.heads.qk_room * ELEMENT_BYTES

    @property
    def p_bytes(self) -> int:
        return self.tile_m * self.tile_n * ELEMENT_BYTES if self.p_in_smem else 0

    @property
    def bias_ring_bytes(self) -> int:
        return self.bias_stages * self.bias_tile_bytes if self.bias_stages else 0

    @property
    def barrier_slots(self) -> int:
        """Number of mbarriers that fit ``control_room``."""
        return 31 if self.scheduler.cuts_tiles and not self.converts else 64

    @property
    def control_room(self) -> int:
        """Bytes of mbarriers and of the words after them: the alignment of what follows, or twice that if there are
        both a converter's barriers and the records of a cut line."""
        return memory.TILE_ALIGNMENT * (2 if self.converts and self.scheduler.cuts_tiles else 1)

    @property
    def word_bytes(self) -> int:
        """Bytes after the mbarriers: the TMEM address, ends of chunks, records of tiles."""
        return WORD_BYTES + self.scheduler.cursor_bytes + self.scheduler.record_bytes

    @property
    def smem_regions(self) -> tuple[memory.Region, ...]:
        """Shared memory, in order."""
        stages, rows = self.kv_stages, f"{self.kv_stages} x [{self.tile_n}"
        name = "K and V" if self.format.shared_kv else "K"
        bias = ""
        if self.bias_stages:
            bias = f"{self.bias_stages} x [{self.bias_rows}, {self.tile_n}] {self.logits.bias.dtype}"
        return (
            *self.control_regions,
            memory.tile_region("q", self.q_bytes, "Q", f"[{self.tile_m}, {self.heads.qk_room}]"),
            memory.tile_region("k", stages * self.kv.k_bytes, name, f"{rows}, {self.heads.qk_room}]"),
            memory.tile_region("v", stages * self.kv.own_v_bytes, "V", f"{rows}, {self.heads.v_room}]"),
            memory.tile_region("p", self.p_bytes, "P", f"[{self.tile_m}, {self.tile_n}]"),
            memory.tile_region("bias", self.bias_ring_bytes, "bias", bias),
            *self.codes.regions,
        )

    @property
    def control_regions(self) -> tuple[memory.Region, ...]:
        """Barriers, the address of tensor memory, ends of chunks and records of tiles."""
        return (
            memory.barrier_region(self.barriers, self.barrier_slots),
            memory.TMEM_ADDRESS,
            memory.Region("cursors", self.scheduler.cursor_bytes // WORD_BYTES, "int32", 0, "ends of chunks"),
            memory.Region(
                "records", self.scheduler.record_bytes // WORD_BYTES, "int32", 0, "records", "of tiles"
            ),
        )

    @property
    def smem_bytes(self) -> int:
        return memory.smem_bytes(self.smem_regions)

    # Barriers.

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier: who arrives, how often, who waits, and what then holds. One use per KV tile."""
        threads = self.softmax_threads
        load, mma, softmax = "load warp", "MMA warp", "softmax warps"
        commit = f"{mma}, tcgen05.commit"
        every = f"{softmax}, each of {threads} threads"
        return (
            Barrier("q_full", 1, 1, f"{load}, expect_tx + TMA bytes", mma, "Q is in shared memory"),
            *self._tile_barriers(load, commit),
            *self._kv_barriers(load, mma, softmax, commit),
            *self._bias_barriers(load, softmax, every),
            Barrier("s_full", 1, 1, commit, softmax, "S of the tile is in tensor memory"),
            Barrier("s_empty", 1, threads, every, mma, "S is in registers, its columns may be overwritten"),
            Barrier(
                "p_full",
                1,
                threads,
                every,
                mma,
                f"P is in {'shared' if self.p_in_smem else 'tensor'} memory, O is rescaled, V rows that no query row "
                "sees are zero",
            ),
            Barrier("pv_done", 1, 1, commit, softmax, "O holds the tile, P may be overwritten"),
        )

    def _tile_barriers(self, load, commit) -> tuple[Barrier, ...]:
        """Barriers used once per M tile, if a CTA has several M tiles."""
        if not self.scheduler.cuts_tiles:
            return ()
        readers, warps = "softmax warps and MMA warp", len(self.softmax_warps) + 1
        if self.converts:
            readers, warps = "softmax warps, MMA warp and converter", warps + CONVERTER_WARPS
        return (
            Barrier("q_empty", 1, 1, commit, load, "QK has read Q"),
            *self.scheduler.barriers(load, readers, warps),
        )

    def _kv_barriers(self, load, mma, softmax, commit) -> tuple[Barrier, ...]:
        """Barriers of the rings of K and V, or of the one ring of both."""
        stages, filled = self.kv_stages, f"{load}, expect_tx + TMA bytes"
        both = f"{mma}; {softmax} when they clear rows"
        if self.converts:
            return self.codes.barriers(stages, mma, both, commit, 1)
        if self.format.shared_kv:
            return (
                Barrier("k_full", stages, 1, filled, both, "KV tile is in shared memory"),
                Barrier("k_empty", stages, 1, commit, load, "QK and PV have read the KV tile"),
            )
        return (
            Barrier("k_full", stages, 1, filled, mma, "K tile is in shared memory"),
            Barrier("k_empty", stages, 1, commit, load, "QK has read the K tile"),
            Barrier("v_full", stages, 1, filled, both, "V tile is in shared memory"),
            Barrier("v_empty", stages, 1, commit, load, "PV has read the V tile"),
        )

    def _bias_barriers(self, load, softmax, every) -> tuple[Barrier, ...]:
        """Barriers of the bias ring, if there is one."""
        stages, threads, filled = self.bias_stages, self.softmax_threads, f"{load}, expect_tx + TMA bytes"
        if not stages:
            return ()
        return (
            Barrier("bias_full", stages, 1, filled, softmax, "bias tile is in shared memory"),
            Barrier("bias_empty", stages, threads, every, load, "the bias tile has been added"),
        )
