"""What one grouped GEMM of sm_90a is compiled for: tiles, ring, budgets, barriers. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common import tma
from warpspec.common.hardware import (
    MAX_SMEM_PER_CTA,
    REGISTERS_PER_SM,
    SMEM_PER_SM,
    SMEM_RESERVED_PER_CTA,
    WARP_THREADS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
)
from warpspec.common.nvfp4 import BLOCK, MX_BLOCK
from warpspec.common.pipeline import MBARRIER_BYTES, Barrier, barrier_count
from warpspec.moe.streamed import CHUNK, CHUNK_BYTES, STEP_CHUNKS, scale_bytes

ELEMENT_BYTES = 2  # bf16
FP32_BYTES = 4
EPILOGUES = ("linear", "swiglu", "swiglu_oai")
BARRIER_BYTES = 512
WARPS = WARPGROUP_THREADS // WARP_THREADS  # of a consumer
STAGE_STEPS = 2  # of K in a stage of the ring
STAGE_CHUNKS = STAGE_STEPS * STEP_CHUNKS
STAGE_K = STAGE_CHUNKS * CHUNK
ROW_BYTES = STAGE_K * ELEMENT_BYTES  # of a token in a stage: 16 bytes for each lane of a warp
MOST_STAGES = 24  # whose barriers have room
TOKENS = (8, 16, 32, 64, 128)  # N


@dataclass(frozen=True)
class Shape:
    """Tiles: 64 features for each of row_groups, so many tokens; stages of the ring; CTAs an SM. splits: consumers that
    take turns at the stages of the same features."""

    row_groups: int = 1
    tokens: int = 8
    stages: int = 4
    ctas_per_sm: int = 3
    load_warps: int = 1
    splits: int = 1

    def __str__(self):
        splits = f" {self.splits} splits" if self.splits > 1 else ""
        return f"{64 * self.row_groups}x{self.tokens} {self.stages} stages {self.ctas_per_sm} an SM{splits}"


@dataclass(frozen=True)
class StreamConfig:
    """Compile-time shape of one grouped GEMM.

    block: values that share a scale. gathers: the rows' tokens are looked up. ordered: results are written as the next
    GEMM's activations. early: the launch before the last has made all but the activations: weights are loaded at once.
    """

    shape: Shape = Shape()
    block: int = BLOCK
    epilogue: str = "linear"
    has_limit: bool = False
    has_bias: bool = False
    gathers: bool = False
    ordered: bool = False
    early: bool = False

    def __post_init__(self):
        shape = self.shape
        assert self.epilogue in EPILOGUES and self.block in (BLOCK, MX_BLOCK)
        assert shape.tokens in TOKENS and shape.row_groups in (1, 2, 4)
        assert shape.stages <= MOST_STAGES and self.consumers in (1, 2, 4)
        assert shape.tokens <= WARP_THREADS * shape.load_warps
        assert self.smem_bytes <= MAX_SMEM_PER_CTA, (self.smem_bytes, shape)
        assert shape.ctas_per_sm * (self.smem_bytes + SMEM_RESERVED_PER_CTA) <= SMEM_PER_SM
        assert barrier_count(self.barriers) * MBARRIER_BYTES <= BARRIER_BYTES
        assert shape.ctas_per_sm * self.threads * self.registers <= REGISTERS_PER_SM

    @property
    def gated(self) -> bool:
        return self.epilogue != "linear"

    @property
    def consumers(self) -> int:
        return self.shape.row_groups * self.shape.splits

    @property
    def threads(self) -> int:
        return self.consumers * WARPGROUP_THREADS + self.shape.load_warps * WARP_THREADS

    @property
    def load_warp(self) -> int:
        """The first of them."""
        return self.consumers * WARPS

    @property
    def registers(self) -> int:
        """Of a thread, at least: the accumulator, two chunks of weights, what is decoded."""
        return self.shape.tokens // 2 + 86

    # Shared memory.

    @property
    def scale_bytes(self) -> int:
        """Of a step and row group."""
        return scale_bytes(self.block)

    @property
    def step_bytes(self) -> int:
        """Of a step and row group."""
        return self.scale_bytes + STEP_CHUNKS * CHUNK_BYTES

    @property
    def weight_bytes(self) -> int:
        """Of a stage and row group."""
        return STAGE_STEPS * self.step_bytes

    @property
    def token_bytes(self) -> int:
        """Of a stage."""
        return self.shape.tokens * ROW_BYTES

    @property
    def sums_bytes(self) -> int:
        shape = self.shape
        return (shape.splits - 1) * shape.row_groups * WARPGROUP_ROWS * shape.tokens * FP32_BYTES

    @property
    def smem_regions(self) -> tuple[tuple[str, int, str], ...]:
        """(region, bytes, what stands in it)."""
        shape = self.shape
        weights = f"{shape.stages} x {shape.row_groups} x {STAGE_STEPS} steps of 64 features: scales, codes"
        tokens = f"{shape.stages} x [{STAGE_CHUNKS}, {shape.tokens}, 64] of activations, 128-byte swizzle"
        return (
            ("barriers", BARRIER_BYTES, "mbarriers"),
            ("weights", shape.stages * shape.row_groups * self.weight_bytes, weights),
            ("tokens", shape.stages * self.token_bytes, tokens),
            ("sums", self.sums_bytes, "of all splits but the first, in fp32"),
        )

    @property
    def smem_bytes(self) -> int:
        """With the room that alignment may take."""
        return sum(size for _, size, _ in self.smem_regions) + tma.TILE_ALIGNMENT

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier: who arrives, how often, who waits, what then holds."""
        stages, warps = self.shape.stages, self.shape.load_warps
        return (
            Barrier(
                "full",
                stages,
                1 + warps * WARP_THREADS,
                "load warps: expect_tx + bytes of weights; every thread, once its copies of tokens are done",
                "consumers of the stage",
                "the stage's weights and tokens are here",
            ),
            Barrier(
                "empty",
                stages,
                self.shape.row_groups * WARPS,
                "consumers of the stage, a warp",
                "load warps",
                "it has been read",
            ),
        )
