"""A consumer of the kernel that makes dK and dV, 64 keys.

Scores are transposed, S^T = K Q^T, one key per row, so that P^T and dS^T are register operands of dV += P^T dO and dK
+= dS^T Q. The next step's S is issued in front of this one's dK:

    issue the next S, dK, the next dP | wait S and dK | P = exp(S - lse') | issue dV | wait dP | dS = P (dP - delta) |
    wait dV | dS to 16 bits

P and dS take the same registers one after another, for of those there are few: 128 are dK and dV at D 128. A consumer
skips the steps in which none of its keys is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from warpspec.common.device.wgmma import (
    COLUMNS,
    PAIR,
    QUAD,
    ROW_DISTANCE,
    THREAD_ROWS,
    WARPGROUP_ROWS,
    elements,
    flat,
)
from warpspec.common.hardware import WARPGROUP_THREADS
from warpspec.fmha.backward.device.place import ctas_of, key_tile_at
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
from warpspec.fmha.backward.sm90.apart.tile import OwnKeys, index_of, rounds_of
from warpspec.fmha.backward.sm90.arithmetic import keep
from warpspec.fmha.backward.sm90.products import accumulator
from warpspec.fmha.device.logits import map_score
from warpspec.fmha.device.mask import hide
from warpspec.fmha.heads import BLOCK


class KeyProducts(NamedTuple):
    """The products of a consumer. k, v (MMA, MMA_M, MMA_K), q, do, q_columns, do_columns (MMA, MMA_N, MMA_K, STAGE):
    descriptors of shared memory. s, dp, dk, dv: fp32 registers. p, ds: operands in registers, 16 bits."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    q_columns: cute.Tensor
    do_columns: cute.Tensor
    s: tuple
    dp: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor

    @classmethod
    def of(cls, config, dtype, shared: dict, consumer) -> KeyProducts:
        scores, shape, own = (
            make_scores(config, dtype),
            (WARPGROUP_ROWS, BLOCK),
            (config, dtype, shared),
        )
        sums = {name: make_sums(config, dtype, name) for name in "kv"}
        return cls(
            *(kept_operand(*own, name, consumer) for name in ("k", "v")),
            *(streamed_operand(*own, name, False) for name in ("q", "do")),
            *(streamed_operand(*own, name, True) for name in ("q", "do")),
            s=tuple(accumulator(scores, shape) for _ in range(config.step_blocks)),
            dp=accumulator(scores, shape),
            p=cute.make_rmem_tensor(sums["v"].partition_shape_A(shape), dtype),
            ds=cute.make_rmem_tensor(sums["k"].partition_shape_A(shape), dtype),
            dk=accumulator(sums["k"], (WARPGROUP_ROWS, config.columns("k"))),
            dv=accumulator(sums["v"], (WARPGROUP_ROWS, config.columns("v"))),
        )


@dataclass(frozen=True)
class OwnKeyRows(OwnRows):
    """A consumer's keys. scales: (numbers of logits, factor of dK). keys: ``OwnKeys``. bounds: for each of the thread's
    keys, [first, end) of the queries that see it."""

    scales: tuple
    keys: OwnKeys
    bounds: tuple

    def issue_dv(self, step, block: int, accumulate=True) -> None:
        """Issue dV of a block of a step."""
        self.issue_sums("v", (self.mma.dv, self.mma.p, self.mma.do_columns), step, block, accumulate)

    def issue_dk(self, step, block: int, accumulate=True) -> None:
        """Issue dK of a block of a step."""
        self.issue_sums("k", (self.mma.dk, self.mma.ds, self.mma.q_columns), step, block, accumulate)

    def statistics(self, step, block: int) -> cute.Tensor:
        """(PAIR, 2, COLUMN): lse' (0) and -delta (1) of the thread's pairs of queries of a block, in shared memory."""
        rows = self.stage(step) * self.config.tile_m + block * BLOCK + PAIR * self.member
        layout = cute.make_layout((PAIR, 2, BLOCK // COLUMNS), stride=(1, PAIR, 2 * COLUMNS))
        return cute.make_tensor((self.shared["statistics"] + rows * 2).align(8), layout)

    def needs_mask(self, query_tile, block: int):
        """Whether some query of a block does not see some of the keys."""
        first = query_tile * self.config.tile_m + block * BLOCK
        return Boolean(first < self.keys.inner_first) | Boolean(first + BLOCK > self.keys.inner_end)


@cute.jit
def consume(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands,
    stores: cutlass.Constexpr,
    scales,
    window,
    order,
    consumer,
):
    """The role of a consumer: it loops over the CTA's tiles. Consumes k_full, v_full, q_full and do_full; produces
    their empties."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % WARPGROUP_THREADS
    mma = KeyProducts.of(config, operands.q.element_type, shared, consumer)
    tiles, steps = Int32(0), Int32(0)
    count = ctas_of(config, operands, order[0], *order[3:])
    for round_ in cutlass.range(rounds_of(count), unroll=1):
        index = index_of(round_)
        if index < count:
            tile = key_tile_at(config, operands, window, order, index)
            results = (operands.dk, operands.dv)
            own = OwnRows(
                config, channels, shared, operands, results, stores, mma, tile, consumer, thread, steps
            )
            consume_tile(own, scales, tiles)
            steps += tile.steps
            tiles += Int32(Boolean(tile.steps > 0))
    end_stores()


@cute.jit
def consume_tile(own: cutlass.Constexpr, scales, tile_use):
    """Make dK and dV of a consumer's keys of a tile. tile_use: tiles with steps that the CTA did before."""
    tile, config = own.tile, own.config
    keys = OwnKeys.of(config, tile, own.consumer)
    first_key = tile.first_key + own.consumer * WARPGROUP_ROWS + own.row
    bounds = tuple(tile.queries_of(first_key + r * ROW_DISTANCE) for r in range(THREAD_ROWS))
    work = OwnKeyRows(**vars(own), scales=scales, keys=keys, bounds=bounds)
    first, end = keys.steps
    head, query_tile = tile.first
    for step in cutlass.range(first, unroll=1):
        skip(work, step, query_tile)
        head, query_tile = tile.following(head, query_tile)
    if tile.steps > 0:
        work.channels["k_full"].wait(tile_use)
    if first < end:
        go = go_through if cutlass.const_expr(config.step_blocks == 1) else go_in_pairs
        head, query_tile = go(work, (first, end), (head, query_tile), tile_use)
    else:
        work.mma.dk.fill(0.0)
        work.mma.dv.fill(0.0)
        if tile.steps > 0:
            work.channels["v_full"].wait(tile_use)
            work.release_tile(tile_use)
    for step in cutlass.range(end, tile.steps, unroll=1):
        skip(work, step, query_tile)
        head, query_tile = tile.following(head, query_tile)
    dk = flat(work.mma.dk)
    dk.store(dk.load() * scales[1])
    batch = 0 if cutlass.const_expr(config.requests.packed_k) else tile.request
    rows = tile.place.length - tile.first_key  # of packed requests; otherwise TMA knows them
    place = (tile.kv_head, batch, tile.place.first_key + tile.first_key, rows)
    write_rows(work, 0, dk, place)
    write_rows(work, 1, flat(work.mma.dv), place)


@cute.jit
def skip(work, step, query_tile):
    """A step in which the consumer's keys are seen by nobody: its waits and arrivals."""
    work.wait("q", step)
    work.wait("do", step)
    clear_queries(work, step, query_tile)
    work.release("q", step)
    work.release("do", step)


@cute.jit
def go_through(work, steps: cutlass.Constexpr, place: cutlass.Constexpr, tile_use):
    """Add up dK and dV over steps [first, end) of one block. place: (query head, query tile) of the first; returns that
    of the one after the last."""
    (first, end), (head, query_tile) = steps, place
    work.mma.dk.fill(0.0)
    work.wait("q", first)
    clear_queries(work, first, query_tile)
    work.issue_s(first, 0)
    work.channels["v_full"].wait(tile_use)
    work.wait("do", first)
    work.issue_dp(first, 0)
    warpgroup.wait_group(1)
    # The first products do not add to zeros, which the compiler would write behind wgmma.fence.
    add_dv(work, first, query_tile, False)
    work.release("do", first)
    head, query_tile = work.tile.following(head, query_tile)
    for step in cutlass.range(first + 1, end, unroll=1):
        work.wait("q", step)
        clear_queries(work, step, query_tile)
        work.issue_s(step, 0)
        work.issue_dk(step - 1, 0)
        work.wait("do", step)
        work.issue_dp(step, 0)
        fence_reads()
        warpgroup.wait_group(1)  # S, dK
        work.release("q", step - 1)
        add_dv(work, step, query_tile)
        work.release("do", step)
        head, query_tile = work.tile.following(head, query_tile)
    work.release_tile(tile_use)
    work.issue_dk(end - 1, 0)
    fence_reads()
    warpgroup.wait_group(0)
    work.release("q", end - 1)
    return head, query_tile


@cute.jit
def add_dv(work, step, query_tile, accumulate: cutlass.Constexpr = True):
    """Make P of a step whose S is there, dV with it, and dS. dP has been issued."""
    weigh(work, step, 0, query_tile)
    keep(work.mma.s[0], work.mma.p)
    work.issue_dv(step, 0, accumulate)
    warpgroup.wait_group(1)  # dP
    derive(work, step, 0, query_tile)
    warpgroup.wait_group(0)  # dV
    keep(work.mma.dp, work.mma.ds)


@cute.jit
def go_in_pairs(work, steps: cutlass.Constexpr, place: cutlass.Constexpr, tile_use):
    """``go_through`` where a step has two blocks of queries. Of the first and last steps one may be left out."""
    first, end = steps
    head, query_tile = place
    later, earlier = work.keys.alone
    clear_sums(work.mma.dk, work.mma.dv)
    if later:
        add_alone(work, first, query_tile, 1, first + 1 == end, tile_use)
        head, query_tile = work.tile.following(head, query_tile)
        first += 1
    if first < end - Int32(earlier):
        work.wait("q", first)
        clear_queries(work, first, query_tile)
        work.issue_s(first, 0)
        work.channels["v_full"].wait(tile_use)
        warpgroup.wait_group(0)
        for step in cutlass.range(first, end - 1 - Int32(earlier), unroll=1):
            before = query_tile
            head, query_tile = work.tile.following(head, query_tile)
            add_pair(work, step, before, query_tile)
        add_pair(work, end - 1 - Int32(earlier), query_tile, None, ~earlier, tile_use)
        head, query_tile = work.tile.following(head, query_tile)
    if earlier:
        add_alone(work, end - 1, query_tile, 0, True, tile_use)
        head, query_tile = work.tile.following(head, query_tile)
    return head, query_tile


@cute.jit
def add_pair(work, step, query_tile, following, last=False, tile_use=None):
    """Add a step, whose first block's S is there. following: query tile of the step whose first S is then made; None:
    there is none. last: it is the tile's last."""
    follows = following is not None
    work.wait("do", step)
    work.issue_dp(step, 0)
    work.issue_s(step, 1)
    weigh(work, step, 0, query_tile)
    keep(work.mma.s[0], work.mma.p)
    work.issue_dv(step, 0)
    warpgroup.wait_group(2)  # the first dP
    derive(work, step, 0, query_tile)
    warpgroup.wait_group(1)  # the second S; nothing waits for the first dV
    if cutlass.const_expr(not follows):  # noqa: SIM102
        if last:
            work.release_own(0, tile_use)
    keep(work.mma.dp, work.mma.ds)
    work.issue_dk(step, 0)
    work.issue_dp(step, 1)
    weigh(work, step, 1, query_tile)
    warpgroup.wait_group(0)  # the first dK, the second dP
    if cutlass.const_expr(not follows):  # noqa: SIM102
        if last:
            work.release_own(1, tile_use)
    keep(work.mma.s[1], work.mma.p)
    work.issue_dv(step, 1)
    if cutlass.const_expr(follows):
        work.wait("q", step + 1)
        clear_queries(work, step + 1, following)
        work.issue_s(step + 1, 0)
    derive(work, step, 1, query_tile)
    warpgroup.wait_group(int(follows))  # the second dV
    work.release("do", step)
    keep(work.mma.dp, work.mma.ds)
    work.issue_dk(step, 1)
    fence_reads()
    warpgroup.wait_group(0)
    work.release("q", step)


@cute.jit
def add_alone(work, step, query_tile, block: cutlass.Constexpr, last, tile_use):
    """Add one block of a step, whose other one nobody sees. last: it is the tile's last."""
    work.wait("q", step)
    clear_queries(work, step, query_tile)
    work.issue_s(step, block)
    work.channels["v_full"].wait(tile_use)
    work.wait("do", step)
    work.issue_dp(step, block)
    warpgroup.wait_group(1)
    weigh(work, step, block, query_tile)
    keep(work.mma.s[block], work.mma.p)
    work.issue_dv(step, block)
    warpgroup.wait_group(1)  # dP
    if last:
        work.release_tile(tile_use)
    derive(work, step, block, query_tile)
    warpgroup.wait_group(0)
    work.release("do", step)
    keep(work.mma.dp, work.mma.ds)
    work.issue_dk(step, block)
    fence_reads()
    warpgroup.wait_group(0)
    work.release("q", step)


@cute.jit
def clear_queries(work, step, query_tile):
    """Clear rows of Q and dO that see no key, or belong to another request: in dK and dV, 0 times a NaN stored there
    would reach the others. All consumers come here, in every step."""
    config, tile = work.config, work.tile
    if cutlass.const_expr(config.scatters):  # noqa: SIM102
        if tile.has_unseen_rows(query_tile):
            first = query_tile * config.tile_m
            work.wait("do", step)
            for name in config.streamed:
                work.clear(name, step, tile.rows_first - first, tile.rows_end - first)
            work.meet()


def pair_of(statistics: cute.Tensor, number: int, i: int) -> cute.Tensor:
    """(PAIR): lse' (0) or -delta (1) for the queries of element i of a fragment."""
    pair = cute.make_rmem_tensor(PAIR, Float32)
    cute.autovec_copy(statistics[None, number, i // (PAIR * THREAD_ROWS)], pair)
    return pair


@cute.jit
def weigh(work, step, block: cutlass.Constexpr, query_tile):
    """Turn S^T into P^T = 2 ** (logit - lse') in place; 0 where a query does not see a key."""
    scores, config, statistics = flat(work.mma.s[block]), work.config, work.statistics(step, block)
    for first in cutlass.range_constexpr(0, cute.size(scores), PAIR * THREAD_ROWS):
        lse = pair_of(statistics, 0, first)
        for i in cutlass.range_constexpr(first, first + PAIR * THREAD_ROWS):
            scores[i] = map_score(config.logits, scores[i], work.scales[0], i) - lse[i % PAIR]
    if work.needs_mask(query_tile, block):
        origin = query_tile * config.tile_m + block * BLOCK + PAIR * work.member
        for r in cutlass.range_constexpr(THREAD_ROWS):
            first, end = (bound - origin for bound in work.bounds[r])
            hide(scores, elements(scores, r), PAIR, PAIR * QUAD, first, end)
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = cute.math.exp2(scores[i], fastmath=True)


@cute.jit
def derive(work, step, block: cutlass.Constexpr, query_tile):
    """Turn dP^T into dS^T = P^T (dP^T - delta) in place."""
    weights, ds, statistics = flat(work.mma.s[block]), flat(work.mma.dp), work.statistics(step, block)
    for first in cutlass.range_constexpr(0, cute.size(ds), PAIR * THREAD_ROWS):
        less = pair_of(statistics, 1, first)
        for i in cutlass.range_constexpr(first, first + PAIR * THREAD_ROWS):
            ds[i] = weights[i] * (ds[i] + less[i % PAIR])
    if work.needs_mask(query_tile, block):
        for i in cutlass.range_constexpr(cute.size(ds)):  # dP of a hidden pair may be NaN
            ds[i] = Float32(cutlass.select_(Boolean(weights[i] == Float32(0.0)), Float32(0.0), ds[i]))
