"""A consumer warpgroup: dK and dV of its 64 keys in registers, and one part of every query tile's dQ, on wgmma.

Scores are made transposed, S^T = K Q^T, a row a key, for 64 queries at a time: so P^T and dS^T are operands of
dV += P^T dO and dK += dS^T Q straight from registers. dS goes through shared memory once, for dQ = dS K, to which all
keys of the tile add. Each block of 64 queries finds its S finished; the next one's is issued as soon as dS has been
made, so that the tensor core has work under every part of the arithmetic:

    issue dP | P = exp(S - lse') | issue dV | wait dP | dS = P (dP - delta) | issue the next S | wait dV | dS to shared
    memory; after the tile's last block: barrier, issue dQ | issue dK | wait dQ | dQ to global memory

At D 64 P is made as soon as S is there, before dQ is waited for. dP starts from -delta. The barrier is the only one of
a step: behind it the first warp fetches what comes ``ahead`` steps later to where all have read. So there is no warp
for the loads, and threads may have 255 registers each: with fewer ptxas runs the products one by one. For the same
reason all that reads a product's registers stands in the iteration that issues it (docs/notebook.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common import tma
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.common.wgmma import (
    QUAD,
    ROW_DISTANCE,
    THREAD_ROWS,
    WARP_ROWS,
    flat,
    multiply,
)
from warpspec.fmha.backward.device.arithmetic import derive, weigh
from warpspec.fmha.backward.device.clear import clear_unseen_keys, clear_unseen_rows
from warpspec.fmha.backward.device.load import load_keys, load_step
from warpspec.fmha.backward.device.tile import key_tile_at
from warpspec.fmha.backward.sm90 import bias, pair, results
from warpspec.fmha.backward.sm90.arithmetic import block_of, keep
from warpspec.fmha.backward.sm90.config import CONSUMER_BARRIER, CONSUMER_KEYS
from warpspec.fmha.features import BLOCK
from warpspec.fmha.sm90.staging import load_words, store_rows

ONE_WARPGROUP = (1, 1, 1)
MMA_K = 16  # rows that one wgmma sums over
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def make_mma(dtype, a_major, b_major, columns: int, registers: bool = False) -> cute.TiledMma:
    """D [64, columns] = A B; A from shared memory, or registers."""
    source = warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
    tile = (CONSUMER_KEYS, columns)
    return hopper.make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, ONE_WARPGROUP, tile, source)


class Products(NamedTuple):
    """The products of a consumer; of a pair's, those that it makes. k, v, ds (MMA, MMA_M, MMA_K[, STAGE]), q, do,
    q_columns, do_columns (MMA, MMA_N, MMA_K, STAGE): descriptors of shared memory, k and v at D 64 registers;
    k_columns: likewise, one for each part of dQ. s, dp, dq, dk, dv: fp32 registers; p, ds_rows: operands in registers,
    16 bits."""

    scores: cute.TiledMma
    rows: cute.TiledMma
    queries: cute.TiledMma
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    q_columns: cute.Tensor
    do_columns: cute.Tensor
    ds: cute.Tensor
    k_columns: list
    s: cute.Tensor | None
    dp: cute.Tensor | None
    p: cute.Tensor | None
    ds_rows: cute.Tensor | None
    dq: cute.Tensor
    dk: cute.Tensor | None
    dv: cute.Tensor | None


def products(config, dtype, shared, consumer) -> Products:
    """consumer: which 64 keys, and which part of dQ."""
    m, n, depth = config.tile_m, config.tile_n, config.head_dim
    scores = make_mma(dtype, K_MAJOR, K_MAJOR, BLOCK, registers=config.keys_in_registers)
    rows = make_mma(dtype, K_MAJOR, MN_MAJOR, depth, registers=True)
    queries = make_mma(dtype, K_MAJOR if config.stores_bias else MN_MAJOR, MN_MAJOR, BLOCK)
    row_major, column_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR

    def ring(base, layout, stages, stage_bytes):
        first = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=dtype), layout.outer)
        first = first[None, None, 0]
        stage = cute.make_layout(stages, stride=stage_bytes * 8 // dtype.width)
        return cute.make_tensor(first.iterator, cute.append(first.layout, stage))

    def a(mma, base, layout, stages=1, stage_bytes=0):
        return mma.make_fragment_A(mma.get_slice(0).partition_A(ring(base, layout, stages, stage_bytes)))

    def b(mma, base, layout, stages, stage_bytes):
        return mma.make_fragment_B(mma.get_slice(0).partition_B(ring(base, layout, stages, stage_bytes)))

    keys = hopper.make_smem_layout_a(row_major, (n, m, depth), dtype, 1)
    queries_rows = hopper.make_smem_layout_b(row_major, (n, m, depth), dtype, 1)
    queries_columns = hopper.make_smem_layout_b(column_major, (n, depth, m), dtype, 1)
    ds_major = row_major if config.stores_bias else column_major
    ds_layout = hopper.make_smem_layout_a(ds_major, (BLOCK, BLOCK, n), dtype, 1)
    k_layout = hopper.make_smem_layout_b(column_major, (BLOCK, BLOCK, n), dtype, 1)
    # A part of dQ: a block of rows by a block of columns; a consumer's are neighbours.
    columns = depth // BLOCK
    block_bytes = n * BLOCK * dtype.width // 8
    parts = [consumer * config.consumer_parts + i for i in range(config.consumer_parts)]
    ds_base = (shared.ds + parts[0] // columns * block_bytes).align(tma.TILE_ALIGNMENT)
    k_bases = [(shared.k + part % columns * block_bytes).align(tma.TILE_ALIGNMENT) for part in parts]
    queries_of = {"stages": config.q_stages, "stage_bytes": config.query_tile_bytes}
    dos_of = {"stages": config.do_stages, "stage_bytes": config.query_tile_bytes}

    def accumulator(mma, shape):
        return cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)

    def keys_of(base):
        if config.keys_in_registers:
            return cute.make_rmem_tensor(scores.partition_shape_A((CONSUMER_KEYS, depth)), dtype)
        return batched(a(scores, base, keys)[None, 0 if config.paired else consumer, None, 0])

    operand = rows.partition_shape_A((CONSUMER_KEYS, BLOCK))
    square, wide = (CONSUMER_KEYS, BLOCK), (CONSUMER_KEYS, depth)
    makes_p, makes_ds = (not config.paired or consumer == each for each in range(2))
    s = accumulator(scores, square) if makes_p else None
    dp = accumulator(scores, square) if makes_ds else None
    return Products(
        scores,
        rows,
        queries,
        k=keys_of(shared.k),
        v=keys_of(shared.v),
        q=b(scores, shared.q, queries_rows, **queries_of),
        do=b(scores, shared.do, queries_rows, **dos_of),
        q_columns=b(rows, shared.q, queries_columns, **queries_of),
        do_columns=b(rows, shared.do, queries_columns, **dos_of),
        ds=a(queries, ds_base, ds_layout, max(config.ds_stages, 1), config.ds_bytes),
        k_columns=[b(queries, base, k_layout, 1, 0) for base in k_bases],
        s=s,
        dp=dp,
        p=cute.make_rmem_tensor(operand, dtype) if makes_p else None,
        ds_rows=cute.make_rmem_tensor(operand, dtype) if makes_ds else None,
        # Its registers are dP's, once dS is in shared memory; of a pair, whose next S or dP is under way then, its own.
        dq=accumulator(queries, (BLOCK, BLOCK)) if config.paired else dp,
        dk=accumulator(rows, wide) if makes_ds else None,
        dv=accumulator(rows, wide) if makes_p else None,
    )


@dataclass(frozen=True)
class Work:
    """A consumer's part of a key tile. first_row: of the tile, the consumer's first. thread: 0..127 of it; row: the
    thread's first of 64 rows; member: of the quad. bounds: [first, end) of the queries that see each of the thread's
    keys. loads: descriptors, and what they are of."""

    config: object
    channels: dict
    shared: tuple
    operands: object
    scales: tuple
    mma: Products
    tile: object
    consumer: Int32 | int
    first_row: Int32 | int
    thread: Int32
    row: Int32
    member: Int32
    bounds: tuple
    loads: tuple

    def key(self, r: int):
        """Key of the thread's row r, in the tile."""
        return self.first_row + self.row + r * ROW_DISTANCE

    def issue_s(self, step, block: int) -> None:
        """S^T of a block of 64 queries; the others likewise."""
        stage = step % self.config.q_stages
        multiply(self.mma.scores, self.mma.s, self.mma.k, rows_of(self.mma.q, block, stage), False)

    def issue_dp(self, step, block: int) -> None:
        stage = step % self.config.do_stages
        multiply(
            self.mma.scores,
            self.mma.dp,
            self.mma.v,
            rows_of(self.mma.do, block, stage),
            not self.config.paired,
        )

    def issue_dv(self, step, block: int) -> None:
        stage = step % self.config.do_stages
        columns = self.mma.do_columns[None, None, None, stage]
        multiply(self.mma.rows, self.mma.dv, self.mma.p, columns, True, block * (BLOCK // MMA_K))

    def issue_dk(self, step, block: int) -> None:
        stage = step % self.config.q_stages
        columns = self.mma.q_columns[None, None, None, stage]
        multiply(self.mma.rows, self.mma.dk, self.mma.ds_rows, columns, True, block * (BLOCK // MMA_K))

    def issue_dq(self, step, part: int = 0) -> None:
        """part: of the consumer's."""
        ds = self.mma.ds[None, None, None, step % self.config.ds_stages]
        multiply(self.mma.queries, self.mma.dq, ds, self.mma.k_columns[part][None, None, None, 0], False)

    @property
    def threads(self) -> int:
        """Threads that clear together."""
        return self.config.consumer_threads

    @property
    def index(self):
        """Which of them this one is."""
        return self.consumer * WARPGROUP_THREADS + self.thread

    def fence(self) -> None:
        """As ``barrier``."""
        self.barrier()

    def barrier(self) -> None:
        """All consumers are here, and what they wrote to shared memory is there for wgmma."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.config.consumer_threads)


def batched(fragment: cute.Tensor) -> cute.Tensor:
    """(MMA, 1, MMA_K) of (MMA, MMA_K)."""
    shape, stride = fragment.layout.shape, fragment.layout.stride
    return cute.make_tensor(
        fragment.iterator, cute.make_layout((shape[0], 1, shape[1]), stride=(stride[0], 0, stride[1]))
    )


def rows_of(fragment: cute.Tensor, block: int, stage) -> cute.Tensor:
    """(MMA, 1, MMA_K): a block of 64 rows of a stage."""
    return batched(fragment[None, block, None, stage])


@cute.jit
def consume(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands,
    scales,
    window,
    consumer,
    loads: cutlass.Constexpr,
):
    """One consumer. loads: (descriptors, their tensors). Consumes k_full, v_full, q_full, do_full; of a pair, produces
    q_empty after dK, do_empty after dV."""
    index, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % WARPGROUP_THREADS
    tile = key_tile_at(config, operands, window, index)
    lane = thread % WARP_THREADS
    row = thread // WARP_THREADS * WARP_ROWS + lane // QUAD
    mma = products(config, operands.q.element_type, shared, consumer)
    rows = 0 if config.paired else consumer * CONSUMER_KEYS  # of the tile, before the consumer's
    first_key = tile.first_key + rows + row
    bounds = tuple(tile.queries_of(first_key + r * ROW_DISTANCE) for r in range(THREAD_ROWS))
    work = Work(
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
        loads,
    )
    if cutlass.const_expr(mma.dk is not None):
        mma.dk.fill(0.0)
    if cutlass.const_expr(mma.dv is not None):
        mma.dv.fill(0.0)
    if tile.steps > 0:
        if cutlass.const_expr(config.paired):
            pair.go_through(work)
        else:
            go_through(work)
    results.write_keys(work)


@cute.jit
def go_through(work):
    """All steps of a tile."""
    config, tile, channels, mma = work.config, work.tile, work.channels, work.mma
    head, query_tile = tile.kv_head * tile.group, tile.start
    head_before, tile_before = head, query_tile  # of the step before
    head_ahead, tile_ahead = head, query_tile  # of the step that is fetched
    fetch_keys(work)
    for step in cutlass.range_constexpr(config.ahead):
        if step < tile.steps:
            fetch(work, Int32(step), (head_ahead, tile_ahead))
        head_ahead, tile_ahead = tile.following(head_ahead, tile_ahead)
    channels["k_full"].wait(0)
    channels["v_full"].wait(0)
    clear_unseen_keys(work)
    if cutlass.const_expr(config.keys_in_registers):
        read_keys(work, work.shared.k, mma.k)
        read_keys(work, work.shared.v, mma.v)
    wait_queries(work, Int32(0))
    clear_unseen_rows(work, query_tile, Int32(0))
    work.issue_s(0, 0)
    warpgroup.wait_group(0)
    if cutlass.const_expr(config.weighs_early):
        make_p(work, Int32(0), 0, (head, query_tile))
    last = tile.steps - 1
    for step in cutlass.range(tile.steps, unroll=1):
        place = (head, query_tile)
        channels["do_full"].wait(step)
        for block in cutlass.range_constexpr(config.query_blocks):
            ends = block + 1 == config.query_blocks
            own = block_of(work, step, block, place)
            if cutlass.const_expr(config.needs_ds):
                start_dp(own, flat(mma.dp))
                work.issue_dp(step, block)
            if cutlass.const_expr(not config.weighs_early):
                make_p(work, step, block, place)
            warpgroup.wait_group(
                1 if config.needs_ds else 0
            )  # dK of the block before, whose operand P's may be
            if cutlass.const_expr(config.wants_v):
                keep(mma.s, mma.p)
                work.issue_dv(step, block)
            following = step
            if cutlass.const_expr(ends):  # the next step: of the last one it is that again, which nobody uses
                following = cutlass.min(step + 1, last)
                wait_queries(work, following)
                if step < last:
                    head, query_tile = tile.following(head, query_tile)
                    clear_unseen_rows(work, query_tile, step + 1)
            if cutlass.const_expr(config.needs_ds):
                warpgroup.wait_group(1 if config.wants_v else 0)
                derive(own, flat(mma.s), flat(mma.dp), tile.needs_mask(place[1], block))
            next_block = 0 if ends else block + 1
            work.issue_s(following, next_block)
            warpgroup.wait_group(1)  # dV
            if cutlass.const_expr(config.needs_ds):
                keep(mma.dp, mma.ds_rows)
            if cutlass.const_expr(config.ds_stages > 0):
                store_ds(work, step, block)
            if cutlass.const_expr(ends):
                meet(work, step, place, (head_before, tile_before))
                if cutlass.const_expr(config.wants_q):
                    work.issue_dq(step)
                head_before, tile_before = place
            if cutlass.const_expr(config.wants_k):
                work.issue_dk(step, block)
            if cutlass.const_expr(ends):
                if step + config.ahead < tile.steps:
                    fetch(work, step + config.ahead, (head_ahead, tile_ahead))
                head_ahead, tile_ahead = tile.following(head_ahead, tile_ahead)
            makes_dq = ends and config.wants_q
            if cutlass.const_expr(config.weighs_early or not makes_dq):
                warpgroup.wait_group(makes_dq + config.wants_k)  # the next S
            if cutlass.const_expr(config.weighs_early):
                make_p(work, following, next_block, (head, query_tile))
            if cutlass.const_expr(makes_dq):
                warpgroup.wait_group(1 if config.wants_k else 0)
                results.take_queries(work, step, place)
    warpgroup.wait_group(0)
    results.finish(work, (head_before, tile_before))


@cute.jit
def make_p(work, step, block: cutlass.Constexpr, place):
    """P of a block in the registers of its S."""
    weigh(block_of(work, step, block, place), flat(work.mma.s), work.tile.needs_mask(place[1], block))


@cute.jit
def meet(work, step, place, before):
    """Both consumers have stored their dS of a step, and are done with its dO and with Q of the one before. What the
    copy engine has waited for goes out: dQ of the step before, dS as dbias."""
    config = work.config
    if cutlass.const_expr(config.stores_bias):
        bias.wait_stored(work)
    work.barrier()
    if cutlass.const_expr(config.stores_bias):
        bias.store(work, step, place)
    if cutlass.const_expr(config.stages_dq):  # noqa: SIM102
        if step > 0:
            results.send_queries(work, before)


@cute.jit
def wait_queries(work, step):
    """Q, its rows' statistics and the bias of a step are there."""
    work.channels["q_full"].wait(step)
    if cutlass.const_expr(work.config.bias_tiles):
        work.channels["bias_full"].wait(step)


@cute.jit
def fetch_keys(work):
    """Loads of K and V, by one warp of the CTA."""
    if work.index < WARP_THREADS:
        load_keys(work.config, work.channels, work.shared, work.operands, *work.loads, work.tile)


@cute.jit
def fetch(work, step, place):
    """Loads of a step, by one warp of the CTA, where all are done with what stood there: ``meet``."""
    if work.index < WARP_THREADS:
        head, query_tile = place
        tensors = (work.config, work.channels, work.shared, work.operands, *work.loads)
        load_step(*tensors, work.tile, step, head, query_tile, waits=False)
        if cutlass.const_expr(work.config.bias_tiles):
            bias.fetch(work, step, head, query_tile)


def start_dp(block, dp: cute.Tensor) -> None:
    """The accumulators of dP start from -delta."""
    for column, registers in block.pairs:
        less = block.statistic(1, column)
        for i, j in registers:
            dp[i] = less[j]


@cute.jit
def read_keys(work, base, operand: cute.Tensor):
    """The consumer's rows of K or V (64 columns) into the registers of an operand."""
    words = cute.recast_tensor(flat(operand), Int32)
    start = base.toint() + work.first_row * tma.ROW_BYTES
    for i, word in enumerate(load_words(start, PlaceInRows(work.row, work.member))):
        words[i] = word


@cute.jit
def store_ds(work, step, block: cutlass.Constexpr):
    """dS^T of the consumer's keys and a block of queries to shared memory, a row a key."""
    config, words = work.config, cute.recast_tensor(flat(work.mma.ds_rows), Int32)
    stage = step % config.ds_stages * config.ds_bytes + work.first_row * tma.ROW_BYTES
    base = work.shared.ds.toint() + stage + block * config.tile_n * tma.ROW_BYTES
    if cutlass.const_expr(config.stores_bias):
        bias.store_columns(base, work.thread, words)
    else:
        store_rows(base, work.thread, words)


class PlaceInRows(NamedTuple):
    """A thread's first row of 64, and which of the quad's threads it is."""

    index: Int32
    member: Int32
