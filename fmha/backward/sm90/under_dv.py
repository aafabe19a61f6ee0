"""Steps of a consumer in another order: consumers meet under dV, and the next S is issued behind dQ of the step before.

    issue dQ and dK of the step before, S | wait dQ | dQ to global memory | issue dP | wait S | P = exp(S - lse') |
    issue dV | wait dP | dS = P (dP - delta) | dS to shared memory | barrier

So the stores of dS and the fence behind them have half of shared memory's bandwidth to themselves (P^T comes from
registers), and S and dK run while dQ leaves its registers, which are dP's. All gradients, no bias, in any order of
addition. Every stage of Q and dO is filled two steps before it is read.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from warpspec.common import tma
from warpspec.common.wgmma import flat
from warpspec.fmha.backward.device.arithmetic import derive
from warpspec.fmha.backward.device.clear import clear_unseen_keys, clear_unseen_rows
from warpspec.fmha.backward.sm90 import consumer, results
from warpspec.fmha.backward.sm90.arithmetic import block_of, keep


@cute.jit
def go_through(work):
    """All steps of a tile. Consumes and produces what ``consumer.go_through`` does."""
    config, tile, channels, mma = work.config, work.tile, work.channels, work.mma
    head, query_tile = tile.kv_head * tile.group, tile.start
    head_ahead, tile_ahead = head, query_tile  # of the step that is fetched
    consumer.fetch_keys(work)
    for step in cutlass.range_constexpr(config.q_stages - 1):
        if step < tile.steps:
            consumer.fetch(work, Int32(step), (head_ahead, tile_ahead))
        head_ahead, tile_ahead = tile.following(head_ahead, tile_ahead)
    channels["k_full"].wait(0)
    channels["v_full"].wait(0)
    clear_unseen_keys(work)
    if cutlass.const_expr(config.keys_in_registers):
        consumer.read_keys(work, work.shared.k, mma.k)
        consumer.read_keys(work, work.shared.v, mma.v)
    consumer.wait_queries(work, Int32(0))
    clear_unseen_rows(work, query_tile, Int32(0))
    consumer.stand_apart(work)
    last_block = config.query_blocks - 1
    if cutlass.const_expr(
        config.wants_k
    ):  # of the first step: dK of nothing, dQ of anything, which nobody adds
        mma.ds_rows.fill(0.0)
    for step in cutlass.range(tile.steps, unroll=1):
        work.issue_dq(step + 1)  # of the step before: the other stage
        warpgroup.wait_group(1)  # dV: its operand's registers
        work.issue_dk(cutlass.max(step - 1, 0), last_block)
        work.issue_s(step, 0)
        ahead = step + config.q_stages - 2
        if (step > 0) & (ahead < tile.steps):
            place = (head, query_tile)
            for _ in range(config.q_stages - 1):
                place = tile.following(*place)
            consumer.fetch(work, ahead, place)
        warpgroup.wait_group(2)
        if step > 0:
            results.take_queries(work, step - 1, (head, query_tile))
            head, query_tile = tile.following(head, query_tile)
        work.channels["do_full"].wait(step)
        for block in cutlass.range_constexpr(config.query_blocks):
            go_through_block(work, step, block, (head, query_tile))
        work.barrier()
        if step + 1 < tile.steps:
            consumer.wait_queries(work, step + 1)
            clear_unseen_rows(work, tile.following(head, query_tile)[1], step + 1)
    last = tile.steps - 1
    tail = other_products(work)
    work.issue_dq(last, mma=tail)
    work.issue_dk(last, last_block, mma=tail)
    warpgroup.wait_group(0)
    results.take_queries(work, last, (head, query_tile))
    results.finish(work, (head, query_tile))


def other_products(work):
    """The products' descriptors once more, of addresses that the compiler cannot know to be the same: what is live
    from the loop on takes registers that are not there."""
    lane = cute.arch.inline_ptx(
        "and.b32 {$w0}, {$r0}, 31;", write_only_types=[Int32], read_only_args=[work.thread]
    )
    zero = cute.arch.make_warp_uniform(lane >> 5) * tma.TILE_ALIGNMENT
    shared = work.shared._replace(k=work.shared.k + zero, ds=work.shared.ds + zero, q=work.shared.q + zero)
    return consumer.products(work.config, work.operands.q.element_type, shared, work.consumer)


@cute.jit
def go_through_block(work, step, block: cutlass.Constexpr, place):
    """A block of 64 queries; of the first S has been issued."""
    config, tile, mma = work.config, work.tile, work.mma
    if cutlass.const_expr(block > 0):
        work.issue_dk(step, block - 1)
        work.issue_s(step, block)
    own = block_of(work, step, block, place)
    if cutlass.const_expr(not config.delta_later):
        consumer.start_dp(own, flat(mma.dp))
    work.issue_dp(step, block)
    warpgroup.wait_group(1)  # S
    consumer.make_p(work, step, block, place)
    keep(mma.s, mma.p)
    work.issue_dv(step, block)
    if cutlass.const_expr(config.apart and block == 0):
        consumer.let_go(work, step)
    warpgroup.wait_group(1)  # dP
    derive(own, flat(mma.s), flat(mma.dp), tile.needs_mask(place[1], block))
    keep(mma.dp, mma.ds_rows)
    consumer.store_ds(work, step, block)
