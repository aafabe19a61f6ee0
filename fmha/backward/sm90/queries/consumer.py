"""A consumer warpgroup: dQ of its 64 queries in registers, on wgmma.

S = Q K^T and dP = dO V^T have one query per row, so that dS is a register operand of dQ += dS K. The next key tile's S
and dP are issued in front of this one's dQ, so that the tensor core has work during all of the arithmetic:

    issue the next S, the next dP, dQ | wait S | P = exp(S - lse') | wait dP | dS = P (dP - delta) | wait dQ | dS to 16
    bits

Each consumer skips the key tiles that none of its rows sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from warpspec.common.device import tma
from warpspec.common.device.wgmma import (
    PAIR,
    QUAD,
    ROW_DISTANCE,
    THREAD_ROWS,
    WARP_ROWS,
    WARPGROUP_ROWS,
    elements,
    flat,
    multiply,
)
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.backward.device.clear import clear_rows
from warpspec.fmha.backward.sm90.arithmetic import keep
from warpspec.fmha.backward.sm90.products import (
    K_MAJOR,
    MMA_K,
    MN_MAJOR,
    accumulator,
    batched,
    make_mma,
    ring,
)
from warpspec.fmha.backward.sm90.queries.config import CLEARED_BARRIER
from warpspec.fmha.backward.sm90.queries.tile import index_of, rounds_of, tile_at
from warpspec.fmha.backward.sm90.results import block_of
from warpspec.fmha.device.logits import map_score
from warpspec.fmha.device.mask import hide
from warpspec.fmha.heads import BLOCK, STEP
from warpspec.fmha.sm90.staging import (
    CHUNKS,
    LOADS,
    TILE_WORDS,
    chunk_read,
    row_read,
    store_chunk,
    store_rows,
)


class QueryProducts(NamedTuple):
    """The products of a consumer. q, do (MMA, MMA_M, MMA_K), k, v, k_columns (MMA, MMA_N, MMA_K, STAGE): descriptors
    of shared memory. s, dp, dq: fp32 registers. ds: operand in registers, 16 bits."""

    q: cute.Tensor
    do: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    k_columns: cute.Tensor
    s: cute.Tensor
    dp: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor


def make_scores(config, dtype) -> cute.TiledMma:
    """S or dP [64, tile_n]: both operands from shared memory. Each place in the program that issues it makes it anew."""
    return make_mma(dtype, K_MAJOR, K_MAJOR, config.tile_n)


def make_rows(config, dtype) -> cute.TiledMma:
    """dQ [64, columns] += dS K: dS from registers."""
    return make_mma(dtype, K_MAJOR, MN_MAJOR, config.columns, registers=True)


def products(config, dtype, shared: dict, consumer) -> QueryProducts:
    """The products of a consumer. consumer: its number, which selects its 64 queries."""
    m, n = config.tile_m, config.tile_n
    scores, rows = make_scores(config, dtype), make_rows(config, dtype)
    depth = BLOCK * config.spans_of("q")
    spans = make_mma(dtype, K_MAJOR, MN_MAJOR, depth, registers=True)  # describes whole spans of K
    row_major, column_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR

    def a(name):
        layout = hopper.make_smem_layout_a(row_major, (m, n, config.room_of(name)), dtype, 1)
        tiles = ring(dtype, shared[name], layout, 1, 0)
        fragment = scores.make_fragment_A(scores.get_slice(0).partition_A(tiles))
        return batched(fragment[None, consumer, None, 0])

    def b(mma, name, layout):
        tiles = ring(dtype, shared[name], layout, config.stages, config.tile_bytes(name))
        return mma.make_fragment_B(mma.get_slice(0).partition_B(tiles))

    k_rows, v_rows = (
        hopper.make_smem_layout_b(row_major, (WARPGROUP_ROWS, n, config.room_of(name)), dtype, 1)
        for name in "kv"
    )
    k_columns = hopper.make_smem_layout_b(column_major, (WARPGROUP_ROWS, depth, n), dtype, 1)
    return QueryProducts(
        q=a("q"),
        do=a("do"),
        k=b(scores, "k", k_rows),
        v=b(scores, "v", v_rows),
        k_columns=b(spans, "k", k_columns),
        s=accumulator(scores, (WARPGROUP_ROWS, n)),
        dp=accumulator(scores, (WARPGROUP_ROWS, n)),
        ds=cute.make_rmem_tensor(rows.partition_shape_A((WARPGROUP_ROWS, n)), dtype),
        dq=accumulator(rows, (WARPGROUP_ROWS, config.columns)),
    )


class QueryRow(NamedTuple):
    """A query of a thread. lse, less: lse', -delta. first, end: it sees the keys [first, end)."""

    lse: Float32
    less: Float32
    first: Int32
    end: Int32


@dataclass(frozen=True)
class ConsumerQueries:
    """A consumer's share of a query tile. row: the first of the thread's rows among the consumer's 64. member: the
    thread's number in its quad. use: key tiles that the CTA did before. span: the key tiles that the consumer's rows
    see."""

    config: object
    channels: dict
    shared: dict
    operands: object
    numbers: object
    mma: QueryProducts
    tile: object
    consumer: Int32
    thread: Int32
    row: Int32
    member: Int32
    use: Int32
    rows: tuple
    span: object

    def issue_s(self, step) -> None:
        """Issue S of a step. The methods below issue its other products."""
        k = self.mma.k[None, None, None, (self.use + step) % self.config.stages]
        count = -(-self.config.sizes.qk // MMA_K)
        multiply(make_scores(self.config, self.dtype), self.mma.s, self.mma.q, k, False, count=count)

    def issue_dp(self, step) -> None:
        v = self.mma.v[None, None, None, (self.use + step) % self.config.stages]
        count = -(-self.config.sizes.v // MMA_K)
        multiply(make_scores(self.config, self.dtype), self.mma.dp, self.mma.do, v, False, count=count)

    def issue_dq(self, step) -> None:
        k = self.mma.k_columns[None, None, None, (self.use + step) % self.config.stages]
        multiply(make_rows(self.config, self.dtype), self.mma.dq, self.mma.ds, k, True)

    @property
    def dtype(self):
        return self.operands.q.element_type

    @property
    def index(self):
        """Number of this thread among those that clear together."""
        return self.consumer * WARPGROUP_THREADS + self.thread

    @property
    def threads(self) -> int:
        return self.config.consumer_threads

    def wait(self, name: str, step) -> None:
        """Wait until a step's K or V ("k", "v") has arrived."""
        self.channels[name + "_full"].wait(self.use + step)

    def release(self, name: str, step) -> None:
        self.channels[name + "_empty"].arrive_warp(self.use + step)


@cute.jit
def consume(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands,
    numbers,
    launch,
    consumer,
):
    """The role of a consumer: it loops over the CTA's tiles. Consumes q_full, do_full, k_full and v_full; produces
    their empties."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % WARPGROUP_THREADS
    mma = products(config, operands.q.element_type, shared, consumer)
    tiles, keys = Int32(0), Int32(0)
    for round_ in cutlass.range(rounds_of(launch), unroll=1):
        index = index_of(launch, round_)
        if index < launch.tiles * launch.rows:
            tile = tile_at(config, operands, launch, index)
            consume_tile(
                config, channels, shared, operands, numbers, mma, tile, (consumer, thread), (tiles, keys)
            )
            keys += tile.span.count
            tiles += Int32(Boolean(tile.span.count > 0))


@cute.jit
def consume_tile(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands,
    numbers,
    mma: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    place: cutlass.Constexpr,
    uses: cutlass.Constexpr,
):
    """Make dQ of a consumer's rows of a tile. place: (consumer, thread in it). uses: (tiles with keys, key tiles) that
    the CTA did before."""
    (consumer, thread), (tile_use, use) = place, uses
    lane = thread % WARP_THREADS
    row = thread // WARP_THREADS * WARP_ROWS + lane // QUAD
    first, end, span = tile.steps_of(consumer)
    first_query = tile.first_query + consumer * WARPGROUP_ROWS + row
    rows = tuple(
        QueryRow(*tile.statistics_of(operands, query), *tile.keys_of(query))
        for query in (first_query + r * ROW_DISTANCE for r in range(THREAD_ROWS))
    )
    work = ConsumerQueries(
        config,
        channels,
        shared,
        operands,
        numbers,
        mma,
        tile,
        consumer,
        thread,
        row,
        lane % QUAD,
        use,
        rows,
        span,
    )
    mma.dq.fill(0.0)
    for step in cutlass.range(first, unroll=1):
        skip(work, step)
    if tile.span.count > 0:
        channels["q_full"].wait(tile_use)
        channels["do_full"].wait(tile_use)
    if first < end:
        go_through(work, first, end, tile_use)
    elif tile.span.count > 0:
        release_queries(work, tile_use)
    for step in cutlass.range(end, tile.span.count, unroll=1):
        skip(work, step)
    write_queries(work)


def release_queries(work, tile_use) -> None:
    """The tile's Q and dO have been read."""
    for name in ("q", "do"):
        work.channels[name + "_empty"].arrive_warp(tile_use)


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
    work.wait("v", first)
    work.issue_dp(first)
    warpgroup.wait_group(1)
    weigh(work, first)
    warpgroup.wait_group(0)
    work.release("v", first)
    derive(work, first)
    keep(work.mma.dp, work.mma.ds)
    for step in cutlass.range(first + 1, end, unroll=1):
        work.wait("k", step)
        clear_keys(work, step)
        work.issue_s(step)
        work.wait("v", step)
        work.issue_dp(step)
        work.issue_dq(step - 1)
        warpgroup.wait_group(2)  # S
        weigh(work, step)
        warpgroup.wait_group(1)  # dP
        work.release("v", step)
        derive(work, step)
        warpgroup.wait_group(0)  # dQ
        work.release("k", step - 1)
        keep(work.mma.dp, work.mma.ds)
    release_queries(work, tile_use)
    work.issue_dq(end - 1)
    warpgroup.wait_group(0)
    work.release("k", end - 1)


@cute.jit
def clear_keys(work, step):
    """Clear rows of K whose keys no row of the tile sees: in dQ, 0 times a NaN stored there would reach the others. All
    consumers come here, in every step."""
    config, span = work.config, work.tile.span
    if cutlass.const_expr(config.scatters):
        number = span.begin + step
        if span.has_unseen(number, config.tile_n):
            stage = (work.use + step) % config.stages * config.tile_bytes("k")
            origin = number * config.tile_n
            clear_rows(work, "k", work.shared["k"] + stage, span.first - origin, span.end - origin)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=CLEARED_BARRIER, number_of_threads=config.consumer_threads)


@cute.jit
def needs_mask(work, step):
    """Whether one of the consumer's rows does not see some key of a step."""
    number, size = work.tile.span.begin + step, work.config.tile_n
    return Boolean(number * size < work.span.inner_first) | Boolean((number + 1) * size > work.span.inner_end)


def row_of(work, i: int) -> QueryRow:
    """The thread's row that element i of a fragment belongs to."""
    return work.rows[i // PAIR % THREAD_ROWS]


@cute.jit
def weigh(work, step):
    """Turn S into P = 2 ** (logit - lse') in place; 0 where a query does not see a key."""
    scores, config = flat(work.mma.s), work.config
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = map_score(config.logits, scores[i], work.numbers.logits, i) - row_of(work, i).lse
    if needs_mask(work, step):
        origin = (work.tile.span.begin + step) * config.tile_n + PAIR * work.member
        for r in cutlass.range_constexpr(THREAD_ROWS):
            first = work.rows[r].first - origin if cutlass.const_expr(config.mask.has_left) else None
            hide(scores, elements(scores, r), PAIR, PAIR * QUAD, first, work.rows[r].end - origin)
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = cute.math.exp2(scores[i], fastmath=True)


@cute.jit
def derive(work, step):
    """Turn dP into dS = P (dP - delta) in place."""
    weights, ds = flat(work.mma.s), flat(work.mma.dp)
    for i in cutlass.range_constexpr(cute.size(ds)):
        ds[i] = weights[i] * (ds[i] + row_of(work, i).less)
    if needs_mask(work, step):
        for i in cutlass.range_constexpr(cute.size(ds)):  # dP of a hidden pair may be NaN
            ds[i] = Float32(cutlass.select_(Boolean(weights[i] == Float32(0.0)), Float32(0.0), ds[i]))


@cute.jit
def write_queries(work):
    """Write dQ, scaled, to the consumer's rows, in 16 bits, in lines of 128 bytes: each warp stages its 16 rows, 64
    columns at a time."""
    config, tile, thread, dq = work.config, work.tile, work.thread, work.operands.dq
    base = work.shared["results"].toint() + work.consumer * (WARPGROUP_ROWS * tma.ROW_BYTES)
    values = flat(work.mma.dq)
    narrow = cute.make_rmem_tensor(cute.size(values), dq.element_type)
    narrow.store((values.load() * work.numbers.scale).to(dq.element_type))
    words = cute.recast_tensor(narrow, Int32)
    for block in cutlass.range_constexpr(-(-cute.size(words) // TILE_WORDS)):
        cute.arch.sync_warp()
        store_rows(base, thread, block_of(words, block, TILE_WORDS))
        cute.arch.sync_warp()
        for load in cutlass.range_constexpr(LOADS):
            query = tile.first_query + work.consumer * WARPGROUP_ROWS + row_read(thread, load)
            row = dq[tile.batch, tile.place.first_row + query, tile.head, None]
            inside = Boolean(query < tile.place.seq_q)
            if cutlass.const_expr(config.rows is not None):
                inside &= Boolean(block * CHUNKS + chunk_read(thread) < dq.shape[3] // STEP)
            store_chunk(base, thread, load, row, block, inside)
