"""Configuration of one kernel of a Swap-FFN step: phase, tiles, budgets, barriers. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpspec.common import memory
from warpspec.common.barriers import MBARRIER_BYTES, Barrier, barrier_count
from warpspec.common.hardware import (
    BF16_BYTES,
    FP32_BYTES,
    MAX_SMEM_PER_CTA,
    REGISTERS_PER_SM,
    TMEM_COLUMNS,
    VECTOR_BYTES,
    WARP_THREADS,
    WARPGROUP_THREADS,
)

# Phases. A rows phase comes before every FFN step and after the last. It makes the vectors x from the token ("first")
# or from the partial sums of the previous step, exchanges them with banks ("first" and "swap", not "rows"), and writes
# 1 / RMS. "up" and "down" are the two products of an FFN step; the collapse has three phases. "fused" is all of them.
ROWS_PHASES = ("first", "swap", "rows")
GEMM_PHASES = ("up", "down")
COLLAPSE_PHASES = ("pool", "basis", "decode")
PHASES = (*ROWS_PHASES, *GEMM_PHASES, *COLLAPSE_PHASES, "fused")

TILE_M = 128  # rows of a tile, and of the counters on which phases wait
K_TILE = memory.ROW_BYTES // BF16_BYTES  # K of a stage: one span of the 128-byte swizzle
TILE_NS = (128, 256)  # columns of a tile
A_BYTES = TILE_M * memory.ROW_BYTES  # bytes of activations of a stage

# Threads of rows and collapse phases. In the fused kernel they are the threads of both consumers.
CONSUMERS = 2
THREADS = CONSUMERS * WARPGROUP_THREADS
WARPS = THREADS // WARP_THREADS
GROUP_ROWS = 4  # rows that these threads process at a time
TILE_GROUPS = TILE_M // GROUP_ROWS
ROW_THREADS = THREADS // GROUP_ROWS
ROW_WARPS = ROW_THREADS // WARP_THREADS
VECTOR = VECTOR_BYTES // FP32_BYTES  # adjacent columns of a thread

ROUTER_WIDTH = 64  # outputs of z: 8 for each warp, the N of one mma.sync
ROUTER_CHUNK = 32  # numbers along K that a quad loads together, 16 bytes a thread
TERMS = 2  # bf16 numbers whose sum is exactly the product of two bf16 numbers
TERM_PADDING = 32  # bf16 between rows of terms, against bank conflicts
SLOTS = 8  # K of the collapse
POOL_COLUMNS = 8  # bf16 of a 16-byte load, and columns of x that a CTA pools at a time
OUTPUTS = 4  # requests whose collapse sums are added up at a time

BARRIER_BYTES = 256
SCRATCH_ALIGNMENT = 128
LOAD = "load warp, expect_tx + TMA bytes"
MOST_STAGES = 8  # most stages of a ring

# Counters of the fused kernel. Each row tile has one for rows, one for down, and one of up for every GROUP_TILES column
# tiles, which are GROUP_K K tiles of down. The whole grid has these:
GRID_COUNTERS = ("pooled", "summed", "finished")
GROUP_TILES = 8


def padded(size: int) -> int:
    """The most bytes that a region of shared memory can take, with alignment."""
    return -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


@dataclass(frozen=True)
class Tiles:
    """Tiles of both products, and the cluster that shares their loads.

    up_n: columns of an up tile, half of them gate's and half up's. down_n: columns of a down tile. cluster_m: CTAs of
    adjacent row tiles, which share weights by multicast. cluster_n: CTAs of adjacent column tiles, which share
    activations. stages: the most stages of a ring.
    """

    up_n: int = 256
    down_n: int = 128
    cluster_m: int = 2
    cluster_n: int = 1
    stages: int = MOST_STAGES

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n

    def __str__(self):
        stages = f" {self.stages} stages" if self.stages < MOST_STAGES else ""
        return f"{self.up_n}/{self.down_n} {self.cluster_m}x{self.cluster_n}{stages}"


@dataclass(frozen=True)
class SwapConfig:
    """Compile-time shape of one kernel.

    arch: "sm90" or "sm100", whose instructions the GEMM phases use. phase: one of PHASES. d_model: D. tiles: tiles of
    both products. splits: parts of d_ff whose partial sums a rows phase adds up ("down" gets its number of parts at
    launch). residual: add x to an FFN step's result. eps: added to the mean square in the norms. forced: the router's
    decisions are an argument. recorded: the router writes its decisions.
    """

    arch: str
    phase: str
    d_model: int
    tiles: Tiles = field(default_factory=Tiles)
    splits: int = 1
    residual: bool = False
    eps: float = 1e-6
    forced: bool = False
    recorded: bool = False

    def __post_init__(self):
        assert self.phase in PHASES and self.arch in ("sm90", "sm100")
        assert self.d_model % (ROW_THREADS * VECTOR) == 0
        assert not (self.fused and self.arch == "sm100")
        if self.multiplies:
            tiles = self.tiles
            for phase in self.products:
                assert self.columns(phase) in TILE_NS and self.stages(phase) >= 2
            assert self.smem_bytes <= MAX_SMEM_PER_CTA, (self.smem_bytes, tiles)
            assert barrier_count(self.barriers) * MBARRIER_BYTES <= BARRIER_BYTES
            assert self.arch == "sm100" or self.role_registers <= REGISTERS_PER_SM
            assert self.arch == "sm90" or tiles.cluster == 1
            assert self.accumulator_columns <= TMEM_COLUMNS

    @property
    def fused(self) -> bool:
        return self.phase == "fused"

    @property
    def multiplies(self) -> bool:
        """Whether the kernel has products, and therefore a load warp and a ring."""
        return self.fused or self.phase in GEMM_PHASES

    @property
    def products(self) -> tuple[str, ...]:
        """The product phases of the kernel."""
        return tuple(phase for phase in GEMM_PHASES if self.fused or self.phase == phase)

    @property
    def routes(self) -> bool:
        """Whether the kernel has the router."""
        return self.phase in ("first", "swap", "fused")

    # Threads and registers.

    @property
    def threads(self) -> int:
        if not self.multiplies:
            return THREADS
        return 6 * WARP_THREADS if self.arch == "sm100" else THREADS + WARPGROUP_THREADS

    @property
    def load_warp(self) -> int:
        return 5 if self.arch == "sm100" else WARPS

    @property
    def mma_warp(self) -> int:
        """The MMA warp (sm100)."""
        return 4

    @property
    def consumer_registers(self) -> int:
        return 232

    @property
    def producer_registers(self) -> int:
        return 40

    @property
    def role_registers(self) -> int:
        return THREADS * self.consumer_registers + WARPGROUP_THREADS * self.producer_registers

    # The ring is memory that the products use in turn. Each product divides it into its own stages: first the
    # activations of all stages, then the weights of all stages. In the fused kernel it also holds the router's weights
    # before a swap.

    def columns(self, phase: str) -> int:
        """N of a product's tile."""
        return self.tiles.up_n if phase == "up" else self.tiles.down_n

    def stage_bytes(self, phase: str) -> int:
        """Bytes of a K tile of activations and weights."""
        return (TILE_M + self.columns(phase)) * memory.ROW_BYTES

    def stages(self, phase: str) -> int:
        """Stages of a product's ring: as many as fit."""
        fixed = sum(padded(size) for _, size, _ in self.other_regions) + memory.TILE_ALIGNMENT
        return min((MAX_SMEM_PER_CTA - fixed) // self.stage_bytes(phase), self.tiles.stages)

    @property
    def ring_bytes(self) -> int:
        rings = [self.stages(phase) * self.stage_bytes(phase) for phase in self.products]
        return max(*rings, self.router_bytes) if self.multiplies else 0

    @property
    def router_bytes(self) -> int:
        """Bytes of the router's weights in the fused kernel's ring."""
        return ROUTER_WIDTH * self.d_model * BF16_BYTES if self.fused else 0

    @property
    def group_k(self) -> int:
        """K tiles of down that GROUP_TILES column tiles of up produce."""
        return GROUP_TILES * self.tiles.up_n // 2 // K_TILE

    @property
    def a_box(self) -> tuple[int, int]:
        """(K, ROW) of one load: this CTA's part of the activations that cluster_n CTAs share."""
        return (K_TILE, TILE_M // self.tiles.cluster_n)

    def b_box(self, phase: str) -> tuple[int, int]:
        """(K, COLUMN) of one load: this CTA's part of the weights that cluster_m CTAs share."""
        return (K_TILE, self.columns(phase) // self.tiles.cluster_m)

    @property
    def sharers(self) -> int:
        """CTAs that write into each other's stages, including this one."""
        return self.tiles.cluster_m + self.tiles.cluster_n - 1

    # Tensor memory (sm100): one accumulator.

    @property
    def accumulator_columns(self) -> int:
        if self.arch == "sm90":
            return 0
        return memory.tmem_allocation(self.columns(self.phase))

    # Shared memory.

    @property
    def term_pitch(self) -> int:
        """bf16 from one row of terms to the next."""
        return self.d_model + TERM_PADDING

    @property
    def other_regions(self) -> tuple[tuple[str, int, str], ...]:
        """All of ``smem_regions`` except the ring."""
        rows = GROUP_ROWS * TERMS
        terms = rows * self.term_pitch * BF16_BYTES if self.routes else 0
        z = GROUP_ROWS * ROUTER_WIDTH * FP32_BYTES if self.routes else 0
        return (
            ("barriers", BARRIER_BYTES if self.multiplies else 0, "mbarriers and the TMEM address"),
            ("terms", terms, f"[{rows}, {self.d_model}] of normalised rows, each number as two bf16"),
            ("z", z, f"[{GROUP_ROWS}, {ROUTER_WIDTH}] fp32, before 1 / RMS"),
            ("sums", self.sums_bytes, "what warps add up: of rows, or of the collapse"),
        )

    @property
    def smem_regions(self) -> tuple[tuple[str, int, str], ...]:
        """(region, bytes, contents) of shared memory."""
        if not self.multiplies:
            return self.other_regions
        found = [
            f"{phase}: {self.stages(phase)} x [{TILE_M} + {self.columns(phase)}, {K_TILE}] of activations and weights"
            for phase in self.products
        ]
        if self.fused:
            found.append(f"[{ROUTER_WIDTH}, {self.d_model}] of the router's weights")
        return (
            *self.other_regions,
            ("ring", self.ring_bytes, "in turn " + "; ".join(found) + "; 128-byte swizzle"),
        )

    @property
    def sums_bytes(self) -> int:
        """Bytes for sums; the collapse needs a pooled tile for each warp."""
        if self.fused or self.phase in COLLAPSE_PHASES:
            return WARPS * SLOTS * POOL_COLUMNS * FP32_BYTES
        return 0 if self.multiplies else 2 * WARPS * FP32_BYTES

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory, including what alignment may take."""
        found = sum(padded(size) for _, size, _ in self.smem_regions)
        return found + (memory.TILE_ALIGNMENT if self.multiplies else 0)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier: who arrives, how often, who waits, what then holds."""
        found = []
        for phase in self.products:
            stages = self.stages(phase)
            if self.arch == "sm100":
                found += [
                    Barrier(f"{phase}_full", stages, 1, LOAD, "MMA warp", "the stage's K tile is here"),
                    Barrier(
                        f"{phase}_empty", stages, 1, "MMA warp, commit", "load warp", "the MMAs have read it"
                    ),
                    Barrier("accumulator_full", 1, 1, "MMA warp, commit", "epilogue", "a tile is summed up"),
                    Barrier("accumulator_empty", 1, 4, "epilogue, a warp", "MMA warp", "it has been read"),
                ]
            else:
                found += self.ring_barriers(phase, stages, "the stage's K tile is here")
        if self.fused:
            found += self.ring_barriers("router", 1, "the router's weights are here")
        return tuple(found)

    def ring_barriers(self, name: str, stages: int, meaning: str) -> list[Barrier]:
        """full and empty of one of the rings (sm90)."""
        loads = "load warps of the CTA and of those that share its tiles, expect_tx + TMA bytes"
        readers = "consumers of the CTAs that this one loads for, a thread a warp"
        arrivals = WARPS * self.sharers
        return [
            Barrier(f"{name}_full", stages, 1, loads, "consumers", meaning),
            Barrier(f"{name}_empty", stages, arrivals, readers, "load warp", "all of them have read it"),
        ]
