"""The kernels for sm_90a that make dQ by query tiles, and dK and dV by key tiles: tiles, warp roles, memory budgets,
barrier tables. Plain Python.

Each makes S and dP again. Its CTAs are persistent: while consumers end a tile, the load warp fetches what the next one
reads first. A *tile* is of those rows whose gradients a CTA makes, 64 for each consumer; the rows that they meet come
in *steps* through rings.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common import memory
from warpspec.common.barriers import MBARRIER_BYTES, Barrier, barrier_count
from warpspec.common.hardware import (
    FP32_BYTES,
    MAX_SMEM_PER_CTA,
    REGISTERS_PER_SM,
    WARP_THREADS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
)
from warpspec.fmha.backward.features import BackwardKernel, Wanted, common_fields
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.heads import BLOCK, rounded

CONSUMERS = 2  # warpgroups, each with 64 rows of a tile
LOAD_WARPS = 2  # one for each of a tile's two operands, and of a step's
QUERY_STEP = {64: 128, 128: 64, 192: 64}  # keys of a step of dQ, by D of the tile
KEY_STEP = {64: 128, 128: 64}  # queries of a step of dK and dV
RING_ROWS = {64: 512, 128: 256, 192: 192}  # of the rings, by D
SUM_STEP = 16  # columns are made in multiples of this
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
BARRIER_BYTES = 1024  # room for the mbarriers: what follows is aligned to it
RESULT_BUFFERS = {64: 2, 128: 2, 192: 1}  # of 16 rows and 64 columns of a warp, which TMA stores
CLEARED_BARRIER = 1  # named barrier of the consumers: they have cleared rows that nobody sees
TITLES = {"q": "Q", "do": "dO", "k": "K", "v": "V"}


@dataclass(frozen=True)
class ApartKernel(BackwardKernel):
    """What both kernels have in common. kept: names of a tile's two operands; streamed: of a step's. step_blocks:
    blocks of a step."""

    kept, streamed = ("", ""), ("", "")
    step_blocks = 1
    makes_statistics, rotates = False, False

    def __post_init__(self):
        super().__post_init__()
        assert self.smem_bytes <= MAX_SMEM_PER_CTA
        assert sum(self.registers) * WARPGROUP_THREADS <= REGISTERS_PER_SM
        assert barrier_count(self.barriers) * MBARRIER_BYTES <= BARRIER_BYTES

    @property
    def threads(self) -> int:
        return self.consumer_threads + WARPGROUP_THREADS

    @property
    def consumer_threads(self) -> int:
        return CONSUMERS * WARPGROUP_THREADS

    @property
    def load_warp(self) -> int:
        """The first of LOAD_WARPS."""
        return self.consumer_threads // WARP_THREADS

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers of a thread, by warpgroup."""
        return (CONSUMER_REGISTERS,) * CONSUMERS + (PRODUCER_REGISTERS,)

    @property
    def stores_tiles(self) -> bool:
        """Whether TMA stores results. Rows past a packed request's last are another's, which it would overwrite."""
        return not self.packed

    def columns(self, name: str) -> int:
        """Columns of the sums of dQ or dK ("k"), or of dV ("v"): as many as rows have, up to whole instructions."""
        size = self.sizes.v if name == "v" else self.sizes.qk
        return rounded(size, SUM_STEP)

    @property
    def result_buffers(self) -> int:
        return RESULT_BUFFERS[self.heads.qk]

    @property
    def block_rows(self) -> int:
        """Rows of a step of which S and dP are made at a time."""
        return self.rows_of(self.streamed[0]) // self.step_blocks

    def stages_of(self, name: str) -> int:
        return 1 if name in self.kept else RING_ROWS[self.heads.qk] // self.rows_of(name)

    def rows_of(self, name: str) -> int:
        """Rows of a tile of "q", "k", "v" or "do"."""
        return self.tile_n if name in ("k", "v") else self.tile_m

    @property
    def smem_regions(self) -> tuple[memory.Region, ...]:
        """Shared memory, in order."""
        rows, stages = CONSUMERS * WARPGROUP_ROWS, self.stages_of("q")
        buffers = self.result_buffers
        numbers = stages * self.statistics_bytes // FP32_BYTES
        statistics = f"{stages} x lse' and -delta of rows"
        return (
            memory.barrier_region(self.barriers, BARRIER_BYTES // MBARRIER_BYTES),
            *(
                self.operand_region(name, self.stages_of(name), TITLES[name])
                for name in ("q", "do", "k", "v")
            ),
            memory.tile_region(
                "results", buffers * rows * memory.ROW_BYTES, "results", f"{buffers} x [{rows}, {BLOCK}]"
            ),
            memory.Region("statistics", numbers, "float32", memory.TILE_ALIGNMENT, "", statistics),
        )

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier: who arrives, how often, who waits, and what then holds."""
        filled, warps = "load warp, expect_tx + TMA bytes", self.consumer_threads // WARP_THREADS
        found = []
        for name in (*self.kept, *self.streamed):
            stages, title = self.stages_of(name), TITLES[name]
            found += [
                Barrier(name + "_full", stages, 1, filled, "consumers", f"{title} is in shared memory"),
                Barrier(
                    name + "_empty",
                    stages,
                    warps,
                    "consumers, one thread a warp",
                    "load warp",
                    f"products have read {title}",
                ),
            ]
        return tuple(found)


@dataclass(frozen=True)
class QueryConfig(ApartKernel):
    """The kernel that makes dQ. row_tile: rows of a tile of the statistics, the other kernel's ``tile_m``.
    begins_early: the other kernel lets this one begin behind its own wait for the first kernel. makes_statistics: this
    is the first kernel, and makes the rows' statistics, too."""

    row_tile: int = 64
    begins_early: bool = False
    makes_statistics: bool = False
    kept, streamed = ("q", "do"), ("k", "v")

    @classmethod
    def beside(cls, keys: BackwardKernel, makes_statistics: bool = False) -> QueryConfig | None:
        """The kernel beside one that makes dK and dV, or None where it is not made for that."""
        mask, logits = keys.mask, keys.logits
        further = mask.has_blocks or mask.has_ranges or logits.bias is not None or logits.curved
        if further or keys.heads.qk not in QUERY_STEP:
            return None
        fields = (keys.mask, keys.requests, keys.logits, keys.heads, keys.format, Wanted(True, False, False))
        early = isinstance(keys, KeyConfig) and not makes_statistics
        more = {"row_tile": keys.tile_m, "begins_early": early, "makes_statistics": makes_statistics}
        return cls(*fields, rows=keys.rows, **more)

    @property
    def tile_m(self) -> int:
        """Queries of a tile."""
        return CONSUMERS * WARPGROUP_ROWS

    @property
    def row_tiles(self) -> int:
        """Row tiles of the statistics in a tile."""
        return self.tile_m // self.row_tile

    @property
    def tile_n(self) -> int:
        """Keys of a step."""
        return QUERY_STEP[self.heads.qk]

    @property
    def step_blocks(self) -> int:
        return self.tile_n // BLOCK


@dataclass(frozen=True)
class KeyConfig(ApartKernel):
    """The kernel that makes dK and dV; it stands for the main kernel."""

    kept, streamed = ("k", "v"), ("q", "do")
    row_tiles = 1

    @classmethod
    def of(cls, problem: BackwardProblem) -> KeyConfig | None:
        """The kernel of a problem, or None where these kernels are not made for it: with lists of blocks, ranges, a
        bias, a soft cap, or a D for which a thread's registers do not suffice."""
        forward, wanted = problem.forward, problem.wanted
        mask, plain = forward.mask, forward.bias is None and forward.logits.softcap is None
        further = mask.has_blocks or mask.has_ranges
        # Keys past the KV length that a mask does not hide anyway take four registers that D 128 has not.
        further |= forward.requests.has_kv_lengths and not mask.band and forward.heads.qk > BLOCK
        if further or not plain or forward.heads.qk not in KEY_STEP or set(wanted) - {"sink"} != {"k", "v"}:
            return None
        fields = common_fields(problem) | {"wanted": Wanted(False, True, True)}
        fields |= {"deterministic": False, "heads_inside": False}  # as sums are made, they have an order
        return cls(**fields, rows=problem.rows)

    @property
    def step_blocks(self) -> int:
        return self.query_blocks

    @property
    def tile_m(self) -> int:
        """Queries of a step, of which S and dP are made BLOCK at a time."""
        return KEY_STEP[self.heads.qk]

    @property
    def tile_n(self) -> int:
        """Keys of a tile."""
        return CONSUMERS * WARPGROUP_ROWS
