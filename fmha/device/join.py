"""Work cut by length, second launch: the states of the pieces of every tile that was cut become results.

CTA (x, y) joins the x-th share of the rows of the tile whose first cut is the begin of CTA y's chunk in the previous
launch, if there is such a tile. The record that CTA y left (``device.line.Join``) tells. The first piece lies in a
place of CTA y - 1, the others in the first places of CTAs y, y + 1 and so on. States are summed in that order.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32

from warpspec.common.device.host import host_function
from warpspec.common.hardware import FP32_BYTES
from warpspec.common.logarithms import LOG2_E
from warpspec.fmha.combine import VECTOR
from warpspec.fmha.device.combine import finite, write_row
from warpspec.fmha.device.line import Join as Record
from warpspec.fmha.device.line import state_of
from warpspec.fmha.device.results import sink_of
from warpspec.fmha.join import BATCH, THREADS, JoinConfig, JoinOperands
from warpspec.fmha.line import JOIN_WORDS

GROUPS_LOADS = 2  # time of loads, barriers and the sum over groups of a row's pieces, in units of BATCH loads


class Join:
    """``Join(config)(...)`` launches the kernel after an attention launch."""

    def __init__(self, config: JoinConfig):
        self.config = config

    @host_function(JoinOperands)
    def __call__(self, operands: JoinOperands, stream: CUstream):
        """Host side. Launched like ``combine.Combine``."""
        self.kernel(operands).launch(
            grid=(self.config.ctas, operands.joins.shape[0], 1),
            block=(THREADS, 1, 1),
            smem=self.config.smem_bytes,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands):
        pieces, joins, results = operands
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, cta, _ = cute.arch.block_idx()
        lane, group = thread % config.lanes, thread // config.lanes
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout((VECTOR + 2, THREADS))
        shared = smem.allocate_tensor(Float32, layout, byte_alignment=VECTOR * FP32_BYTES)  # (NUMBER, THREAD)

        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        record = record_of(joins, cta)
        if record.pieces > 0:
            tile = CutTile(config, pieces, cta, record)
            queries = cutlass.min(record.queries, config.rows.groups * config.rows.group_queries)
            rows = queries * config.rows.pack
            if row_each(config, rows, record.pieces):
                for row in cutlass.range(
                    block * config.groups + group, rows, config.ctas * config.groups, unroll=1
                ):
                    if row % config.rows.pack < record.heads:
                        for segment in cutlass.range_constexpr(config.segments):
                            column = segment * config.lanes + lane
                            state = join(tile, row, column, 0, 1)
                            write_joined(config, True, tile.place(row), column, state, results)
            else:
                for row in cutlass.range(block, rows, config.ctas, unroll=1):
                    for segment in cutlass.range_constexpr(config.segments):
                        column = segment * config.lanes + lane
                        state = join(tile, row, column, group, config.groups)
                        state = add_groups(config, shared, thread, state)
                        writes = Boolean(group == 0) & Boolean(row % config.rows.pack < record.heads)
                        write_joined(config, writes, tile.place(row), column, state, results)


def write_joined(config, writes, place: tuple, column, state: tuple, results) -> None:
    """``write_row`` of a row's joined state."""
    write_row(config, writes, place, column, *state, sink_of(results.sink, place[2]), results)


def row_each(config: JoinConfig, rows, count) -> Boolean:
    """Whether each group of threads takes a row of its own and loads its pieces BATCH at a time: for many rows or few
    pieces. Otherwise all groups share the pieces of one row after another, and each row takes GROUPS_LOADS times as
    long."""
    passes = (rows + config.ctas * config.groups - 1) // (config.ctas * config.groups)
    alone = passes * ((count + BATCH - 1) // BATCH)
    return Boolean(alone <= (rows + config.ctas - 1) // config.ctas * GROUPS_LOADS)


@dataclass(frozen=True)
class CutTile:
    """A tile that was cut. pieces: the states. cta: the CTA whose chunk begins at its first cut."""

    config: JoinConfig
    pieces: cute.Tensor
    cta: Int32
    record: Record

    def place(self, row) -> tuple:
        """(batch, query, head) of a row; rows are counted without the idle ones of row groups."""
        record, pack = self.record, self.config.rows.pack
        return record.batch, record.first_row + row // pack, record.first_head + row % pack

    def state(self, number, row) -> cute.Tensor:
        """(D + 8): the state that piece ``number`` left of a row."""
        config = self.config
        state = Int32(
            cutlass.select_(Boolean(number == 0), self.record.first, state_of(self.cta + number - 1, False))
        )
        row = row // config.rows.busy_rows * config.rows.group_size + row % config.rows.busy_rows
        return self.pieces[state, row, None]


def record_of(joins: cute.Tensor, cta) -> Record:
    """The record that a CTA left."""
    words = cute.make_rmem_tensor(JOIN_WORDS, Int32)
    cute.autovec_copy(joins[cta, None], words)
    return Record(*(words[i] for i in range(JOIN_WORDS)))


@cute.jit
def join(tile, row, column, first: cutlass.Constexpr, step: cutlass.Constexpr) -> tuple:
    """Join a row's pieces first, first + step, ...: (maximum, sum, o (VECTOR)), with VECTOR of its columns, in natural
    units."""
    config, count = tile.config, tile.record.pieces
    state = (-Float32.inf, Float32(0.0), cute.make_rmem_tensor(VECTOR, Float32))
    state[2].fill(0.0)
    for begin in cutlass.range(first, count, BATCH * step, unroll=1):
        loaded = cute.make_rmem_tensor((VECTOR + 2, BATCH), Float32)
        for i in cutlass.range_constexpr(BATCH):
            found = tile.state(cutlass.min(begin + i * step, count - 1), row)
            values = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(cute.local_tile(found, (VECTOR,), (column,)), values)
            for j in cutlass.range_constexpr(VECTOR):
                loaded[j, i] = values[j]
            for j in cutlass.range_constexpr(2):
                loaded[VECTOR + j, i] = found[config.head_dim + j]
        for i in cutlass.range_constexpr(BATCH):
            state = added(state, loaded[None, i], Boolean(begin + i * step >= count))
    return state


def added(state: tuple, other: cute.Tensor, skipped) -> tuple:
    """Add to a state (maximum, sum, o) the state ``other``, (VECTOR + 2): o, maximum, sum. ``other`` is ignored, by
    selection, if ``skipped`` or if no key was visible: then its maximum is -inf and its o undefined."""
    maximum, total, values = state
    skipped = skipped | Boolean(other[VECTOR + 1] == Float32(0.0))
    own = Float32(cutlass.select_(skipped, -Float32.inf, other[VECTOR]))
    highest = cute.arch.fmax(maximum, own)
    kept = cute.math.exp2((maximum - finite(highest)) * LOG2_E, fastmath=True)
    weight = cute.math.exp2((own - finite(highest)) * LOG2_E, fastmath=True)

    def weighted(value):
        return Float32(cutlass.select_(skipped, Float32(0.0), value * weight))

    for j in range(VECTOR):
        values[j] = values[j] * kept + weighted(other[j])
    return highest, total * kept + weighted(other[VECTOR + 1]), values


@cute.jit
def add_groups(config: cutlass.Constexpr, shared: cute.Tensor, thread, state) -> tuple:
    """Sum the states of all groups, column by column and in order, into the first group. Called by the whole CTA."""
    maximum, total, values = state
    for j in cutlass.range_constexpr(VECTOR):
        shared[j, thread] = values[j]
    shared[VECTOR, thread], shared[VECTOR + 1, thread] = maximum, total
    cute.arch.sync_threads()
    for group in cutlass.range_constexpr(1, config.groups):
        other = cute.make_rmem_tensor(VECTOR + 2, Float32)
        for j in cutlass.range_constexpr(VECTOR + 2):
            other[j] = shared[j, thread % config.lanes + group * config.lanes]
        state = added(state, other, Boolean(False))
    cute.arch.sync_threads()  # before the next row's
    return state
