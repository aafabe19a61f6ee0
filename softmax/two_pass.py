"""Rows of any length, read twice: once for the maximum and the sum, once to scale. For sm_90a and sm_100a.

The second pass finds in L2 what the rows in flight leave there. One CTA has a row, or the CTAs of a cluster share it.
Nothing is held, so there is no limit to the length.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.softmax.host import SoftmaxHost
from warpspec.softmax.online import absorb, exponential, scale, state_of
from warpspec.softmax.reduction import allocate_states, join_row
from warpspec.softmax.vectors import (
    LAST,
    PLAIN,
    WORDS,
    edge_in_group,
    load_edge,
    load_vector,
    row_span,
    share_in_cluster,
    store_edge,
    store_vector,
)


@dataclass(frozen=True)
class TwoPassConfig:
    """Configuration of the kernel.

    dtype, edges, store_bytes: as in RowsConfig. threads: threads of a CTA, in whole warps. cluster: CTAs that share a
    row. unroll: vectors that a thread loads before it uses the first.
    """

    dtype: str
    threads: int
    cluster: int
    edges: bool
    store_bytes: int = VECTOR_BYTES
    unroll: int = 4

    @property
    def warps(self) -> int:
        return self.threads // WARP_THREADS


class TwoPass(SoftmaxHost):
    """The kernel of one ``TwoPassConfig``."""

    def options(self) -> dict:
        """None."""
        return {}

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        config = self.config
        dtype = config.dtype
        accurate = dtype == "float32"
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        states, reduction = allocate_states(smem, config, accurate)
        if cutlass.const_expr(reduction is not None):
            reduction.open(thread)

        # 1. This CTA's share of the row's vectors.
        row_index = block // config.cluster
        row = row_span(x, row_index, dtype, config.edges)
        begin, end = share_in_cluster(row, config.cluster)
        step = config.threads * config.unroll
        rounds = cute.ceil_div(cutlass.max(end - begin, 0), step)

        # 2. First pass.
        words = cute.make_rmem_tensor((WORDS, config.unroll), Int32)
        edge = None
        maximum, total = -Float32.inf, Float32(0.0)
        if cutlass.const_expr(config.edges):
            edge = edge_in_group(row, thread, config.threads, block % config.cluster, dtype)
            if edge.present:
                maximum, total = state_of(load_edge(row, edge, dtype), accurate)
        for r in cutlass.range(rounds, unroll=1):
            vector = begin + r * step + thread
            address = row.first + Int64(vector) * VECTOR_BYTES
            for i in cutlass.range_constexpr(config.unroll):
                first, present = i * config.threads, Boolean(vector + i * config.threads < end)
                load_vector(words[None, i], address, first * VECTOR_BYTES, present, dtype, PLAIN)
            maximum, total = absorb((maximum, total), words, dtype)

        # 3. The row's state.
        maximum, total = join_row((maximum, total), states, reduction, config.warps, accurate)
        inverse = Float32(1.0) / total

        # 4. Second pass, backwards, because what was read last is most likely still in L2.
        target = row_span(out, row_index, dtype, False)
        distance = target.address - row.address
        for k in cutlass.range(rounds, unroll=1):
            vector = begin + (rounds - 1 - k) * step + thread
            address = row.first + Int64(vector) * VECTOR_BYTES
            for i in cutlass.range_constexpr(config.unroll):
                first, present = i * config.threads, Boolean(vector + i * config.threads < end)
                load_vector(words[None, i], address, first * VECTOR_BYTES, present, dtype, LAST)
            scale(words, maximum, inverse, dtype)
            for i in cutlass.range_constexpr(config.unroll):
                first, present = i * config.threads, Boolean(vector + i * config.threads < end)
                offset = first * VECTOR_BYTES
                store_vector(words[None, i], address + distance, offset, present, config.store_bytes, LAST)
        if cutlass.const_expr(config.edges):
            value = exponential(load_edge(row, edge, dtype) - maximum, accurate) * inverse
            store_edge(target, edge, value, dtype)
