"""The kernel for sm_90a that makes dQ by query tiles: tiles, warp roles, memory budgets, barrier table. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common import memory
from warpspec.common.barriers import MBARRIER_BYTES, Barrier, barrier_count
from warpspec.common.hardware import (
    MAX_SMEM_PER_CTA,
    REGISTERS_PER_SM,
    WARP_THREADS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
)
from warpspec.fmha.backward.features import BackwardKernel, Wanted
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.sm90.config import BARRIER_BYTES, SUM_STEP, BackwardConfig
from warpspec.fmha.heads import BLOCK, rounded

CONSUMERS = 2  # warpgroups, each with 64 queries
TILE_N = {64: 128, 128: 64, 192: 64}  # keys of a tile, by D of Q and K
STAGES = {64: 4, 128: 4, 192: 3}  # of the rings of K and V
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
CLEARED_BARRIER = 1  # named barrier of the consumers: they have cleared keys that nobody sees


@dataclass(frozen=True)
class QueryConfig(BackwardKernel):
    """Compile-time shape of one kernel. row_tile: rows of a tile of the statistics, the main kernel's ``tile_m``."""

    row_tile: int = 64

    def __post_init__(self):
        super().__post_init__()
        assert self.smem_bytes <= MAX_SMEM_PER_CTA
        assert sum(self.registers) * WARPGROUP_THREADS <= REGISTERS_PER_SM
        assert barrier_count(self.barriers) * MBARRIER_BYTES <= BARRIER_BYTES

    @classmethod
    def of(cls, problem: BackwardProblem, main: BackwardConfig) -> QueryConfig | None:
        """The kernel beside a main kernel, or None if there is none for the problem: with lists of blocks, ranges, a
        bias, a soft cap, or a D of which a thread's registers do not hold dQ beside S and dP."""
        mask, logits = main.mask, main.logits
        further = mask.has_blocks or mask.has_ranges or logits.bias is not None or logits.curved
        if "q" not in problem.wanted or further or main.heads.qk not in TILE_N or main.deterministic:
            return None
        fields = (main.mask, main.requests, main.logits, main.heads, main.format, Wanted(True, False, False))
        return cls(*fields, rows=main.rows, row_tile=main.tile_m)

    @property
    def tile_m(self) -> int:
        """Queries of a tile."""
        return CONSUMERS * WARPGROUP_ROWS

    @property
    def tile_n(self) -> int:
        """Keys of a tile."""
        return TILE_N[self.heads.qk]

    @property
    def stages(self) -> int:
        """Stages of the rings of K and V."""
        return STAGES[self.heads.qk]

    @property
    def columns(self) -> int:
        """Columns of dQ that are made."""
        return self.heads.qk if self.rows is None else rounded(self.rows.qk, SUM_STEP)

    @property
    def threads(self) -> int:
        return self.consumer_threads + WARPGROUP_THREADS

    @property
    def consumer_threads(self) -> int:
        return CONSUMERS * WARPGROUP_THREADS

    @property
    def load_warp(self) -> int:
        return self.consumer_threads // WARP_THREADS

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers of a thread, by warpgroup."""
        return (CONSUMER_REGISTERS,) * CONSUMERS + (PRODUCER_REGISTERS,)

    @property
    def smem_regions(self) -> tuple[memory.Region, ...]:
        """Shared memory, in order."""
        staging = self.tile_m * memory.ROW_BYTES
        return (
            memory.barrier_region(self.barriers, BARRIER_BYTES // MBARRIER_BYTES),
            self.operand_region("q", 1, "Q"),
            self.operand_region("do", 1, "dO"),
            self.operand_region("k", self.stages, "K"),
            self.operand_region("v", self.stages, "V"),
            memory.tile_region("results", staging, "dQ", f"[{self.tile_m}, {BLOCK}]"),
        )

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier: who arrives, how often, who waits, and what then holds."""
        filled, warps = "load warp, expect_tx + TMA bytes", self.consumer_threads // WARP_THREADS
        warp = "consumers, one thread a warp"
        found = []
        for name, stages, meaning in (
            ("q", 1, "the tile's last S has read Q"),
            ("do", 1, "the tile's last dP has read dO"),
            ("k", self.stages, "S and dQ have read K"),
            ("v", self.stages, "dP has read V"),
        ):
            title = {"q": "Q", "do": "dO", "k": "K", "v": "V"}[name]
            found += [
                Barrier(name + "_full", stages, 1, filled, "consumers", f"{title} is in shared memory"),
                Barrier(name + "_empty", stages, warps, warp, "load warp", meaning),
            ]
        return tuple(found)
