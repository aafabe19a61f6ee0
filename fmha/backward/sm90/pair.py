"""Two consumers of the same 64 keys, for large D: one makes P and dV, the other dS and dK; each makes half of dQ's
columns.

P goes from one to the other through shared memory, in fp16 times 2**14: down to weights of 2**-28 this is more exact
than P's rounding as an operand. The threads of both have the same keys and queries of S^T and dP^T. dQ goes to global
memory straight from registers, because it has no staging buffer.

    P:  P = exp(S - lse') | hand it on | issue dV | wait for dS | issue the next S, dQ | wait, add dQ, twice
    dS: wait for P, dP | dS = P (dP - delta) | to shared memory | issue dQ, the next dP | add dQ | issue dQ, dK | add dQ
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from warpspec.common.device.handover import WORDS, store_words, vector_of
from warpspec.common.device.wgmma import PAIR, flat
from warpspec.fmha.backward.device.arithmetic import follow_map, weigh, write_bias
from warpspec.fmha.backward.device.clear import clear_unseen_keys, clear_unseen_rows
from warpspec.fmha.backward.sm90 import exchange, partial, results, turns
from warpspec.fmha.backward.sm90.arithmetic import block_of, keep
from warpspec.fmha.backward.sm90.config import P_BARRIER, P_FACTOR


@cute.jit
def go_through(work):
    """Run all steps of a tile. Consumes what ``consumer.consume`` does; each consumer produces its own q_empty and
    do_empty."""
    channels, tile = work.channels, work.tile
    channels["k_full"].wait(0)
    channels["v_full"].wait(0)
    clear_unseen_keys(work)
    if cutlass.const_expr(work.config.scatters):
        channels["q_full"].wait(0)
        clear_unseen_rows(work, tile.first[1], Int32(0))
    if cutlass.const_expr(work.consumer == 0):
        make_p(work)
    else:
        make_ds(work)


@cute.jit
def make_p(work):
    """The first consumer: P, dV, and half of dQ."""
    config, tile, channels, mma = work.config, work.tile, work.channels, work.mma
    channels["q_full"].wait(0)
    work.issue_s(0, 0)
    warpgroup.wait_group(0)
    partial.send(work, "s", mma.s, Int32(0))
    head, query_tile = tile.first
    last = tile.steps - 1
    for step in cutlass.range(tile.steps, unroll=1):
        place = (head, query_tile)
        partial.receive(work, "s", mma.s, step)
        weigh(block_of(work, step, 0, place), flat(mma.s), tile.needs_mask(*place, 0))
        if cutlass.const_expr(config.wanted.ds):
            hand_on(work)
            cute.arch.barrier_arrive(barrier_id=P_BARRIER, number_of_threads=config.consumer_threads)
        channels["do_full"].wait(step)
        if cutlass.const_expr(config.wanted.v):
            keep(mma.s, mma.p)
            work.issue_dv(step, 0)
        partial.let_go(work, "s", step)
        head, query_tile = tile.following(head, query_tile)
        following = cutlass.min(step + 1, last)
        if cutlass.const_expr(config.wanted.v):
            warpgroup.wait_group(0)
        channels["do_empty"].arrive_warp(step)
        if cutlass.const_expr(config.wanted.ds):
            work.barrier()
        if step < last:
            channels["q_full"].wait(step + 1)
            clear_unseen_rows(work, query_tile, step + 1)
        work.issue_s(following, 0)
        if cutlass.const_expr(config.wanted.q):
            work.issue_dq(step, 0)
        warpgroup.wait_group(0)
        if step < last:
            partial.send(work, "s", mma.s, step + 1)
        if cutlass.const_expr(config.wanted.q):
            turns.wait(work, step)
            results.add_queries(work, 0, place)
            for dq_block in cutlass.range_constexpr(1, config.dq_blocks):
                work.issue_dq(step, dq_block)
                warpgroup.wait_group(0)
                results.add_queries(work, dq_block, place)
            turns.leave(work, step)
        channels["q_empty"].arrive_warp(step)


@cute.jit
def make_ds(work):
    """The second consumer: dS, dK, and half of dQ."""
    config, tile, channels, mma = work.config, work.tile, work.channels, work.mma
    late = config.do_stages == 1  # the next dP waits until dV has read dO
    channels["do_full"].wait(0)
    work.issue_dp(0, 0)
    warpgroup.wait_group(0)
    if cutlass.const_expr(config.wanted.ds):
        partial.send(work, "dp", mma.dp, Int32(0))
    head, query_tile = tile.first
    last = tile.steps - 1
    for step in cutlass.range(tile.steps, unroll=1):
        place = (head, query_tile)
        channels["q_full"].wait(step)
        warpgroup.wait_group(0)
        if step > 0:
            channels["q_empty"].arrive_warp(step - 1)
        channels["do_empty"].arrive_warp(step)
        if cutlass.const_expr(config.wanted.ds):
            cute.arch.barrier(barrier_id=P_BARRIER, number_of_threads=config.consumer_threads)
            partial.receive(work, "dp", mma.dp, step)
            derive_from_shared(work, step, place, tile.needs_mask(*place, 0))
            keep(mma.dp, mma.ds_rows)
            if cutlass.const_expr(config.wanted.q):
                exchange.store_ds(work, step, 0)
            work.barrier()
            partial.let_go(work, "dp", step)
        head, query_tile = tile.following(head, query_tile)
        following = cutlass.min(step + 1, last)
        if step < last:
            if cutlass.const_expr(config.scatters):
                channels["q_full"].wait(step + 1)
            clear_unseen_rows(work, query_tile, step + 1)
            if cutlass.const_expr(not late):
                channels["do_full"].wait(step + 1)
        if cutlass.const_expr(config.wanted.q):
            work.issue_dq(step, 0)
        if cutlass.const_expr(config.wanted.ds and not late):
            work.issue_dp(following, 0)
        if cutlass.const_expr(config.wanted.q):
            warpgroup.wait_group(0 if late else 1)
            turns.wait(work, step)
            results.add_queries(work, 0, place)
            work.issue_dq(step, 1)
        if cutlass.const_expr(config.wanted.k):
            work.issue_dk(step, 0)
        if cutlass.const_expr(config.wanted.ds and late):
            if step < last:
                channels["do_full"].wait(step + 1)
            work.issue_dp(following, 0)
        if cutlass.const_expr(config.wanted.q):
            warpgroup.wait_group(config.wanted.k + late)
            results.add_queries(work, 1, place)
            turns.leave(work, step)
        if cutlass.const_expr(config.wanted.ds and late):
            warpgroup.wait_group(0)
            if step < last:
                partial.send(work, "dp", mma.dp, step + 1)
    warpgroup.wait_group(0)
    channels["q_empty"].arrive_warp(last)


def hand_on(work) -> None:
    """Store P to shared memory."""
    scores = flat(work.mma.s)
    weights = cute.make_rmem_tensor(cute.size(scores), Float16)
    for i in range(cute.size(scores)):
        weights[i] = (scores[i] * P_FACTOR).to(Float16)
    store_words(cute.recast_tensor(weights, Int32), work.shared.p, work.thread)


@cute.jit
def derive_from_shared(work, step, place, masked):
    """Like ``arithmetic.derive``, with P from shared memory."""
    config, ds = work.config, flat(work.mma.dp)
    block = block_of(work, step, 0, place)
    for column, registers, weights in weights_of(work, block):
        less = block.statistic(1, column)
        for weight, (i, j) in zip(weights, registers, strict=True):
            ds[i] = weight.to(Float32) * (ds[i] * config.delta_factor + less[j])
    if masked | Boolean(config.logits.bias is not None):  # read P again: there are no registers to keep it
        for _, registers, weights in weights_of(work, block):
            for weight, (i, _) in zip(weights, registers, strict=True):
                hidden = Boolean(weight.to(Float32) == Float32(0.0))
                ds[i] = Float32(cutlass.select_(hidden, Float32(0.0), ds[i]))
    if cutlass.const_expr(config.wanted.bias is not None):
        write_bias(block, ds)
    if cutlass.const_expr(config.logits.curved):
        follow_map(block, lambda: in_fp32(weights_of(work, block)), ds, P_FACTOR)


def in_fp32(weights: Iterable[tuple]) -> Iterator[tuple]:
    """``weights_of`` with P in fp32."""
    for column, registers, held in weights:
        yield column, registers, [weight.to(Float32) for weight in held]


def weights_of(work, block):
    """(column, registers, their P in fp16) of each pair of columns, from shared memory."""
    for number, (column, registers) in enumerate(block.pairs):
        first = registers[0][0]
        held = number % 2 * len(registers)  # a vector holds the weights of two pairs of columns
        if held == 0:
            vector = cute.make_rmem_tensor(WORDS, Int32)
            cute.autovec_copy(vector_of(work.shared.p, work.thread, first // PAIR // WORDS), vector)
            weights = cute.recast_tensor(vector, Float16)
        yield column, registers, [weights[held + i - first] for i, _ in registers]
