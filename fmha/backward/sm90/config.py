"""The backward kernel for sm_90a: tiles, warp roles, memory budgets, barrier table. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import (
    MAX_SMEM_PER_CTA,
    REGISTERS_PER_SM,
    WARP_THREADS,
    WARPGROUP_THREADS,
)
from warpspec.common.pipeline import Barrier, barrier_count
from warpspec.fmha.backward.features import PART_ELEMENTS, BackwardFeatures, backward_features
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.features import BLOCK, ELEMENT_BYTES, FP32_BYTES, check_requests

CONSUMERS = 2  # warpgroups
CONSUMER_KEYS = 64
TILE_M = {64: 128, 128: 64, 256: 64}  # queries of a tile, by D
PAIRED_DIM = 256  # from which on both consumers have the same keys: one makes P and dV, the other dS and dK
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
BARRIER_BYTES = 1024  # room for the mbarriers: what follows is aligned to it
CONSUMER_BARRIER = 1  # named barrier of both consumers: dS is in shared memory, or rows have been cleared
P_BARRIER = 2  # named barrier of paired consumers: P is in shared memory


@dataclass(frozen=True)
class BackwardConfig(BackwardFeatures):
    """Compile-time shape of one kernel. tile_m: queries of a tile. q_stages, do_stages: query tiles whose Q, dO have
    room."""

    tile_m: int = 64
    q_stages: int = 3
    do_stages: int = 2

    def __post_init__(self):
        super().__post_init__()
        assert self.parts == CONSUMERS * self.consumer_parts
        assert self.smem_bytes <= MAX_SMEM_PER_CTA
        registers = CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS
        assert registers * WARPGROUP_THREADS <= REGISTERS_PER_SM
        assert barrier_count(self.barriers) * 8 <= BARRIER_BYTES

    @classmethod
    def of(cls, problem: BackwardProblem) -> BackwardConfig:
        """The kernel for a problem. UnsupportedProblem names what it does not do."""
        forward = problem.forward
        if forward.head_dim not in TILE_M:
            raise UnsupportedProblem(
                f"sm90 attention: gradients of head size {forward.head_dim} are not supported, only of {tuple(TILE_M)}"
            )
        check_requests("sm90", forward)
        dim = forward.head_dim
        return cls(**backward_features(problem), tile_m=TILE_M[dim], q_stages=2 if dim >= PAIRED_DIM else 3)

    @property
    def paired(self) -> bool:
        """Both consumers have the tile's keys: one makes P and dV, the other dS and dK (``pair``)."""
        return self.head_dim >= PAIRED_DIM

    @property
    def tile_n(self) -> int:
        """Keys of a tile."""
        return CONSUMER_KEYS if self.paired else CONSUMERS * CONSUMER_KEYS

    @property
    def consumer_parts(self) -> int:
        """Parts of dQ that a consumer makes."""
        return 2 if self.paired else 1

    # Warp roles: consumer warpgroups, then the producer's, of which one warp works.

    @property
    def threads(self) -> int:
        return (CONSUMERS + 1) * WARPGROUP_THREADS

    @property
    def load_warp(self) -> int:
        return CONSUMERS * WARPGROUP_THREADS // WARP_THREADS

    @property
    def consumer_threads(self) -> int:
        return CONSUMERS * WARPGROUP_THREADS

    # Shared memory, in bytes.

    @property
    def keys_in_registers(self) -> bool:
        """K and V are operands of S and dP from registers, which saves reading them from shared memory each time."""
        return self.head_dim == BLOCK

    @property
    def overlaps_dv(self) -> bool:
        """dS is made while dV's products run: P and dS then have registers of their own."""
        return self.head_dim == BLOCK

    @property
    def ds_stages(self) -> int:
        return 2 if self.wants_q else 0

    @property
    def dq_bytes(self) -> int:
        """dQ of a step."""
        return self.parts * PART_ELEMENTS * FP32_BYTES if self.wants_q and not self.paired else 0

    @property
    def p_bytes(self) -> int:
        """P of a step, where one consumer hands it to the other."""
        return self.tile_m * self.tile_n * ELEMENT_BYTES if self.paired else 0

    @property
    def smem_regions(self) -> tuple[tuple[str, int, str], ...]:
        """(region, bytes, what stands in it), in order."""
        return (
            ("barriers", BARRIER_BYTES, f"{barrier_count(self.barriers)} mbarriers"),
            *self.operand_regions,
            (
                "dS",
                self.ds_stages * self.ds_bytes,
                f"{self.ds_stages} x transposed [{self.tile_n}, {self.tile_m}], 128-byte swizzle",
            ),
            ("dQ", self.dq_bytes, "a step's, fp32, on its way to global memory"),
            ("P", self.p_bytes, "for dS, fp16, in the order of wgmma's registers"),
        )

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier: who arrives, how often, who waits, what then holds."""
        load, filled = "load warp", "load warp, expect_tx + TMA bytes"
        warps, warp = self.consumer_threads // WARP_THREADS, "consumers, one thread a warp"
        return (
            Barrier("k_full", 1, 1, filled, "consumers", "K is in shared memory"),
            Barrier("v_full", 1, 1, filled, "consumers", "V is in shared memory"),
            Barrier("q_full", self.q_stages, 1, filled, "consumers", "Q and statistics are in shared memory"),
            Barrier("q_empty", self.q_stages, warps, warp, load, "S and dK have read Q, dS the statistics"),
            Barrier("do_full", self.do_stages, 1, filled, "consumers", "dO is in shared memory"),
            Barrier("do_empty", self.do_stages, warps, warp, load, "dP and dV have read dO"),
        )
