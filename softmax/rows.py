"""Rows held in registers: each is read once and written once. One kernel for sm_90a and sm_100a.

``lanes`` threads of a CTA share a row; if rows are short, a CTA has several. If they are long, the CTAs of a cluster
share one row and reduce (maximum, sum) over distributed shared memory. A thread has up to ``vectors`` 16-byte vectors,
so a row has at most vectors * lanes * cluster of them, plus edges.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.softmax.host import SoftmaxHost
from warpspec.softmax.online import exponential, exponentiate, largest, reference_of, scale
from warpspec.softmax.reduction import (
    STATE_WORDS,
    allocate_states,
    join_warps,
    warp_maximum,
    warp_sum,
)
from warpspec.softmax.vectors import (
    PLAIN,
    TYPES,
    WORDS,
    as_float,
    edge_in_group,
    elements,
    forget,
    load_edge,
    load_vector,
    row_span,
    share_in_cluster,
    store_edge,
    store_vector,
)

# Up to this many elements, a thread keeps their exponentials in fp32 registers. With more, it keeps the inputs and
# computes exponentials twice.
MOST_KEPT = 32

# Per cent of L1 and shared memory that are used as shared memory: few, because loads in flight need L1.
SMEM_CARVEOUT_PERCENT = 10


@dataclass(frozen=True)
class RowsConfig:
    """Configuration of the kernel.

    dtype: the dtype's name. lanes: threads of a CTA that share a row, a power of two or a multiple of a warp. rows:
    rows of a CTA. cluster: CTAs that share a row, 1 to 16; if more than 1, rows is 1. vectors: 16-byte vectors a
    thread. edges: rows may start or end off a 16-byte boundary; lanes must then be at least two vectors' elements.
    ctas_per_sm: CTAs whose registers must fit an SM. store_bytes: the widest store that the alignment of out relative
    to x allows. dependent: use a programmatic dependent launch.
    """

    dtype: str
    lanes: int
    rows: int
    cluster: int
    vectors: int
    edges: bool
    ctas_per_sm: int = 1
    store_bytes: int = VECTOR_BYTES
    dependent: bool = False

    def __post_init__(self):
        if self.lanes % WARP_THREADS and (self.lanes > WARP_THREADS or WARP_THREADS % self.lanes):
            raise ValueError(
                f"lanes: must be a power of two or a multiple of {WARP_THREADS}, got {self.lanes}"
            )
        if self.cluster > 1 and (self.rows > 1 or self.lanes < WARP_THREADS):
            raise ValueError("cluster: shares one row, by whole warps")
        if self.edges and self.lanes < 2 * elements(self.dtype):
            raise ValueError(f"lanes: edges need {2 * elements(self.dtype)}, got {self.lanes}")

    @property
    def threads(self) -> int:
        return self.lanes * self.rows

    @property
    def warps(self) -> int:
        """Warps of a CTA to a row, at least 1."""
        return max(1, self.lanes // WARP_THREADS)

    @property
    def capacity(self) -> int:
        """Elements of the longest row that fits at any alignment."""
        return self.vectors * self.lanes * self.cluster * elements(self.dtype)

    @property
    def keeps_exponentials(self) -> bool:
        """Whether registers keep exp(x - warp's maximum), or x.

        fp32 takes exponentials relative to the row's maximum, so that they are rounded as torch rounds them.
        """
        if self.dtype == "float32":
            return self.warps == 1 and self.cluster == 1
        return self.vectors * elements(self.dtype) <= MOST_KEPT


class Rows(SoftmaxHost):
    """The kernel of one ``RowsConfig``."""

    carveout = SMEM_CARVEOUT_PERCENT

    def clusters(self, rows):
        """A CTA has ``config.rows`` rows."""
        return cute.ceil_div(rows, self.config.rows)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        config = self.config
        dtype = config.dtype
        accurate = dtype == "float32"
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, row_in_cta = thread % config.lanes, thread // config.lanes
        warp = lane // WARP_THREADS
        row_index = block // config.cluster * config.rows + row_in_cta
        in_range = Boolean(row_index < x.shape[0])
        # Threads without a row compute the last one and store nothing.
        row_index = cutlass.min(row_index, x.shape[0] - 1)

        # 1. Shared memory: states of the warps.
        states, reduction = states_of_warps(config, accurate)
        if cutlass.const_expr(config.cluster > 1):
            reduction.open(thread)

        # 2. Load: this CTA's vectors of the row, interleaved over its threads.
        row = row_span(x, row_index, dtype, config.edges)
        begin, end = share_in_cluster(row, config.cluster)
        source = row.first + Int64(begin + lane) * VECTOR_BYTES  # address of this thread's first vector
        cute.arch.griddepcontrol_wait()  # the previous launch may have written x, or may still read out
        words = load_share(config, source, begin + lane, end)
        edge, edge_value = None, None
        if cutlass.const_expr(config.edges):
            edge = edge_in_group(row, lane, config.lanes, block % config.cluster, dtype)
            edge_value = load_edge(row, edge, dtype)

        # 3. This warp's maximum, and the sum of its exponentials.
        maximum, total, kept = state_of_warp(config, words, edge_value)

        # 4. The maximum and sum of the row.
        of_warp = maximum
        if cutlass.const_expr(config.cluster > 1):
            maximum, total = reduction.close((maximum, total), warp)
        elif cutlass.const_expr(config.warps > 1):
            maximum, total = join_warps((maximum, total), states, row_in_cta, warp, config.warps, accurate)
        inverse = Float32(1.0) / total

        # 5. Scale and store.
        # The next launch starts during the stores, not during the loads.
        cute.arch.griddepcontrol_launch_dependents()
        target = row_span(out, row_index, dtype, False)
        destination = source + (target.address - row.address)
        factor = factor_of_kept(config, of_warp, maximum, inverse)
        if cutlass.const_expr(not config.keeps_exponentials):
            forget(words)
        for i in cutlass.range_constexpr(config.vectors):
            if cutlass.const_expr(config.keeps_exponentials):
                results = (kept[None, i].load() * factor).to(TYPES[dtype])
                cute.recast_tensor(words[None, i], TYPES[dtype]).store(results)
            else:
                scale(words[None, i], maximum, inverse, dtype)
            offset, vector = i * config.lanes * VECTOR_BYTES, begin + i * config.lanes + lane
            present = Boolean(vector < end) & in_range
            store_vector(words[None, i], destination, offset, present, config.store_bytes, PLAIN)
        if cutlass.const_expr(config.edges):
            value = exponential(edge_value - maximum, accurate) * inverse
            if in_range:
                store_edge(target, edge, value, dtype)


def states_of_warps(config, accurate: bool) -> tuple:
    """Shared memory (STATE_WORDS, WARP, ROW) for the states of the warps that share rows, and the reduction over a
    cluster. Each is None if there is no need for it."""
    smem = cutlass.memory.SmemAllocator()
    if config.cluster > 1:
        return allocate_states(smem, config, accurate)
    if config.warps == 1:
        return None, None
    layout = cute.make_layout((STATE_WORDS, config.warps, config.rows))
    return smem.allocate_tensor(Float32, layout, byte_alignment=16), None


@cute.jit
def load_share(config: cutlass.Constexpr, source, first, end) -> cute.Tensor:
    """Load a thread's vectors of a row: packed words (WORDS, VECTOR). source: address of the first one. first: its
    number in the row. end: of the CTA's vectors."""
    words = cute.make_rmem_tensor((WORDS, config.vectors), Int32)
    for i in cutlass.range_constexpr(config.vectors):
        offset, vector = i * config.lanes * VECTOR_BYTES, first + i * config.lanes
        load_vector(words[None, i], source, offset, Boolean(vector < end), config.dtype, PLAIN)
    return words


@cute.jit
def factor_of_kept(config: cutlass.Constexpr, of_warp, maximum, inverse):
    """Factor of the exponentials that a warp's threads keep, if any. of_warp: the warp's maximum. maximum, inverse: the
    row's, and 1 / its sum."""
    factor = inverse
    if cutlass.const_expr(config.keeps_exponentials and config.warps * config.cluster > 1):
        # Relative to the warp's own maximum, not its reference: a warp that has only -inf keeps zeros, times 0.
        factor = inverse * exponential(of_warp - maximum, False)
    return factor


@cute.jit
def state_of_warp(config: cutlass.Constexpr, words: cute.Tensor, edge_value):
    """(maximum, sum of exponentials relative to its reference) of a warp's part of a row, and the exponentials
    (ELEMENT of vector, VECTOR) if the threads keep them, else None. words: (WORDS, VECTOR)."""
    dtype = config.dtype
    accurate = dtype == "float32"
    maximum = warp_maximum(largest_of(words, edge_value, dtype), config.lanes)
    reference = reference_of(maximum)
    kept = None
    if cutlass.const_expr(config.keeps_exponentials):
        kept = as_float(words, dtype)
        total = exponentiate(kept, reference, accurate)
    else:
        forget(words)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(config.vectors):
            total += exponentiate(as_float(words[None, i], dtype), reference, accurate)
    if cutlass.const_expr(config.edges):
        total += exponential(edge_value - reference, accurate)
    return maximum, warp_sum(total, config.lanes), kept


def largest_of(words: cute.Tensor, edge_value, dtype: str) -> Float32:
    """Largest element of packed words (WORDS, VECTOR), and of the edge if there may be one."""
    maximum = -Float32.inf if edge_value is None else edge_value
    for i in range(cute.size(words, mode=[1])):
        maximum = largest(as_float(words[None, i], dtype), maximum)
    return maximum
