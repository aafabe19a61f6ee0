"""The backward kernel for sm_100a: tiles, warp roles, memory budgets, barrier table. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common import memory
from warpspec.common.barriers import MBARRIER_BYTES, Barrier, barrier_count
from warpspec.common.hardware import (
    FP32_BYTES,
    MAX_SMEM_PER_CTA,
    TMEM_COLUMNS,
    WARP_THREADS,
    WARPGROUP_THREADS,
)
from warpspec.fmha.backward.features import BackwardKernel, common_fields
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.config import check_requests
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.tiles import ELEMENT_BYTES

TILE_N = 128  # keys of a tile: rows of S^T, lanes of tensor memory
TILE_M = {64: 128, 128: 128, 256: 64, 512: 64}  # queries of a tile, by D
WIDTH = 128  # most columns of dK, dV and dQ that a CTA makes: more do not fit tensor memory
CLUSTER_DIM = 512  # from this D on, CTAs of a key tile form a cluster: one cannot hold K and V (``share``)
BARRIER_BYTES = 1024  # room for the mbarriers and the address of tensor memory: what follows is aligned to it


@dataclass(frozen=True)
class BackwardConfig(memory.TensorMemoryWarps, BackwardKernel):
    """Compile-time shape of one kernel. tile_m: queries of a tile. q_stages, do_stages: stages of the rings of Q and of
    dO."""

    tile_m: int = 128
    q_stages: int = 1
    do_stages: int = 1

    def __post_init__(self):
        assert self.smem_bytes <= MAX_SMEM_PER_CTA
        assert self.tmem_columns <= TMEM_COLUMNS
        assert barrier_count(self.barriers) * 8 < BARRIER_BYTES

    @classmethod
    def of(cls, problem: BackwardProblem) -> BackwardConfig:
        """The kernel for a problem. UnsupportedProblem names what the kernel does not support."""
        dim = problem.forward.head_dim
        check_requests("sm100", problem.forward)
        stages = 2 if dim == BLOCK else 1
        return cls(**common_fields(problem), tile_m=TILE_M[dim], q_stages=stages, do_stages=stages)

    @property
    def tile_n(self) -> int:
        """Keys of a tile."""
        return TILE_N

    @property
    def width(self) -> int:
        """Columns of dK, dV and dQ that a CTA makes. Each CTA of a key tile makes all of P and dS, unless they share
        them."""
        return min(self.heads.qk, WIDTH)

    @property
    def room(self) -> int:
        return self.width if self.heads.qk >= CLUSTER_DIM else self.heads.qk

    @property
    def made_queries(self) -> int:
        """Queries of a block of 64 for which a thread makes P and dS at a time."""
        return BLOCK // self.column_groups if self.clustered else BLOCK

    @property
    def sent_sums_bytes(self) -> int:
        """Bytes of partial sums of S, or of dP, that a CTA gets from another one in a step."""
        return self.tile_n * self.made_queries * FP32_BYTES if self.clustered else 0

    @property
    def sent_results_bytes(self) -> int:
        """Bytes of P, or dS, that a CTA gets from another one in a step."""
        return self.tile_n * self.made_queries * ELEMENT_BYTES if self.clustered else 0

    @property
    def transposed_dq(self) -> bool:
        """Whether dQ's accumulator has columns as lanes (transposed) rather than queries."""
        return self.width == WIDTH

    # Warps 0 to 3 are the key warps: a thread has one key.

    @property
    def threads(self) -> int:
        return WARPGROUP_THREADS + 2 * WARP_THREADS

    # Tensor memory, first columns. P lies where S was, dS where dP was; dQ, once dV has been issued, over P.

    tmem_s = 0
    tmem_dp = TILE_N
    tmem_dv = 2 * TILE_N

    @property
    def tmem_dk(self) -> int:
        return self.tmem_dv + self.width

    @property
    def tmem_columns(self) -> int:
        return self.tmem_dk + self.width

    @property
    def smem_regions(self) -> tuple[memory.Region, ...]:
        """Shared memory, in order."""
        return (
            memory.barrier_region(self.barriers, BARRIER_BYTES // MBARRIER_BYTES - 1),
            memory.TMEM_ADDRESS,
            *self.operand_regions,
            memory.tile_region("ds", self.ds_bytes, "dS", f"transposed [{self.tile_n}, {self.tile_m}]"),
            memory.Region(
                "sums",
                2 * (self.column_groups - 1) * self.sent_sums_bytes,
                "uint8",
                memory.TILE_ALIGNMENT,
                "S, dP",
                "other CTAs' partial sums",
            ),
            memory.Region(
                "results",
                2 * (self.column_groups - 1) * self.sent_results_bytes,
                "uint8",
                memory.TILE_ALIGNMENT,
                "P, dS",
                "of other CTAs' queries",
            ),
        )

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier: who arrives, how often, who waits, and what then holds."""
        load, filled = "load warp", "load warp, expect_tx + TMA bytes"
        mma, keys, every = "MMA warp", "key warps", WARPGROUP_THREADS
        both = "MMA and key warps"
        reader = keys if self.scatters else mma
        clean = Barrier("clean", 1, every, keys, mma, "the step's tiles are there, what nobody sees is zero")
        dq_empty = Barrier("dq_empty", 1, every, keys, mma, "dQ has been read")
        from_others = "key warps, expect_tx + bytes of other CTAs' stores"
        shared = (
            Barrier("sums_there", 1, 1, from_others, keys, "other CTAs' partial sums are in shared memory"),
            Barrier("results_there", 1, 1, from_others, keys, "P and dS of other CTAs are in shared memory"),
        )
        return (
            *(shared if self.clustered else ()),
            Barrier("k_full", 1, 1, filled, reader, "K is in shared memory"),
            Barrier("v_full", 1, 1, filled, reader, "V is in shared memory"),
            Barrier(
                "q_full", self.q_stages, 1, filled, keys if self.scatters else both,
                "Q and statistics are in shared memory",
            ),
            Barrier(
                "q_empty", self.q_stages, 1, "MMA warp, commit", load,
                "S and dK have read Q, dP and dV the dO that came with it",
            ),
            Barrier("do_full", self.do_stages, 1, filled, reader, "dO is in shared memory"),
            clean if self.scatters else dq_empty,
            Barrier("s_full", 1, 1, "MMA warp, commit", keys, "S and dP are in tensor memory"),
            Barrier("ds_full", 1, every, keys, mma, "P and dS are where products read them"),
            Barrier(
                "dv_done", 1, 1, "MMA warp, commit", mma, "dV's products have read P: dQ may take its place"
            ),
            Barrier(
                "step_done", 1, 1, "MMA warp, commit", both, "dQ is in tensor memory, all products are done"
            ),
        )  # fmt: skip
