"""The key warps: a thread has one key, a lane of tensor memory. They make P and dS, add dQ to global memory, and write
dK and dV."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common.device import tmem
from warpspec.common.device.wgmma import COLUMNS, PAIR, QUAD, ROW_DISTANCE, VECTOR, WARP_ROWS
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.backward.device.arithmetic import Block
from warpspec.fmha.backward.device.clear import clear_unseen_keys, clear_unseen_rows
from warpspec.fmha.backward.device.turns import end_warp_turn, wait_warp_turn
from warpspec.fmha.backward.features import (
    STATISTICS,
    SUBTILE_ELEMENTS,
    SUBTILE_ROWS,
    WARP_ELEMENTS,
    WARPS,
)
from warpspec.fmha.backward.sm100 import scores, share
from warpspec.fmha.heads import BLOCK

LOAD_COLUMNS = 32  # columns of a result in registers at a time


@dataclass(frozen=True)
class Keys:
    """The state of a thread of the key warps for all steps.

    column_group: the CTA's columns of dK, dV and dQ. columns: TMEM pointer to the first column. thread: 0..127, its
    lane and its key of the tile. bounds: [first, end) of the queries that see the key.
    """

    config: object
    channels: dict
    shared: tuple
    operands: object
    scales: tuple
    tile: object
    column_group: Int32
    columns: cute.Pointer
    thread: Int32
    bounds: tuple

    @property
    def threads(self) -> int:
        """Threads that clear together."""
        return WARPGROUP_THREADS

    @property
    def index(self):
        """Number of this thread among them."""
        return self.thread

    def fence(self) -> None:
        """Make this thread's writes to shared memory visible to MMAs, once it has arrived at a barrier."""
        cute.arch.fence_proxy("async.shared", space="cta")

    def block(self, step, first, head, query_tile) -> Block:
        """A block of ``made_queries``. first: the block's first query in the tile."""
        stage = self.channels["q_full"].stage(step) * self.config.tile_m
        layout = cute.make_layout((PAIR, 2, BLOCK // PAIR), stride=(1, PAIR, 2 * PAIR))
        start = (self.shared.statistics + (stage + first) * STATISTICS).align(8)
        return Block(
            self.config,
            self.operands,
            self.tile,
            self.scales[0],
            head,
            query_tile * self.config.tile_m + first,
            cute.make_tensor(start, layout),
            columns=tuple(range(0, self.config.made_queries, PAIR)),
            keys=(self.tile.first_key + self.thread,),
            bounds=(self.bounds,),
            element=lambda column, r: column,
            writes_bias=True if self.config.clustered else self.column_group == 0,
        )


@cute.jit
def work_on_keys(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands,
    scales,
    tile,
    column_group,
    columns,
    thread,
):
    """Consumes k_full, v_full, q_full, do_full if it clears rows; s_full; step_done before reading dQ, and at the end.
    Produces clean, or dq_empty, and ds_full, one arrival per thread each."""
    bounds = tile.queries_of(tile.first_key + thread)
    work = Keys(config, channels, shared, operands, scales, tile, column_group, columns, thread, bounds)
    head, query_tile = tile.first
    for step in cutlass.range(tile.steps, unroll=1):
        if cutlass.const_expr(config.scatters):
            if step == 0:
                channels["k_full"].wait(0)
                channels["v_full"].wait(0)
                clear_unseen_keys(work)
            channels["q_full"].wait(step)
            channels["do_full"].wait(step)
            clear_unseen_rows(work, query_tile, step)
            channels["clean"].arrive(step)
        else:
            channels["q_full"].wait(step)  # for the statistics
        channels["s_full"].wait(step)
        tmem.fence_after_wait()
        if cutlass.const_expr(config.clustered):
            share.make_block(work, step, head, query_tile)
        else:
            for number in cutlass.range(config.query_blocks, unroll=1):
                scores.make_block(work, step, number, head, query_tile)
        tmem.wait_stores()
        tmem.fence_before_arrive()
        work.fence()
        channels["ds_full"].arrive(step)
        if cutlass.const_expr(config.wanted.q):
            channels["step_done"].wait(step)
            tmem.fence_after_wait()
            add_queries(work, head, query_tile)
            tmem.fence_before_arrive()
            if cutlass.const_expr(not config.scatters):  # else the next step's clean says so
                channels["dq_empty"].arrive(step)
        head, query_tile = tile.following(head, query_tile)
    if tile.steps > 0:
        channels["step_done"].wait(tile.steps - 1)
        tmem.fence_after_wait()
    write_keys(work)


@cute.jit
def add_queries(work, head, query_tile):
    """Add a step's dQ, or the CTA's columns of it, to the sums in global memory (layout: ``features``)."""
    config, operands, thread = work.config, work.operands, work.thread
    warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
    tile_index = work.tile.index_of(query_tile)
    sums = operands.dq_sums[head, tile_index, None].iterator
    if cutlass.const_expr(config.deterministic):
        turn = operands.turns[head, tile_index, None].iterator + work.column_group * WARPS + warp
        wait_warp_turn(turn, work.tile.turn(head, query_tile), lane)
    transposed = config.transposed_dq
    mine = (
        column_place(work.column_group * config.width + thread) if transposed else row_place(config, thread)
    )
    for start in cutlass.range_constexpr(0, config.tile_m if transposed else config.width, LOAD_COLUMNS):
        values = cute.make_rmem_tensor(LOAD_COLUMNS, Float32)
        tmem.load_row(work.columns + config.tmem_s + start, values, thread)
        tmem.wait_loads()
        for i in cutlass.range_constexpr(LOAD_COLUMNS):
            other = row_place(config, start + i) if transposed else column_place(start + i)
            cute.arch.red(sums + mine + other, values[i], op="add", dtype="f32", sem="relaxed", scope="gpu")
    if cutlass.const_expr(config.deterministic):
        end_warp_turn(turn, lane)


def row_place(config, row):
    """Offset of a row of a query tile's dQ in the sums: subtiles, warps' shares, wgmma's registers (``features``)."""
    subtile = row // SUBTILE_ROWS * (config.heads.qk // BLOCK)
    quarter, own = row % SUBTILE_ROWS // WARP_ROWS, row % WARP_ROWS
    place = own % ROW_DISTANCE * QUAD * QUAD + own // ROW_DISTANCE * PAIR
    return subtile * SUBTILE_ELEMENTS + quarter * WARP_ELEMENTS + place


def column_place(column):
    """Offset of a column's element from the begin of its row."""
    subtile, own = column // BLOCK, column % BLOCK
    place = own // COLUMNS * WARP_THREADS * QUAD + own % COLUMNS // PAIR * QUAD + own % PAIR
    return subtile * SUBTILE_ELEMENTS + place


def write_keys(work) -> None:
    """Write dK, scaled, and dV of the thread's key."""
    config, operands = work.config, work.operands
    if operands.dk is not None:
        write_row(work, operands.dk, config.tmem_dk, work.scales[1], config.wanted.joins_keys)
    if operands.dv is not None:
        write_row(work, operands.dv, config.tmem_dv, 1.0)


@cute.jit
def write_row(work, tensor: cute.Tensor, column: cutlass.Constexpr, factor, joins: cutlass.Constexpr = False):
    """Write the CTA's columns of the thread's key times a factor, plus dV's if V is K; zeros if no query sees the
    tile."""
    config, tile = work.config, work.tile
    batch = 0 if cutlass.const_expr(config.requests.packed_k) else tile.request
    keys = tile.place.length if cutlass.const_expr(config.requests.packed_k) else tensor.shape[1]
    key = tile.first_key + work.thread
    row = cutlass.min(tile.place.first_key + key, tensor.shape[1] - 1)
    target = tensor[batch, row, tile.kv_head, None]  # (D)
    for start in cutlass.range_constexpr(0, config.width, LOAD_COLUMNS):
        values = cute.make_rmem_tensor(LOAD_COLUMNS, Float32)
        values.fill(0.0)
        if tile.steps > 0:
            tmem.load_row(work.columns + column + start, values, work.thread)
            tmem.wait_loads()
        values.store(values.load() * factor)
        if cutlass.const_expr(joins):
            more = cute.make_rmem_tensor(LOAD_COLUMNS, Float32)
            more.fill(0.0)
            if tile.steps > 0:
                tmem.load_row(work.columns + config.tmem_dv + start, more, work.thread)
                tmem.wait_loads()
            values.store(values.load() + more.load())
        narrow = cute.make_rmem_tensor(LOAD_COLUMNS, tensor.element_type)
        narrow.store(values.load().to(tensor.element_type))
        if key < keys:
            for i in cutlass.range_constexpr(LOAD_COLUMNS // VECTOR):
                at = (work.column_group * config.width + start) // VECTOR + i
                cute.autovec_copy(
                    cute.local_tile(narrow, (VECTOR,), (i,)), cute.local_tile(target, (VECTOR,), (at,))
                )
