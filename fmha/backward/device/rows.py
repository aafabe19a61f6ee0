"""What the main kernel needs of every query row: lse' and delta; zeros where it adds up dQ. Of no architecture.

A CTA has one query tile of one head. ``features`` says how statistics and sums lie.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32

from warpspec.common.device.host import host_function
from warpspec.common.hardware import WARP_THREADS
from warpspec.common.logarithms import LOG2_E
from warpspec.fmha.backward.operands import RowOperands
from warpspec.fmha.device.packed import extent_of, query_tiles, request_of

THREADS = 128
VECTOR = 8  # elements of o and do that a thread loads at a time: 16 bytes
LOADS = 4  # rows of a thread that are under way together


class Rows:
    """The kernel of one ``rows.RowConfig``."""

    def __init__(self, config):
        self.config = config

    @host_function(RowOperands)
    def __call__(self, operands: RowOperands, stream: CUstream):
        grid = (operands.statistics.shape[1], operands.o.shape[2], 1)
        self.kernel(operands).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, operands):
        config, o = self.config, operands.o
        slot, head, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        batch, number, first, rows = place_of(config, operands.cu_seqlens_q, o, slot)
        if cutlass.const_expr(operands.dq_sums is not None):
            clear(operands.dq_sums[head, slot, None], thread)
        if cutlass.const_expr(operands.turns is not None):  # noqa: SIM102
            if thread < operands.turns.shape[2]:
                operands.turns[head, slot, thread] = 0
        lanes = config.head_dim // VECTOR
        lane, group, groups = thread % lanes, thread // lanes, THREADS // lanes
        passes = config.tile_m // groups
        statistics = operands.statistics[head, slot, None, None]  # (ROW PAIR, 4)
        sink_sum = Float32(0.0)
        for start in cutlass.range(0, passes, LOADS, unroll=1):
            dots = []
            for i in cutlass.range_constexpr(LOADS):
                query = number * config.tile_m + (start + i) * groups + group
                row = first + cutlass.max(cutlass.min(query, rows - 1), 0)
                row = cutlass.min(row, o.shape[1] - 1)
                dot = Float32(0.0)
                if cutlass.const_expr(operands.do is not None):
                    vectors = []
                    for tensor in (o, operands.do):
                        part = cute.local_tile(tensor[batch, row, head, None], (VECTOR,), (lane,))
                        vector = cute.make_rmem_tensor(VECTOR, tensor.element_type)
                        cute.autovec_copy(part, vector)
                        vectors.append(vector)
                    for j in cutlass.range_constexpr(VECTOR):
                        dot += vectors[0][j].to(Float32) * vectors[1][j].to(Float32)
                dots.append((query, row, dot))
            for i in cutlass.range_constexpr(LOADS):
                query, row, dot = dots[i]
                dot = cute.arch.warp_reduction_sum(dot, threads_in_group=lanes)
                if lane == 0:
                    index = (start + i) * groups + group
                    total, delta, of_sink = row_statistics(
                        config, operands, (batch, head, row), Boolean(query < rows), dot
                    )
                    statistics[index // 2, index % 2] = total
                    statistics[index // 2, 2 + index % 2] = delta * -config.delta_factor
                    sink_sum += of_sink
        if cutlass.const_expr(operands.dsink is not None):
            add_up(operands.dsink, (head, slot), thread, sink_sum)


@cute.jit
def place_of(config: cutlass.Constexpr, cu_seqlens: cute.Tensor | None, o: cute.Tensor, slot) -> tuple:
    """(batch row of o, query tile, first row, rows) of a slot: of its request, or batch row. By whole warps."""
    total = o.shape[1]
    if cutlass.const_expr(config.packed):
        request, number = request_of(cu_seqlens, slot, config.tile_m, total)
        first, rows = extent_of(cu_seqlens, request, total)
        return Int32(0), number, first, rows
    tiles = cute.ceil_div(total, config.tile_m)
    return slot // tiles, slot % tiles, Int32(0), total


def slots_of(config, cu_seqlens, o):
    """Slots of all batch rows or requests."""
    if config.packed:
        return query_tiles(config.tile_m, o.shape[1], cu_seqlens.shape[0] - 1)
    return o.shape[0] * -(-o.shape[1] // config.tile_m)


@cute.jit
def clear(target: cute.Tensor, thread):
    """Zeros into a row of fp32 whose length is a multiple of 4 THREADS."""
    zeros = cute.make_rmem_tensor(4, Float32)
    zeros.fill(0.0)
    for i in cutlass.range(cute.size(target) // (4 * THREADS), unroll=8):
        cute.autovec_copy(zeros, cute.local_tile(target, (4,), (i * THREADS + thread,)))


@cute.jit
def row_statistics(config: cutlass.Constexpr, operands, place: cutlass.Constexpr, in_range, dot) -> tuple:
    """(lse' in powers of two, delta, the row's part of dsink). place: (batch, head, row). dot: rowsum(dO * O)."""
    batch, head, row = place
    own = operands.lse[batch, head, row] * LOG2_E
    empty = Boolean(own == -Float32.inf) | ~in_range
    total, of_sink = own, Float32(0.0)
    delta = dot
    if cutlass.const_expr(operands.sink is not None):
        power = operands.sink[head] * LOG2_E
        high = cute.arch.fmax(own, power)
        total = high + cute.math.log2(cute.math.exp2(own - high) + cute.math.exp2(power - high))
        of_sink = -cute.math.exp2(power - total) * dot
    if cutlass.const_expr(operands.dlse is not None):
        delta = dot - operands.dlse[batch, head, row] * cute.math.exp2(total - own)
    total = Float32(cutlass.select_(empty, Float32.inf, total))
    delta = Float32(cutlass.select_(empty, Float32(0.0), delta))
    of_sink = Float32(cutlass.select_(empty, Float32(0.0), of_sink))
    return total, delta, of_sink


@cute.jit
def add_up(dsink: cute.Tensor, place: cutlass.Constexpr, thread, value):
    """The sum of all threads' values, in a fixed order, into one element."""
    sums = cutlass.memory.SmemAllocator().allocate_tensor(
        Float32, cute.make_layout(THREADS // WARP_THREADS), byte_alignment=4
    )
    value = cute.arch.warp_reduction_sum(value)
    if thread % WARP_THREADS == 0:
        sums[thread // WARP_THREADS] = value
    cute.arch.sync_threads()
    if thread == 0:
        total = sums[0]
        for i in cutlass.range_constexpr(1, THREADS // WARP_THREADS):
            total += sums[i]
        dsink[place] = total
