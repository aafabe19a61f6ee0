"""Rows staged in shared memory by the bulk copy engine, many CTAs to an SM. One kernel for sm_90a and sm_100a.

One bulk copy brings a CTA's row, or its share of the row in a cluster, to shared memory. A CTA that has an SM to itself
uses several copies, and reads the first while the others are under way. Copies in flight need no registers, so an SM
can have as many bytes in flight as fit its shared memory. Every thread then reads its vectors twice from shared memory.
Writing the results back by bulk copies was not faster, not even for rows that start off a 16-byte boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.device.tma import bulk_load
from warpspec.common.hardware import LINE_BYTES, MAX_CLUSTER_CTAS, VECTOR_BYTES, WARP_THREADS
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
from warpspec.softmax.reduction import allocate_states, join_row
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

# Per cent of L1 and shared memory that are used as shared memory: all.
SMEM_CARVEOUT_PERCENT = 100
MOST_AT_ONCE = 6  # fp32 vectors of a thread
LINE_THREADS = MAX_CLUSTER_CTAS * LINE_BYTES // VECTOR_BYTES
LAST = 2  # vectors of a thread that its share of a row may lack (``once``); only of these is it asked
GROUP = 4  # vectors of a thread whose exponentials are relative to the same maximum (``once``)


@dataclass(frozen=True)
class StagedConfig:
    """Configuration of the kernel.

    dtype, cluster, edges, store_bytes, dependent: as in RowsConfig. threads: threads of a CTA, in whole warps. vectors:
    16-byte vectors a thread; a row has at most threads * vectors * cluster of them. ctas_per_sm: CTAs whose registers
    must fit an SM. once: compute each exponential once, relative to the maximum of what the thread has read so far,
    keep it in shared memory, and multiply by one factor for each GROUP of vectors at the end. This saves time for fp32,
    where an exponential takes nine instructions. Such a kernel takes only rows that leave no more than LAST vectors of
    a thread empty (``check_row``). copies: number of bulk copies that bring a share, each with the same number of
    vectors a thread.
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
    copies: int = 1

    def __post_init__(self):
        if not 1 <= self.copies <= self.vectors:
            raise ValueError(f"copies: must be from 1 to {self.vectors} (vectors), got {self.copies}")
        if self.once and (self.dtype != "float32" or self.edges):
            raise ValueError("once: of fp32 rows that start and end on 16-byte boundaries")

    def check_row(self, vectors: int) -> None:
        """Raise ValueError where ``once`` is set and rows of this many vectors do not fill the CTA."""
        share = -(-vectors // (self.cluster * self.step)) * self.step
        last = vectors - (self.cluster - 1) * share  # of the cluster's last CTA
        least = (self.vectors - LAST) * self.threads
        if self.once and last < least:
            raise ValueError(
                f"once: every CTA must have at least {least} vectors of a row, the last one has {last}"
            )

    @property
    def warps(self) -> int:
        return self.threads // WARP_THREADS

    @property
    def share(self) -> int:
        """Vectors that fit a CTA."""
        return self.threads * self.vectors

    @property
    def step(self) -> int:
        """Shares of several copies are multiples of this many vectors: a line of L2, if the last CTA then has as many
        as ``check_row`` wants."""
        return LINE_BYTES // VECTOR_BYTES if self.copies > 1 and self.threads >= LINE_THREADS else 1

    @property
    def copied(self) -> int:
        """Vectors of a thread in a bulk copy."""
        return -(-self.vectors // self.copies)

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

        # 1. Shared memory: the share, the barriers for its arrival, the warps' states.
        smem = cutlass.memory.SmemAllocator()
        staged = smem.allocate_tensor(Int32, cute.make_layout((WORDS, config.share)), byte_alignment=128)
        arrived = smem.allocate_array(Int64, config.copies)
        states, reduction = allocate_states(smem, config, accurate)

        # 2. One thread issues the copies of the share; the edges are loaded separately.
        row_index = block // config.cluster
        row = row_span(x, row_index, dtype, config.edges)
        begin, end = share_in_cluster(row, config.cluster, config.step)
        size = cutlass.max(end - begin, 0)
        copy_share(config, staged, arrived, row, begin, size, thread)
        if cutlass.const_expr(reduction is not None):
            reduction.open(thread)
        edge, edge_value = None, -Float32.inf
        if cutlass.const_expr(config.edges):
            edge = edge_in_group(row, thread, config.threads, block % config.cluster, dtype)
            edge_value = load_edge(row, edge, dtype)
        cute.arch.sync_threads()  # the barriers are initialised

        # 3. Maximum and sum of the row.
        references = ()
        if cutlass.const_expr(config.once):
            state, references = exponentiate_share(config, staged, arrived, size, thread)
        else:
            state = state_of_share(config, staged, arrived, size, thread, edge_value)
        maximum, total = join_row(state, states, reduction, config.warps, accurate)
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
                factor = exponential(references[i // GROUP] - reference_of(maximum), True) * inverse
                numbers = cute.recast_tensor(words, Float32)
                numbers.store(numbers.load() * factor)
            else:
                scale(words, maximum, inverse, dtype)
            offset, present = i * config.threads * VECTOR_BYTES, Boolean(vector < size)
            store_vector(words, destination, offset, present, config.store_bytes, PLAIN)
        if cutlass.const_expr(config.edges):
            value = exponential(load_edge(row, edge, dtype) - maximum, accurate) * inverse
            store_edge(target, edge, value, dtype)


@cute.jit
def copy_share(config: cutlass.Constexpr, staged: cute.Tensor, arrived, row, begin, size, thread):
    """Issue the bulk copies of a share to ``staged``, once the launch before has ended: ``size`` vectors of the row,
    from its vector ``begin`` on. Called by all threads. Produces ``arrived``, an mbarrier for each copy."""
    if thread == 0:
        for copy in cutlass.range_constexpr(config.copies):
            cute.arch.mbarrier_init(arrived + copy, 1)
        cute.arch.mbarrier_init_fence()
        for copy in cutlass.range_constexpr(config.copies):
            bytes_ = copy_size(config, size, copy) * VECTOR_BYTES
            cute.arch.mbarrier_arrive_and_expect_tx(arrived + copy, bytes_)
    cute.arch.griddepcontrol_wait()  # the previous launch may have written x, or may still read out
    for copy in cutlass.range_constexpr(config.copies):
        copied = copy_size(config, size, copy)
        if (thread == 0) & (copied > 0):
            first = copy * config.copied * config.threads
            source = row.first + Int64(begin + first) * VECTOR_BYTES
            bulk_load(staged[None, first].iterator, source, copied * VECTOR_BYTES, arrived + copy)


@cute.jit
def copy_size(config: cutlass.Constexpr, size, copy: cutlass.Constexpr):
    """Vectors of a share of ``size`` that a bulk copy brings."""
    if cutlass.const_expr(config.copies == 1):
        return size
    most = config.copied * config.threads
    return cutlass.max(cutlass.min(size - copy * most, most), 0)


@cute.jit
def await_vector(config: cutlass.Constexpr, arrived, i: cutlass.Constexpr):
    """Wait for the copy that brings every thread's i-th vector, unless an earlier one came by it."""
    if cutlass.const_expr(i % config.copied == 0):
        cute.arch.mbarrier_wait(arrived + i // config.copied, 0)


@cute.jit
def state_of_share(config: cutlass.Constexpr, staged, arrived, size, thread, edge_value) -> tuple:
    """(maximum, sum) of the thread's elements."""
    accurate = config.dtype == "float32"
    maximum, total = -Float32.inf, Float32(0.0)
    if cutlass.const_expr(config.edges):
        maximum, total = state_of(edge_value, accurate)
    for i in cutlass.range_constexpr(config.vectors):
        await_vector(config, arrived, i)
        vector = i * config.threads + thread
        words = read_shared(staged, vector)
        blank(words, vector < size, config.dtype)
        maximum, total = absorb((maximum, total), words, config.dtype)
    return maximum, total


@cute.jit
def exponentiate_share(config: cutlass.Constexpr, staged, arrived, size, thread) -> tuple:
    """((maximum, sum) of the thread's elements, the maximum of each group and those before it). The share in shared
    memory is replaced by exponentials relative to these maxima."""
    maximum, total, references = -Float32.inf, Float32(0.0), []
    for first in cutlass.range_constexpr(0, config.vectors, GROUP):
        count = min(GROUP, config.vectors - first)
        words = cute.make_rmem_tensor((WORDS, count), Int32)
        for i in cutlass.range_constexpr(count):
            await_vector(config, arrived, first + i)
            vector = (first + i) * config.threads + thread
            words[None, i].store(read_shared(staged, vector).load())
            if cutlass.const_expr(first + i >= config.vectors - LAST):
                blank(words[None, i], vector < size, config.dtype)
        numbers = cute.recast_tensor(words, Float32)
        before, maximum = maximum, largest(numbers, maximum)
        reference = reference_of(maximum)
        total = total * exponential(before - reference, True) + exponentiate(numbers, reference, True)
        references.append(maximum)
        for i in cutlass.range_constexpr(count):
            cute.autovec_copy(words[None, i], staged[None, (first + i) * config.threads + thread])
    return (maximum, total), references
