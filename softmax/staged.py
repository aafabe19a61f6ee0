"""Rows staged in shared memory by the bulk copy engine, many CTAs to an SM. One kernel, sm_90a and sm_100a.

A row, or a cluster's CTA's share of it, is one bulk copy into shared memory, which takes no registers while it is
under way: an SM has as many bytes in flight as fit its shared memory. Every thread then reads its vectors from
there twice. (Writing results back by bulk copies was no faster, for rows that start anywhere either.)
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.common.tma import bulk_load
from warpspec.softmax.online import absorb, exponential, scale, state_of
from warpspec.softmax.reduction import STATE_WORDS, ClusterReduction, join_row
from warpspec.softmax.vectors import (
    PLAIN,
    WORDS,
    blank,
    edge_in_group,
    load_edge,
    read_shared,
    row_span,
    share_in_cluster,
    store_edge,
    store_vector,
)

# Of an SM's L1 and shared memory, as shared memory: all it can have.
SMEM_CARVEOUT_PERCENT = 100
MOST_AT_ONCE = 6  # fp32 vectors of a thread


@dataclass(frozen=True)
class StagedConfig:
    """dtype, cluster, edges, store_bytes: as RowsConfig. threads: a CTA, whole warps. vectors: 16-byte vectors a
    thread; threads * vectors * cluster bound the row. ctas_per_sm: that an SM must have registers for. dependent: as
    RowsConfig."""

    dtype: str
    threads: int
    cluster: int
    vectors: int
    edges: bool
    ctas_per_sm: int = 1
    store_bytes: int = VECTOR_BYTES
    dependent: bool = False

    @property
    def warps(self) -> int:
        return self.threads // WARP_THREADS

    @property
    def share(self) -> int:
        """Vectors that a CTA has room for."""
        return self.threads * self.vectors

    @property
    def one_by_one(self) -> bool:
        """Whether results are computed one vector after another: all at once would take too many registers."""
        return self.edges or (self.dtype == "float32" and self.vectors > MOST_AT_ONCE)


class Staged:
    """``cute.compile(Staged(config), x, out, stream)``."""

    def __init__(self, config: StagedConfig):
        self.config = config

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: CUstream):
        """x, out: (ROW, ELEMENT), elements contiguous; may be the same memory."""
        config = self.config
        self.kernel(x, out).launch(
            grid=(x.shape[0] * config.cluster, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1) if cutlass.const_expr(config.cluster > 1) else None,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
            use_pdl=config.dependent,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        config = self.config
        dtype = config.dtype
        accurate = dtype == "float32"
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()

        # 1. Shared memory: the share, the barrier of its arrival, states of the warps.
        smem = cutlass.memory.SmemAllocator()
        staged = smem.allocate_tensor(Int32, cute.make_layout((WORDS, config.share)), byte_alignment=128)
        arrived = smem.allocate_array(Int64, 1)
        slots = smem.allocate_tensor(
            Float32, cute.make_layout((STATE_WORDS, config.cluster * config.warps)), byte_alignment=16
        )
        reduction = None
        if cutlass.const_expr(config.cluster > 1):
            full = smem.allocate_array(Int64, 1)
            reduction = ClusterReduction(slots, full, config.cluster, config.warps, accurate)

        # 2. One thread sends for the share; the edges come in on the side.
        row_index = block // config.cluster
        row = row_span(x, row_index, dtype, config.edges)
        begin, end = share_in_cluster(row, config.cluster)
        size = cutlass.max(end - begin, 0)
        if thread == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, size * VECTOR_BYTES)
        cute.arch.griddepcontrol_wait()  # for the launch before, which may have written x or be reading out
        if (thread == 0) & (size > 0):
            source = row.first + Int64(begin) * VECTOR_BYTES
            bulk_load(staged.iterator, source, size * VECTOR_BYTES, arrived)
        if cutlass.const_expr(config.cluster > 1):
            reduction.open(thread)
        edge = None
        maximum, total = -Float32.inf, Float32(0.0)
        if cutlass.const_expr(config.edges):
            edge = edge_in_group(row, thread, config.threads, block % config.cluster, dtype)
            maximum, total = state_of(load_edge(row, edge, dtype), accurate)
        cute.arch.sync_threads()  # the barrier is set up
        cute.arch.mbarrier_wait(arrived, 0)

        # 3. Maximum and sum: of the thread, of the row.
        for i in cutlass.range_constexpr(config.vectors):
            vector = i * config.threads + thread
            words = read_shared(staged, vector)
            blank(words, vector < size, dtype)
            maximum, total = absorb((maximum, total), words, dtype)
        maximum, total = join_row((maximum, total), slots, reduction, config.warps, accurate)
        inverse = Float32(1.0) / total

        # 4. Scale and store.
        cute.arch.griddepcontrol_launch_dependents()  # the next one comes up under the stores, not beside the loads
        target = row_span(out, row_index, dtype, False)
        destination = row.first + (target.address - row.address) + Int64(begin + thread) * VECTOR_BYTES
        for i in cutlass.range_constexpr(config.vectors):
            vector = i * config.threads + thread
            words = read_shared(staged, vector)
            if cutlass.const_expr(config.one_by_one):
                cute.arch.sync_warp()  # nothing of a vector is begun before the last one is stored
            scale(words, maximum, inverse, dtype)
            offset, present = i * config.threads * VECTOR_BYTES, Boolean(vector < size)
            store_vector(words, destination, offset, present, config.store_bytes, PLAIN)
        if cutlass.const_expr(config.edges):
            value = exponential(load_edge(row, edge, dtype) - maximum, accurate) * inverse
            store_edge(target, edge, value, dtype)
