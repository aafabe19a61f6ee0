"""A consumer of the kernel that makes dQ, 64 queries.

S = Q K^T and dP = dO V^T have one query per row, so that dS is a register operand of dQ += dS K. The next key tile's S
and dP are issued in front of this one's dQ, so that the tensor core has work during all of the arithmetic:

    issue the next S, the next dP, dQ | wait S | P = exp(S - lse') | wait dP | dS = P (dP - delta) | wait dQ | dS to 16
    bits

A consumer skips the steps in which none of its rows sees a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from warpspec.common.device.wgmma import (
    PAIR,
    QUAD,
    ROW_DISTANCE,
    THREAD_ROWS,
    WARPGROUP_ROWS,
    elements,
    flat,
)
from warpspec.common.hardware import WARPGROUP_THREADS
from warpspec.fmha.backward.sm90.apart.consumer import (
    OwnRows,
    clear_sums,
    end_stores,
    fence_reads,
    kept_operand,
    make_scores,
    make_sums,
    streamed_operand,
    write_rows,
)
from warpspec.fmha.backward.sm90.apart.statistics import make_statistics
from warpspec.fmha.backward.sm90.apart.tile import alone_at, index_of, rounds_of, tile_at
from warpspec.fmha.backward.sm90.arithmetic import keep
from warpspec.fmha.backward.sm90.products import accumulator
from warpspec.fmha.device.logits import map_score
from warpspec.fmha.device.mask import hide
from warpspec.fmha.heads import BLOCK


class QueryProducts(NamedTuple):
    """The products of a consumer. q, do (MMA, MMA_M, MMA_K), k, v, k_columns (MMA, MMA_N, MMA_K, STAGE): descriptors
    of shared memory. s, dp, dq: fp32 registers. ds: operand in registers, 16 bits."""

    q: cute.Tensor
    do: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    k_columns: cute.Tensor
    s: tuple
    dp: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor

    @classmethod
    def of(cls, config, dtype, shared: dict, consumer) -> QueryProducts:
        scores, sums = make_scores(config, dtype), make_sums(config, dtype, "k")
        shape = (WARPGROUP_ROWS, config.block_rows)
        own = (config, dtype, shared)
        return cls(
            *(kept_operand(*own, name, consumer) for name in ("q", "do")),
            *(streamed_operand(*own, name, False) for name in ("k", "v")),
            streamed_operand(*own, "k", True),
            s=tuple(accumulator(scores, shape) for _ in range(config.step_blocks)),
            dp=accumulator(scores, shape),
            ds=cute.make_rmem_tensor(sums.partition_shape_A(shape), dtype),
            dq=accumulator(sums, (WARPGROUP_ROWS, config.columns("k"))),
        )


class QueryRow(NamedTuple):
    """A query of a thread. lse, less: lse', -delta. first, end: it sees the keys [first, end)."""

    lse: Float32
    less: Float32
    first: Int32
    end: Int32


class StatedRows(OwnRows):
    """``OwnRows`` of queries, whose statistics are in shared memory."""

    def statistics(self, r: int, inside) -> tuple:
        """(lse', -delta) of the thread's row r; of one past the last query, as of a row that sees no key."""
        row = self.consumer * WARPGROUP_ROWS + self.row + r * ROW_DISTANCE
        start = self.shared["statistics"] + (row // 2 * 4 + row % 2)
        lse, less = (cute.make_tensor(start + place, cute.make_layout(1))[0] for place in (0, 2))
        return (
            Float32(cutlass.select_(inside, lse, Float32.inf)),
            Float32(cutlass.select_(inside, less, Float32(0.0))),
        )


@dataclass(frozen=True)
class OwnQueries(StatedRows):
    """A consumer's queries. rows: the thread's. span: the key tiles that the consumer's rows see."""

    rows: tuple
    span: object

    def issue_dq(self, step, block: int = 0) -> None:
        """Issue dQ of a block of a step."""
        self.issue_sums("k", (self.mma.dq, self.mma.ds, self.mma.k_columns), step, block)

    def row_of(self, i: int) -> QueryRow:
        """The row that element i of a fragment belongs to."""
        return self.rows[i // PAIR % THREAD_ROWS]

    def first_key(self, step, block: int):
        """The first key of a block of a step."""
        return (self.tile.span.begin + step) * self.config.tile_n + block * BLOCK

    def needs_mask(self, step, block: int):
        """Whether one of the consumer's rows does not see some key of a block."""
        first, size = self.first_key(step, block), self.config.block_rows
        return Boolean(first < self.span.inner_first) | Boolean(first + size > self.span.inner_end)


@cute.jit
def consume(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands,
    stores: cutlass.Constexpr,
    launch,
    consumer,
):
    """The role of a consumer: it loops over the CTA's tiles. Consumes q_full, do_full, k_full and v_full; produces
    their empties."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % WARPGROUP_THREADS
    mma = QueryProducts.of(config, operands.q.element_type, shared, consumer)
    tiles, steps = Int32(0), Int32(0)
    for round_ in cutlass.range(rounds_of(launch.count), unroll=1):
        index = index_of(round_)
        if index < launch.count:
            tile = tile_at(config, operands, launch, index)
            own = StatedRows(
                config, channels, shared, operands, (operands.dq,), stores, mma, tile, consumer, thread, steps
            )
            consume_tile(own, tiles)
            steps += tile.span.count
            tiles += Int32(Boolean(tile.span.count > 0))
    end_stores()


@cute.jit
def consume_tile(own: cutlass.Constexpr, tile_use):
    """Make dQ of a consumer's rows of a tile. tile_use: tiles with steps that the CTA did before."""
    tile = own.tile
    first, end, span = tile.steps_of(own.consumer)
    first_query = tile.first_query + own.consumer * WARPGROUP_ROWS + own.row
    clear_sums(own.mma.dq)
    for step in cutlass.range(first, unroll=1):
        skip(own, step)
    statistics = cute.make_rmem_tensor((THREAD_ROWS, 2), Float32)
    statistics.fill(0.0)
    if cutlass.const_expr(own.config.makes_statistics):
        make_statistics(own, statistics)
    if tile.span.count > 0:
        own.channels["q_full"].wait(tile_use)
        if cutlass.const_expr(not own.config.makes_statistics):
            for r in cutlass.range_constexpr(THREAD_ROWS):
                inside = Boolean(first_query + r * ROW_DISTANCE < tile.place.seq_q)
                statistics[r, 0], statistics[r, 1] = own.statistics(r, inside)
            fence_reads()
    rows = tuple(
        QueryRow(statistics[r, 0], statistics[r, 1], *tile.keys_of(first_query + r * ROW_DISTANCE))
        for r in range(THREAD_ROWS)
    )
    work = OwnQueries(**vars(own), rows=rows, span=span)
    if first < end:
        (go_through if own.config.step_blocks == 1 else go_in_pairs)(work, first, end, tile_use)
    elif tile.span.count > 0:
        work.channels["do_full"].wait(tile_use)
        work.release_tile(tile_use)
    for step in cutlass.range(end, tile.span.count, unroll=1):
        skip(work, step)
    dq = flat(work.mma.dq)
    dq.store(dq.load() * work.operands.scale)
    rows = tile.place.seq_q - tile.first_query
    write_rows(work, 0, dq, (tile.head, tile.batch, tile.place.first_row + tile.first_query, rows))


@cute.jit
def skip(work, step):
    """A step in which the consumer's rows see no key: its waits and arrivals."""
    work.wait("k", step)
    clear_keys(work, step)
    work.release("k", step)
    work.wait("v", step)
    work.release("v", step)


@cute.jit
def go_through(work, first, end, tile_use):
    """Add up dQ over the steps [first, end)."""
    work.wait("k", first)
    clear_keys(work, first)
    work.issue_s(first)
    work.channels["do_full"].wait(tile_use)
    work.wait("v", first)
    work.issue_dp(first)
    warpgroup.wait_group(1)
    weigh(work, first, 0)
    warpgroup.wait_group(0)
    work.release("v", first)
    derive(work, first, 0)
    keep(work.mma.dp, work.mma.ds)
    for step in cutlass.range(first + 1, end, unroll=1):
        work.wait("k", step)
        clear_keys(work, step)
        work.issue_s(step)
        work.wait("v", step)
        work.issue_dp(step)
        work.issue_dq(step - 1)
        warpgroup.wait_group(2)  # S
        weigh(work, step, 0)
        warpgroup.wait_group(1)  # dP
        work.release("v", step)
        derive(work, step, 0)
        warpgroup.wait_group(0)  # dQ
        work.release("k", step - 1)
        keep(work.mma.dp, work.mma.ds)
    work.release_tile(tile_use)
    work.issue_dq(end - 1)
    warpgroup.wait_group(0)
    work.release("k", end - 1)


@cute.jit
def go_in_pairs(work, first, end, tile_use):
    """``go_through`` where a step has two blocks of keys. Of the first and last steps one may be left out."""
    config, place = work.config, work.tile.span.begin * work.config.tile_n
    later, earlier = alone_at((first, end), (work.span.first - place, work.span.end - place), config.tile_n)
    if later:
        add_alone(work, first, 1, first + 1 == end, tile_use)
        first += 1
    if first < end - Int32(earlier):
        work.wait("k", first)
        clear_keys(work, first)
        work.issue_s(first, 0)
        work.channels["do_full"].wait(tile_use)
        warpgroup.wait_group(0)
        for step in cutlass.range(first, end - 1 - Int32(earlier), unroll=1):
            add_pair(work, step, True)
        add_pair(work, end - 1 - Int32(earlier), False, ~earlier, tile_use)
    if earlier:
        add_alone(work, end - 1, 0, True, tile_use)


@cute.jit
def add_pair(work, step, follows: cutlass.Constexpr, last=False, tile_use=None):
    """Add a step to dQ, whose first block's S is there. follows: then make that of the step that follows. last: it is
    the tile's last."""
    work.wait("v", step)
    work.issue_dp(step, 0)
    work.issue_s(step, 1)
    weigh(work, step, 0)
    warpgroup.wait_group(1)  # the first dP
    derive(work, step, 0)
    keep(work.mma.dp, work.mma.ds)
    work.issue_dq(step, 0)
    work.issue_dp(step, 1)
    warpgroup.wait_group(2)  # the second S
    if cutlass.const_expr(not follows):  # noqa: SIM102
        if last:
            work.release_own(0, tile_use)
    weigh(work, step, 1)
    if cutlass.const_expr(follows):
        work.wait("k", step + 1)
        clear_keys(work, step + 1)
        work.issue_s(step + 1, 0)
    warpgroup.wait_group(int(follows))  # the first dQ, the second dP
    work.release("v", step)
    if cutlass.const_expr(not follows):  # noqa: SIM102
        if last:
            work.release_own(1, tile_use)
    derive(work, step, 1)
    keep(work.mma.dp, work.mma.ds)
    work.issue_dq(step, 1)
    warpgroup.wait_group(0)
    work.release("k", step)


@cute.jit
def add_alone(work, step, block: cutlass.Constexpr, last, tile_use):
    """Add one block of a step, whose other one the consumer's rows do not see. last: it is the tile's last."""
    work.wait("k", step)
    clear_keys(work, step)
    work.issue_s(step, block)
    work.channels["do_full"].wait(tile_use)
    work.wait("v", step)
    work.issue_dp(step, block)
    warpgroup.wait_group(1)
    weigh(work, step, block)
    warpgroup.wait_group(0)
    work.release("v", step)
    if last:
        work.release_tile(tile_use)
    derive(work, step, block)
    keep(work.mma.dp, work.mma.ds)
    work.issue_dq(step, block)
    warpgroup.wait_group(0)
    work.release("k", step)


@cute.jit
def clear_keys(work, step):
    """Clear rows of K whose keys no row of the tile sees: in dQ, 0 times a NaN stored there would reach the others. All
    consumers come here, in every step."""
    config, span = work.config, work.tile.span
    if cutlass.const_expr(config.scatters):
        number = span.begin + step
        if span.has_unseen(number, config.tile_n):
            origin = number * config.tile_n
            work.clear("k", step, span.first - origin, span.end - origin)
            work.meet()


@cute.jit
def weigh(work, step, block: cutlass.Constexpr):
    """Turn S into P = 2 ** (logit - lse') in place; 0 where a query does not see a key. Where dP has long been issued,
    the mask comes behind the powers: ptxas would otherwise move these behind the wait for dP."""
    scores, config = flat(work.mma.s[block]), work.config
    first_powers = config.step_blocks > 1
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = map_score(config.logits, scores[i], work.operands.logits, i) - work.row_of(i).lse
    if cutlass.const_expr(first_powers):
        raise_two(scores)
    if work.needs_mask(step, block):
        origin = work.first_key(step, block) + PAIR * work.member
        for r in cutlass.range_constexpr(THREAD_ROWS):
            first = work.rows[r].first - origin if cutlass.const_expr(config.mask.has_left) else None
            end = work.rows[r].end - origin
            hidden = 0.0 if first_powers else -Float32.inf
            hide(scores, elements(scores, r), PAIR, PAIR * QUAD, first, end, hidden=hidden)
    if cutlass.const_expr(not first_powers):
        raise_two(scores)


def raise_two(values: cute.Tensor) -> None:
    """Turn values into powers of two in place."""
    for i in range(cute.size(values)):
        values[i] = cute.math.exp2(values[i], fastmath=True)


@cute.jit
def derive(work, step, block: cutlass.Constexpr):
    """Turn dP into dS = P (dP - delta) in place."""
    weights, ds = flat(work.mma.s[block]), flat(work.mma.dp)
    for i in cutlass.range_constexpr(cute.size(ds)):
        ds[i] = weights[i] * (ds[i] + work.row_of(i).less)
    if work.needs_mask(step, block):
        for i in cutlass.range_constexpr(cute.size(ds)):  # dP of a hidden pair may be NaN
            ds[i] = Float32(cutlass.select_(Boolean(weights[i] == Float32(0.0)), Float32(0.0), ds[i]))
