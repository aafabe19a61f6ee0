"""Rows staged in shared memory by the bulk copy engine, many CTAs to an SM. One kernel for sm_90a and sm_100a.

A row, or the share of it that a CTA of a cluster has, is one bulk copy to shared memory. Copies in flight need no
registers, so an SM can have as many bytes in flight as fit its shared memory. Every thread then reads its vectors from
there twice, or three times (``once``). Writing the results back by bulk copies was not faster, not even for rows that
start anywhere.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.device.tma import bulk_load
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.softmax.host import SoftmaxHost
from warpspec.softmax.online import (
    absorb,
    exponential,
    exponentiate,
    largest,
    reference_of,
    scale,
    state_of,
)
from warpspec.softmax.reduction import (
    STATE_WORDS,
    ClusterReduction,
    NumberReductions,
    join_row,
    warp_maximum,
    warp_sum,
)
from warpspec.softmax.vectors import (
    MINUS_INFINITY,
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

# Per cent of L1 and shared memory that are used as shared memory: all.
SMEM_CARVEOUT_PERCENT = 100
MOST_AT_ONCE = 6  # fp32 vectors of a thread


@dataclass(frozen=True)
class StagedConfig:
    """Configuration of the kernel.

    dtype, cluster, edges, store_bytes, dependent: as in RowsConfig. threads: of a CTA, whole warps. vectors: 16-byte
    vectors a thread; a row has at most threads * vectors * cluster of them. ctas_per_sm: CTAs whose registers must fit
    an SM. once: compute exponentials once, when the row's maximum is known, and keep them in shared memory until the
    sum is known. For fp32 an exponential takes nine instructions, more than another reduction over the row costs.
    """

    dtype: str
    threads: int
    cluster: int
    vectors: int
    edges: bool
    ctas_per_sm: int = 1
    store_bytes: int = VECTOR_BYTES
    dependent: bool = False
    once: bool = False

    def __post_init__(self):
        if self.once and (self.dtype != "float32" or self.edges):
            raise ValueError("once: of fp32 rows that start and end on 16-byte boundaries")

    @property
    def warps(self) -> int:
        return self.threads // WARP_THREADS

    @property
    def share(self) -> int:
        """Vectors that fit a CTA."""
        return self.threads * self.vectors

    @property
    def one_by_one(self) -> bool:
        """Whether results are computed vector by vector, because all at once would take too many registers."""
        return self.edges or (self.dtype == "float32" and self.vectors > MOST_AT_ONCE)


class Staged(SoftmaxHost):
    """The kernel of one ``StagedConfig``."""

    carveout = SMEM_CARVEOUT_PERCENT

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        config = self.config
        dtype = config.dtype
        accurate = dtype == "float32"
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()

        # 1. Shared memory: the share, the barrier for its arrival, the warps' states.
        smem = cutlass.memory.SmemAllocator()
        staged = smem.allocate_tensor(Int32, cute.make_layout((WORDS, config.share)), byte_alignment=128)
        arrived = smem.allocate_array(Int64, 1)
        warps = config.cluster * config.warps
        states, reduction = None, None
        if cutlass.const_expr(config.once):
            full = smem.allocate_array(Int64, NumberReductions.ROUNDS)
            shape = (warps, NumberReductions.ROUNDS)
            states = smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)
            reduction = NumberReductions(states, full, config.cluster, config.warps)
        else:
            shape = (STATE_WORDS, warps)
            states = smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)
            if cutlass.const_expr(config.cluster > 1):
                full = smem.allocate_array(Int64, 1)
                reduction = ClusterReduction(states, full, config.cluster, config.warps, accurate)

        # 2. One thread issues the copy of the share; the edges are loaded separately.
        row_index = block // config.cluster
        row = row_span(x, row_index, dtype, config.edges)
        begin, end = share_in_cluster(row, config.cluster)
        size = cutlass.max(end - begin, 0)
        if thread == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, size * VECTOR_BYTES)
        cute.arch.griddepcontrol_wait()  # the previous launch may have written x, or may still read out
        if (thread == 0) & (size > 0):
            source = row.first + Int64(begin) * VECTOR_BYTES
            bulk_load(staged.iterator, source, size * VECTOR_BYTES, arrived)
        if cutlass.const_expr(reduction is not None):
            reduction.open(thread)
        edge, edge_value = None, -Float32.inf
        if cutlass.const_expr(config.edges):
            edge = edge_in_group(row, thread, config.threads, block % config.cluster, dtype)
            edge_value = load_edge(row, edge, dtype)
        cute.arch.sync_threads()  # the barrier is initialised
        cute.arch.mbarrier_wait(arrived, 0)

        # 3. Maximum and sum of the row.
        if cutlass.const_expr(config.once):
            maximum, total = exponentiate_share(config, staged, size, thread, reduction)
        else:
            maximum, total = state_of_share(config, staged, size, thread, edge_value, states, reduction)
        inverse = Float32(1.0) / total

        # 4. Scale and store.
        # The next launch starts during the stores, not during the loads.
        cute.arch.griddepcontrol_launch_dependents()
        target = row_span(out, row_index, dtype, False)
        destination = row.first + (target.address - row.address) + Int64(begin + thread) * VECTOR_BYTES
        for i in cutlass.range_constexpr(config.vectors):
            vector = i * config.threads + thread
            words = read_shared(staged, vector)
            if cutlass.const_expr(config.one_by_one):
                cute.arch.sync_warp()  # finish storing one vector before the next begins
            if cutlass.const_expr(config.once):
                numbers = cute.recast_tensor(words, Float32)
                numbers.store(numbers.load() * inverse)
            else:
                scale(words, maximum, inverse, dtype)
            offset, present = i * config.threads * VECTOR_BYTES, Boolean(vector < size)
            store_vector(words, destination, offset, present, config.store_bytes, PLAIN)
        if cutlass.const_expr(config.edges):
            value = exponential(load_edge(row, edge, dtype) - maximum, accurate) * inverse
            store_edge(target, edge, value, dtype)


@cute.jit
def state_of_share(config: cutlass.Constexpr, staged, size, thread, edge_value, states, reduction) -> tuple:
    """(maximum, sum) of the row: joins the states of all threads, each relative to its own maximum."""
    accurate = config.dtype == "float32"
    maximum, total = -Float32.inf, Float32(0.0)
    if cutlass.const_expr(config.edges):
        maximum, total = state_of(edge_value, accurate)
    for i in cutlass.range_constexpr(config.vectors):
        vector = i * config.threads + thread
        words = read_shared(staged, vector)
        blank(words, vector < size, config.dtype)
        maximum, total = absorb((maximum, total), words, config.dtype)
    return join_row((maximum, total), states, reduction, config.warps, accurate)


@cute.jit
def exponentiate_share(config: cutlass.Constexpr, staged, size, thread, reduction) -> tuple:
    """(maximum, sum) of the row; the share in shared memory is replaced by exponentials relative to that maximum."""
    for i in cutlass.range_constexpr(config.vectors):
        vector = i * config.threads + thread
        if vector >= size:
            for word in cutlass.range_constexpr(WORDS):
                staged[word, vector] = Int32(cutlass.Uint32(MINUS_INFINITY["float32"]))
    maximum = -Float32.inf
    for i in cutlass.range_constexpr(config.vectors):
        words = read_shared(staged, i * config.threads + thread)
        maximum = largest(cute.recast_tensor(words, Float32), maximum)
    maximum = reduction.all(warp_maximum(maximum, WARP_THREADS), 0, cute.arch.fmax, -math.inf)
    reference = reference_of(maximum)
    total = Float32(0.0)
    for i in cutlass.range_constexpr(config.vectors):
        words = read_shared(staged, i * config.threads + thread)
        total += exponentiate(cute.recast_tensor(words, Float32), reference, True)
        cute.autovec_copy(words, staged[None, i * config.threads + thread])
    return maximum, reduction.all(warp_sum(total, WARP_THREADS), 1, operator.add, 0.0)
