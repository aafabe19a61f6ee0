"""Configuration of the grouped GEMM on sm_90a: tiles, ring, budgets, barriers. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common import memory
from warpspec.common.barriers import MBARRIER_BYTES, Barrier, barrier_count
from warpspec.common.hardware import (
    BF16_BYTES,
    FP32_BYTES,
    MAX_REGISTERS_PER_THREAD,
    MAX_SMEM_PER_CTA,
    REGISTER_STEP,
    REGISTERS_PER_SM,
    SMEM_PER_SM,
    SMEM_RESERVED_PER_CTA,
    VECTOR_BYTES,
    WARP_THREADS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
)
from warpspec.common.nvfp4 import MXFP4_BLOCK, NVFP4_BLOCK
from warpspec.moe.activations import EPILOGUES
from warpspec.moe.permute import Routing
from warpspec.moe.streamed import CHUNK_BYTES, STEP, STEP_CHUNKS, scale_bytes

BARRIER_BYTES = 512
LOAD_REGISTERS = 56
WEIGHT_REGISTERS = 16  # registers of a chunk's weights
WARPS = WARPGROUP_THREADS // WARP_THREADS  # warps of a consumer
STEP_ROW_BYTES = STEP * BF16_BYTES  # bytes of a token in a step
MOST_STAGES = 24  # the region of barriers has room for no more
TOKENS_MULTIPLE = 8  # N is a multiple of it
# Tiles of at least MANY_TOKENS have classes of entries, whose widths are CLASS_TOKENS apart.
MANY_TOKENS, CLASS_TOKENS = 32, 16


@dataclass(frozen=True)
class Shape:
    """Tiles of one kernel: ``row_groups`` groups of 64 features each, times ``tokens`` tokens.

    stages: stages of the ring. ctas_per_sm: CTAs an SM. load_warps: warps that load. splits: consumers that take turns
    at the stages of one row group (``relay``). tall: row groups of a consumer. steps: steps along K that a stage holds,
    1 or 2.
    """

    row_groups: int = 1
    tokens: int = 8
    stages: int = 4
    ctas_per_sm: int = 3
    load_warps: int = 1
    splits: int = 1
    tall: int = 1
    steps: int = 2

    def __str__(self):
        splits = f" {self.splits} splits" if self.splits > 1 else ""
        tall = " tall" if self.tall > 1 else ""
        stages = f"{self.stages} stages of {self.steps}"
        return f"{64 * self.row_groups}x{self.tokens}{tall} {stages} {self.ctas_per_sm} an SM{splits}"


def widths_of(tokens: int) -> tuple[int, ...]:
    """Widths of the classes of entries, the widest first.

    An entry belongs to the narrowest class that holds its rows, so that the products of few tokens take little time
    even in a kernel for many tokens.
    """
    return tuple(range(tokens, 0, -CLASS_TOKENS)) if tokens >= MANY_TOKENS else (tokens,)


@dataclass(frozen=True)
class StreamConfig:
    """Compile-time shape of one grouped GEMM.

    block: values that share a scale. choices: choices of a token, if rows are looked up by choice; 0: rows are the
    tokens. early: everything but the activations is older than the previous launch, so weights are loaded without
    waiting for that launch. keeps_fp32: for "w4a4", each token has a scale, and results stay fp32 because the next
    launch rounds them. routing: rows are not sorted, and a tile has one row; tokens that are looked up are put into the
    kernel's order while they are loaded.
    """

    shape: Shape = Shape()
    block: int = NVFP4_BLOCK
    epilogue: str = "linear"
    has_limit: bool = False
    has_bias: bool = False
    choices: int = 0
    early: bool = False
    keeps_fp32: bool = False
    routing: Routing | None = None

    def __post_init__(self):
        shape = self.shape
        assert self.epilogue in EPILOGUES and self.block in (NVFP4_BLOCK, MXFP4_BLOCK)
        assert shape.tokens % TOKENS_MULTIPLE == 0 and shape.row_groups in (1, 2, 4)
        assert self.routing is None or not self.keeps_fp32
        assert shape.stages <= MOST_STAGES and self.consumers in (1, 2, 4)
        assert self.smem_bytes <= MAX_SMEM_PER_CTA, (self.smem_bytes, shape)
        assert shape.ctas_per_sm * (self.smem_bytes + SMEM_RESERVED_PER_CTA) <= SMEM_PER_SM
        assert barrier_count(self.barriers) * MBARRIER_BYTES <= BARRIER_BYTES
        assert (
            shape.row_groups % shape.tall == 0
            and (shape.tall == 1 or shape.splits == 1)
            and shape.steps in (1, 2)
        )
        if self.role_registers:
            assert self.registers <= self.role_registers[0]
        else:
            assert shape.ctas_per_sm * self.threads * self.registers <= REGISTERS_PER_SM

    @property
    def gathers(self) -> bool:
        """Whether the rows' tokens are looked up by choice."""
        return self.choices > 0

    @property
    def first(self) -> bool:
        """Whether this is the first launch of the layer."""
        return self.routing is not None and self.gathers

    @property
    def gated(self) -> bool:
        return self.epilogue != "linear"

    @property
    def consumers(self) -> int:
        return self.shape.row_groups // self.shape.tall * self.shape.splits

    @property
    def threads(self) -> int:
        return self.consumers * WARPGROUP_THREADS + self.shape.load_warps * WARP_THREADS

    @property
    def load_warp(self) -> int:
        """The first load warp."""
        return self.consumers * WARPS

    @property
    def registers(self) -> int:
        """The least registers of a consumer's thread: the accumulator, two chunks of weights (a whole stage's if
        consumers take turns), and what is being decoded."""
        chunks = self.stage_chunks if self.shape.splits > 1 else 2
        others = 44 if self.shape.splits > 1 else 48
        return self.shape.tall * self.shape.tokens // 2 + chunks * WEIGHT_REGISTERS + others

    @property
    def role_registers(self) -> tuple[int, int] | None:
        """Registers (of a consumer's thread, of a load warp's thread) if whole warpgroups load, and can give registers
        up."""
        if self.shape.load_warps != WARPS:
            return None
        threads = REGISTERS_PER_SM // self.shape.ctas_per_sm // self.threads // REGISTER_STEP * REGISTER_STEP
        spare = (threads - LOAD_REGISTERS) * WARPGROUP_THREADS
        more = threads + spare // (self.consumers * WARPGROUP_THREADS) // REGISTER_STEP * REGISTER_STEP
        return min(more, MAX_REGISTERS_PER_THREAD // REGISTER_STEP * REGISTER_STEP), LOAD_REGISTERS

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the classes of entries, the widest first: the most tokens that their products are compiled for."""
        return widths_of(self.shape.tokens)

    @property
    def stage_chunks(self) -> int:
        """Chunks along K of a stage."""
        return self.shape.steps * STEP_CHUNKS

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in a stage."""
        return self.shape.steps * STEP_ROW_BYTES

    # Shared memory.

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a step and row group."""
        return scale_bytes(self.block)

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights of a step and row group, with their scales."""
        return self.scale_bytes + STEP_CHUNKS * CHUNK_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of a stage and row group."""
        return self.shape.steps * self.step_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the tokens of a stage."""
        return self.shape.tokens * self.row_bytes

    @property
    def sums_bytes(self) -> int:
        shape = self.shape
        return min(shape.splits - 1, 1) * shape.row_groups * WARPGROUP_ROWS * shape.tokens * FP32_BYTES

    @property
    def smem_regions(self) -> tuple[memory.Region, ...]:
        """Shared memory, in order."""
        shape = self.shape
        weights = f"{shape.stages} x {shape.row_groups} x {shape.steps} steps of 64 features: scales, codes"
        tokens = f"{shape.stages} x [{self.stage_chunks}, {shape.tokens}, 64] of activations"
        ring = shape.stages * shape.row_groups * self.weight_bytes
        return (
            memory.barrier_region(self.barriers, BARRIER_BYTES // MBARRIER_BYTES),
            memory.tile_region("tokens", shape.stages * self.token_bytes, "", tokens),
            memory.Region("weights", ring, "uint8", memory.ROW_BYTES, "", weights),
            memory.Region(
                "sums", self.sums_bytes, "uint8", VECTOR_BYTES, "", "between the turns of consumers, in fp32"
            ),
        )

    @property
    def smem_bytes(self) -> int:
        return memory.smem_bytes(self.smem_regions)

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
                self.consumers // self.shape.splits * WARPS,
                "consumers of the stage, a warp",
                "load warps",
                "it has been read",
            ),
        )
