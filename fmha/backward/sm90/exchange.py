"""Exchange of dS between the consumers for dQ, to which all keys of a tile add.

*Late*: a step issues dQ of the previous step, whose dS the other consumer has stored meanwhile. So the consumers need
not run in lockstep: the second begins half a step after the first, and while one makes P and dS, the other's products
run. One mbarrier per step (exchanged) synchronises them: a consumer arrives when its dS is stored and its dQ of the
previous step is finished, and waits for both consumers before it stores the next dS.

*Meeting*: a step issues its own dQ after a barrier of both consumers. Used if TMA loads a bias, which leaves no shared
memory for another stage of Q and dO, or if no dQ is wanted.

Either way, the first warp then loads a later step into the buffers that all have read.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import warpgroup

from warpspec.common.device import tma
from warpspec.common.device.wgmma import flat
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.backward.device.clear import clear_queries, clear_unseen_rows
from warpspec.fmha.backward.device.load import wait_before
from warpspec.fmha.backward.sm90 import bias, results, turns, visits
from warpspec.fmha.backward.sm90.config import APART_BARRIER, CLEARED_BARRIER, CLEARING_BARRIER
from warpspec.fmha.backward.sm90.products import other_products
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.sm90.staging import CHUNK, store_rows


@cute.jit
def store_ds(work, step, block: cutlass.Constexpr):
    """Store dS^T of the consumer's keys and a block of queries to shared memory, one key per row."""
    config, words = work.config, cute.recast_tensor(flat(work.mma.ds_rows), Int32)
    if cutlass.const_expr(config.ds_stages == 0):
        return
    stage = step % config.ds_stages * config.ds_bytes + work.first_row * tma.ROW_BYTES
    first = block * config.block_m  # query in the tile
    base = work.shared.ds.toint() + stage + first // BLOCK * config.tile_n * tma.ROW_BYTES
    if cutlass.const_expr(config.stores_bias):
        bias.store_columns(base, work.thread, words)
    else:
        store_rows(base, work.thread, words, first % BLOCK // CHUNK)


@cute.jit
def stand_apart(work):
    """Delay the second consumer until the first has P of its first block."""
    if cutlass.const_expr(work.config.late):  # noqa: SIM102
        if work.consumer == 1:
            cute.arch.barrier(barrier_id=APART_BARRIER, number_of_threads=work.config.consumer_threads)


class Clearing(NamedTuple):
    """A thread of the first consumer while that clears rows for both: what ``device.clear`` needs of it."""

    config: object
    channels: dict
    shared: tuple
    tile: object
    threads: int
    index: Int32


@cute.jit
def clear_rows(work, query_tile, step):
    """Clear rows of Q and dO as ``clear_unseen_rows`` does. Late, the first consumer clears them, and the second, which
    is half a step behind, waits for that alone: if the two met here, they would run in step from then on."""
    config = work.config
    if cutlass.const_expr(not config.late):
        clear_unseen_rows(work, query_tile, step)
    elif cutlass.const_expr(config.scatters):  # noqa: SIM102
        if work.tile.has_unseen_rows(query_tile):
            done, threads = CLEARED_BARRIER + step % 2, config.consumer_threads
            if work.consumer == 0:
                own = Clearing(config, work.channels, work.shared, work.tile, WARPGROUP_THREADS, work.thread)
                clear_queries(own, query_tile, step)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=CLEARING_BARRIER, number_of_threads=WARPGROUP_THREADS)
                cute.arch.barrier_arrive(barrier_id=done, number_of_threads=threads)
            else:
                cute.arch.barrier(barrier_id=done, number_of_threads=threads)


@cute.jit
def let_go(work, step, block: cutlass.Constexpr):
    """See ``stand_apart``."""
    if cutlass.const_expr(work.config.late and block == 0):  # noqa: SIM102
        if Boolean(step == 0) & Boolean(work.consumer == 0):
            cute.arch.barrier_arrive(barrier_id=APART_BARRIER, number_of_threads=work.config.consumer_threads)


@cute.jit
def wait_other(work, step, block: cutlass.Constexpr):
    """Late: wait until both consumers have finished the previous step. Then its dS is stored, for dQ, and nobody still
    reads the buffer that this step's dS overwrites."""
    if cutlass.const_expr(work.config.late and block == 0):  # noqa: SIM102
        if step > 0:
            work.channels["exchanged"].wait(step - 1)


@cute.jit
def issue_dq(work, step, place):
    """Issue dQ of this step, or, late, of the previous step. In the first step, late dQ is garbage that nobody adds. S
    of the next step has been issued, after dV. place: (query head, query tile) of the step."""
    warpgroup.wait_group(1)  # dV
    if cutlass.const_expr(work.config.late):
        work.issue_dq(step + 1)  # the other stage
    else:
        meet(work, step, place)
        if cutlass.const_expr(work.config.wanted.q):
            work.issue_dq(step)


@cute.jit
def meet(work, step, place):
    """Wait until both consumers have stored dS of a step and are done with its dO and the previous step's Q. Start the
    store of dS to dbias."""
    config = work.config
    if cutlass.const_expr(config.stores_bias):
        bias.wait_stored(work)
    work.barrier()
    if cutlass.const_expr(config.stores_bias):
        bias.store(work, step, place)


@cute.jit
def take_dq(work, step, place, before):
    """Wait for ``issue_dq``'s products and add them to global memory."""
    if cutlass.const_expr(work.config.wanted.q):
        warpgroup.wait_group(int(work.config.wanted.k))
    if cutlass.const_expr(work.config.late):
        if cutlass.const_expr(not work.config.holds_v):  # noqa: SIM114
            results.stage_queries(work)
        elif step > 0:  # now the other consumer has read its V
            results.stage_queries(work)
        cute.arch.fence_proxy("async.shared", space="cta")
        work.channels["exchanged"].arrive_warp(step)
        if step > 0:
            turns.add(work, step - 1, before)
    elif cutlass.const_expr(work.config.wanted.q):
        results.add_queries(work, 0, place)
        for dq_block in cutlass.range_constexpr(1, work.config.dq_blocks):
            work.issue_dq(step, dq_block)
            warpgroup.wait_group(0)
            results.add_queries(work, dq_block, place)


@cute.jit
def add_last(work):
    """Add dQ of the last step of a tile."""
    if cutlass.const_expr(work.config.late):
        last = work.tile.steps - 1
        place = visits.place(work, last) if work.config.leaves_visits else work.tile.last
        work.channels["exchanged"].wait(last)
        work.issue_dq(last, mma=other_products(work))
        warpgroup.wait_group(0)
        if cutlass.const_expr(work.config.sent_spans > 0):
            results.stage_queries(work)
            cute.arch.fence_proxy("async.shared", space="cta")
        turns.add(work, last, place)
        results.wait_sent(work)


@cute.jit
def fetch_first(work):
    """Issue the first loads of a tile, by the first warp: K; then, after the previous launch, Q; then V, and the steps
    that are fetched ahead. Returns the place of the step after these, as ``following`` does."""
    first_warp, tile = work.index < WARP_THREADS, work.tile
    place = tile.first
    if cutlass.const_expr(work.config.leaves_visits):
        place = visits.visit_of(tile, *place)
    if first_warp:
        work.loads.load_keys("k")
    wait_before(work.config)
    for step in cutlass.range_constexpr(work.config.ahead):
        if Boolean(first_warp) & Boolean(step < tile.steps):
            fetch(work, Int32(step), place)
        place = following(work, place)
        if cutlass.const_expr(step == 0):  # noqa: SIM102
            if first_warp:
                work.loads.load_keys("v")
    return place


@cute.jit
def fetch_ahead(work, step, place):
    """Issue the loads of the step ``ahead`` steps later, by the first warp, into buffers that all have read. place:
    that step's. Returns the place of the step after it."""
    step += work.config.ahead
    if Boolean(step < work.tile.steps) & Boolean(work.index < WARP_THREADS):
        fetch(work, step, place)
    return following(work, place)


@cute.jit
def following(work, place):
    """The place of the step after one that is fetched: its (query head, query tile), or its ``visits.Visit``, which the
    first warp alone knows."""
    if cutlass.const_expr(not work.config.leaves_visits):
        place = work.tile.following(*place)
    elif work.index < WARP_THREADS:
        place = visits.visit_after(work.tile, place)
    return place


def fetch(work, step, place) -> None:
    if work.config.leaves_visits:
        visits.leave(work, step, place)
    work.loads.load_step(step, *place[:2], waits=False)
    if work.config.bias_tiles:
        bias.fetch(work, step, *place)
