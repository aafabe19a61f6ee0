"""A consumer warpgroup: dK and dV of its 64 keys in registers, and its blocks of every query tile's dQ, on wgmma.

Scores are transposed, S^T = K Q^T, one key per row, for a block of queries at a time, so that P^T and dS^T are register
operands of dV += P^T dO and dK += dS^T Q. dS goes through shared memory once, for dQ = dS K, to which all keys of the
tile add. Each block of queries finds its S finished; S of the next block is issued as soon as dS has been made, so
that the tensor core has work during all of the arithmetic:

    issue dP | P = exp(S - lse') | issue dV | wait dP | dS = P (dP - delta) | issue the next S | dS to shared memory |
    after the tile's last block: issue dQ (``exchange``) | issue dK | read the next lse' | wait dQ | add dQ to global
    memory

lse' is read into registers before the additions, because a thread's reads of shared memory queue after them. At D 64 P
is made as soon as S is there, before dQ is waited for, and a late dS is stored before the next S is issued. dP starts
from -delta. At D 64 products may subtract both statistics instead (``subtraction``). The first warp also loads. Without
a separate load warp, threads may have 255 registers each: with fewer, ptxas serialises the products. For the same
reason, all code that reads a product's registers stands in the iteration that issues it (docs/notebook/gradients.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from warpspec.common.device import tma
from warpspec.common.device.wgmma import (
    COLUMNS,
    PAIR,
    QUAD,
    ROW_DISTANCE,
    THREAD_ROWS,
    WARP_ROWS,
    flat,
    multiply,
    settle,
)
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.backward.device.arithmetic import derive, weigh
from warpspec.fmha.backward.device.clear import clear_unseen_keys
from warpspec.fmha.backward.device.finish import report
from warpspec.fmha.backward.device.load import TileLoads, wait_before
from warpspec.fmha.backward.device.place import own_tile
from warpspec.fmha.backward.sm90 import exchange, pair, results, visits
from warpspec.fmha.backward.sm90.arithmetic import block_of, keep
from warpspec.fmha.backward.sm90.config import CONSUMER_BARRIER, CONSUMER_KEYS
from warpspec.fmha.backward.sm90.products import MMA_K, GradientProducts, products, rows_of
from warpspec.fmha.backward.sm90.subtraction import ones, subtraction
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.sm90.staging import load_words


@dataclass(frozen=True)
class ConsumerKeys:
    """A consumer's share of a key tile. first_row: the consumer's first row in the tile. thread: 0..127 within the
    consumer. row: the first of the thread's rows among the consumer's 64. member: the thread's number in its quad.
    bounds: for each key of the thread, [first, end) of the queries that see it. loads: those of its tile. lse:
    registers for lse' of the next block's queries; a pair reads lse' where it needs it. ones: ``subtraction.ones``, if
    products subtract the statistics."""

    config: object
    channels: dict
    shared: tuple
    operands: object
    scales: tuple
    mma: GradientProducts
    tile: object
    consumer: Int32 | int
    first_row: Int32 | int
    thread: Int32
    row: Int32
    member: Int32
    bounds: tuple
    loads: TileLoads
    lse: cute.Tensor | None
    ones: cute.Tensor | None

    def key(self, r: int):
        """Key of the thread's row r, in the tile."""
        return self.first_row + self.row + r * ROW_DISTANCE

    def issue_s(self, step, block: int) -> None:
        """Issue S^T of a block of queries. The methods below issue the other products of a step."""
        stage = step % self.config.q_stages
        count = self.steps_of(self.config.sizes.qk)
        multiply(
            self.mma.scores,
            self.mma.s,
            self.mma.k,
            rows_of(self.mma.q, block, stage),
            False,
            count=count,
            more=self.subtracted(0, block, step),
        )

    def issue_dp(self, step, block: int) -> None:
        config, mma = self.config, self.mma
        queries = rows_of(mma.do, block, step % config.do_stages)
        count, more = self.steps_of(config.sizes.v), self.subtracted(1, block, step)
        if config.holds_v:
            count = BLOCK // MMA_K
            held = range(cute.size(mma.held_v, mode=[2]))
            more = [(mma.held, mma.held_v[None, None, k], queries[None, None, count + k]) for k in held]
        started = not (config.paired or config.subtracts)
        multiply(mma.scores, mma.dp, mma.v, queries, started, count=count, more=more)

    def subtracted(self, number: int, block: int, step) -> tuple:
        """What ``multiply`` adds to S (0) or dP (1) of a block of queries, if it subtracts the statistics."""
        stage = step % self.config.q_stages
        return (subtraction(self, number, block, stage),) if self.config.subtracts else ()

    def steps_of(self, size: int) -> int | None:
        """Instructions of S or dP where rows have this many elements in memory; None: all of a CTA's."""
        return None if self.config.rows is None else -(-size // MMA_K)

    @property
    def block_steps(self) -> int:
        """Instructions that sum over a block of queries."""
        return self.config.block_m // MMA_K

    def issue_dv(self, step, block: int) -> None:
        stage = step % self.config.do_stages
        columns = self.mma.do_columns[None, None, None, stage]
        multiply(self.mma.rows_v, self.mma.dv, self.mma.p, columns, True, block * self.block_steps)

    def issue_dk(self, step, block: int) -> None:
        columns = self.mma.q_columns[None, None, None, step % self.config.q_stages]
        multiply(self.mma.rows, self.mma.dk, self.mma.ds_rows, columns, True, block * self.block_steps)

    def issue_dq(self, step, dq_block: int = 0, mma: GradientProducts | None = None) -> None:
        """dq_block: which of the consumer's. mma: descriptors, if it is issued in several regions of the program."""
        mma = mma or self.mma
        ds = mma.ds[None, None, None, step % self.config.ds_stages]
        dq, columns = self.mma.dq[dq_block], mma.k_columns[dq_block][None, None, None, 0]
        multiply(mma.queries[dq_block], dq, ds, columns, False, count=0 if dq is None else None)

    @property
    def threads(self) -> int:
        """Threads that clear together."""
        return self.config.consumer_threads

    @property
    def index(self):
        """Number of this thread among them."""
        return self.consumer * WARPGROUP_THREADS + self.thread

    def fence(self) -> None:
        """Like ``barrier``."""
        self.barrier()

    def barrier(self) -> None:
        """Wait for all consumers, and make what they wrote to shared memory visible to wgmma."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.config.consumer_threads)


@cute.jit
def consume(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands,
    scales,
    window,
    order,
    consumer,
    tensors: cutlass.Constexpr,
):
    """One consumer. tensors: (TMA descriptors, their coordinate tensors). Consumes k_full, v_full, q_full and do_full;
    if it is one of a pair, produces q_empty after dK, and do_empty after dV."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % WARPGROUP_THREADS
    tile = own_tile(config, operands, window, order)
    if cutlass.const_expr(config.leaves_visits):
        tile = replace(tile, blocks=tile.blocks._replace(rule=cute.make_rmem_tensor(1, Int32)))
    lane = thread % WARP_THREADS
    row = thread // WARP_THREADS * WARP_ROWS + lane // QUAD
    mma = products(config, operands.q.element_type, shared, consumer)
    rows = 0 if config.paired else consumer * CONSUMER_KEYS  # blocks of the tile before the consumer's
    first_key = tile.first_key + rows + row
    bounds = tuple(tile.queries_of(first_key + r * ROW_DISTANCE) for r in range(THREAD_ROWS))
    work = ConsumerKeys(
        config,
        channels,
        shared,
        operands,
        scales,
        mma,
        tile,
        consumer,
        rows,
        thread,
        row,
        lane % QUAD,
        bounds,
        TileLoads(config, channels, shared, operands, *tensors, tile),
        None if config.paired or config.subtracts else lse_registers(config),
        ones(config, lane % QUAD) if config.subtracts else None,
    )
    if cutlass.const_expr(mma.dk is not None):
        mma.dk.fill(0.0)
    if cutlass.const_expr(mma.dv is not None):
        mma.dv.fill(0.0)
    if tile.steps > 0:
        if cutlass.const_expr(config.paired):
            wait_before(config)
            pair.go_through(work)
        else:
            go_through(work)
    else:
        wait_before(config)
    if cutlass.const_expr(config.deterministic):  # dK and dV last: it takes fewer registers
        finish_queries(work)
    results.write_keys(work)
    if cutlass.const_expr(not config.deterministic):
        finish_queries(work)
    if cutlass.const_expr(config.finishes):
        report(work)


@cute.jit
def finish_queries(work):
    """Finish dQ of the last step, if it is late."""
    if cutlass.const_expr(not work.config.paired):  # noqa: SIM102
        if work.tile.steps > 0:
            exchange.add_last(work)


@cute.jit
def go_through(work):
    """Run all steps of a tile; a late dQ of the last step is not added yet."""
    config, tile, channels, mma = work.config, work.tile, work.channels, work.mma
    place, fetched = begin(work)  # (query head, query tile); that of the step whose loads are issued next
    before = place  # that of the step before
    block_of(work, Int32(0), 0, place).read_lse()
    if cutlass.const_expr(config.weighs_early):
        make_p(work, Int32(0), 0, place)
    last = tile.steps - 1
    for step in cutlass.range(tile.steps, unroll=1):
        next_place = place
        channels["do_full"].wait(step)
        for block in cutlass.range_constexpr(config.query_blocks):
            ends = block + 1 == config.query_blocks
            own = block_of(work, step, block, place)
            if cutlass.const_expr(config.wanted.ds):
                if cutlass.const_expr(not config.subtracts):
                    start_dp(own, flat(mma.dp))
                work.issue_dp(step, block)
            if cutlass.const_expr(not config.weighs_early):
                make_p(work, step, block, place)
            warpgroup.wait_group(int(config.wanted.ds))  # previous dK: P may overwrite its operand
            if cutlass.const_expr(config.wanted.v):
                keep(mma.s, mma.p)
                work.issue_dv(step, block)
            exchange.let_go(work, step, block)
            following = step
            if cutlass.const_expr(ends):  # the next step; after the last, the last again, which nobody uses
                following = cutlass.min(step + 1, last)
                wait_queries(work, following)
                if step < last:
                    next_place = place_after(work, step, place)
                    exchange.clear_rows(work, next_place[1], step + 1)
            if cutlass.const_expr(config.wanted.ds):
                warpgroup.wait_group(int(config.wanted.v and not config.dv_first))
                derive(own, flat(mma.s), flat(mma.dp), tile.needs_mask(*place, block))
                if cutlass.const_expr(config.stores_early):
                    put_ds(work, step, block)
            next_block = 0 if ends else block + 1
            work.issue_s(following, next_block)
            if cutlass.const_expr(config.wanted.ds and not config.stores_early):
                put_ds(work, step, block)
            if cutlass.const_expr(ends):
                exchange.issue_dq(work, step, place)
            if cutlass.const_expr(config.wanted.k):
                work.issue_dk(step, block)
            if cutlass.const_expr(ends):
                if cutlass.const_expr(not config.keeps_order):
                    fetched = exchange.fetch_ahead(work, step, fetched)
                if cutlass.const_expr(config.leaves_visits):
                    visits.take_rule(work, following)
            block_of(work, following, next_block, next_place).read_lse()
            makes_dq = ends and config.wanted.q
            if cutlass.const_expr(config.weighs_early or not makes_dq):
                warpgroup.wait_group(makes_dq + config.wanted.k)  # S
            if cutlass.const_expr(config.weighs_early):
                make_p(work, following, next_block, next_place)
            if cutlass.const_expr(ends):
                # The fetch's branch keeps ptxas from moving P behind it.
                if cutlass.const_expr(config.keeps_order):
                    settle(cute.recast_tensor(flat(mma.s), Int32))
                    fetched = exchange.fetch_ahead(work, step, fetched)
                exchange.take_dq(work, step, place, before)
        before, place = place, next_place
    warpgroup.wait_group(0)
    results.finish(work)


@cute.jit
def begin(work):
    """Issue the first loads, and S of the first block. Returns the place of the first step, and what
    ``exchange.fetch_first`` does."""
    config, tile, channels = work.config, work.tile, work.channels
    fetched = exchange.fetch_first(work)
    channels["k_full"].wait(0)
    if cutlass.const_expr(config.scatters):  # noqa: SIM102
        if tile.has_unseen_keys:
            channels["v_full"].wait(0)
    clear_unseen_keys(work)
    if cutlass.const_expr(config.keys_in_registers):
        read_keys(work, work.shared.k, work.mma.k)
    wait_queries(work, Int32(0))
    place = tile.first
    if cutlass.const_expr(config.leaves_visits):
        place = visits.place(work, Int32(0))
        visits.take_rule(work, Int32(0))
    exchange.clear_rows(work, place[1], Int32(0))
    exchange.stand_apart(work)
    work.issue_s(0, 0)
    channels["v_full"].wait(0)
    if cutlass.const_expr(config.keys_in_registers):
        read_keys(work, work.shared.v, work.mma.v)
    if cutlass.const_expr(config.holds_v):
        read_keys(work, work.shared.v + config.tile_n * tma.ROW_BYTES, work.mma.held_v)
    warpgroup.wait_group(0)
    return place, fetched


@cute.jit
def place_after(work, step, place):
    """The place of the step after one. Its Q has arrived."""
    if cutlass.const_expr(work.config.leaves_visits):
        place = visits.place(work, step + 1)
    else:
        place = work.tile.following(*place)
    return place


@cute.jit
def make_p(work, step, block: cutlass.Constexpr, place):
    """Make P of a block in the registers of its S."""
    weigh(block_of(work, step, block, place), flat(work.mma.s), work.tile.needs_mask(*place, block))


@cute.jit
def wait_queries(work, step):
    """Wait for a step's Q, its rows' statistics and the bias."""
    work.channels["q_full"].wait(step)
    if cutlass.const_expr(work.config.bias_tiles):
        work.channels["bias_full"].wait(step)


def lse_registers(config) -> cute.Tensor:
    """Registers for lse' of a block's columns of a thread."""
    return cute.make_rmem_tensor(config.block_m // COLUMNS * PAIR, Float32)


def start_dp(block, dp: cute.Tensor) -> None:
    """Start the accumulators of dP from -delta."""
    for column, registers in block.pairs:
        less = block.statistic(1, column)
        for i, j in registers:
            dp[i] = less[j]


@cute.jit
def read_keys(work, base, operand: cute.Tensor):
    """Read the consumer's rows of a span of K or V into the registers of an operand, which has its first columns."""
    words = cute.recast_tensor(flat(operand), Int32)
    start = base.toint() + work.first_row * tma.ROW_BYTES
    chunks = cute.size(words) // THREAD_ROWS
    for i, word in enumerate(load_words(start, PlaceInRows(work.row, work.member), chunks)):
        words[i] = word


@cute.jit
def put_ds(work, step, block: cutlass.Constexpr):
    """Put dS of a block into dK's operand and into shared memory."""
    keep(work.mma.dp, work.mma.ds_rows)
    exchange.wait_other(work, step, block)
    exchange.store_ds(work, step, block)


class PlaceInRows(NamedTuple):
    """A thread's first row of 64, and which of the quad's threads it is."""

    index: Int32
    member: Int32
