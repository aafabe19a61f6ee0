"""Rows whose candidates are fetched again (``again``), by a warp, the warps of a CTA or the CTAs of a cluster.

The maxima of all lanes that share a row give a threshold (``threshold``), which leaves few candidates. Each candidate
is ranked by counting the larger ones, which sorts them, and one warp turns the first k into probabilities.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint64

from warpspec.common.hardware import WARP_THREADS
from warpspec.softmax.topk.again import WarpRow, collect, stream
from warpspec.softmax.topk.config import LEADER, RANK_BATCH
from warpspec.softmax.topk.select import close_list, keep_largest, rank_among, rank_in
from warpspec.softmax.topk.states import joint_state, send_state, state_of_lanes, write
from warpspec.softmax.topk.threshold import threshold_of
from warpspec.softmax.topk.tiles import TopkStorage, allocate
from warpspec.softmax.vectors import row_span


@cute.jit
def again_rows(config: cutlass.Constexpr, logits, probs, indices):
    """Compute this CTA's row, or rows."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), thread % WARP_THREADS
    k, shared = Int32(probs.shape[1]), allocate(config)
    candidates, chunks = shared.candidates[None, warp], shared.chunks[None, warp]
    if cutlass.const_expr(config.warps * config.cluster == 1):
        row = block * config.rows + warp
        if row < logits.shape[0]:
            place = row_span(logits, row, config.dtype, config.edges)
            mine = WarpRow(place, Int32(0), lane, k, candidates, chunks)
            row_of_warp(config, mine, shared.ranked[None, warp], probs, indices, row)
    else:
        row, rank = block // config.cluster, block % config.cluster
        place = row_span(logits, row, config.dtype, config.edges)
        mine = WarpRow(place, rank * config.warps + warp, lane, k, candidates, chunks)
        row_of_cta(config, mine, shared, warp, rank, probs, indices, row)


@cute.jit
def row_of_warp(config: cutlass.Constexpr, mine: WarpRow, ranked: cute.Tensor, probs, indices, row):
    maximum, sum_ = stream(config, mine)
    count = collect(config, mine, threshold_of(config, mine, 0, 0, None, None, maximum))
    maximum, sum_ = state_of_lanes(maximum, sum_, config.accurate)
    close_list(mine.candidates, count, mine.lane)
    cute.arch.sync_warp()
    for i in cutlass.range(mine.lane, count, WARP_THREADS, unroll=1):
        word = mine.candidates[i]
        position = rank_in(mine.candidates, count, word)
        if position < mine.k:
            ranked[position] = word
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.sync_warp()
    write(config, ranked, mine, maximum, sum_, probs, indices, row)


@cute.jit
def row_of_cta(
    config: cutlass.Constexpr, mine: WarpRow, shared: TopkStorage, warp, rank, probs, indices, row
):
    if cutlass.const_expr(config.cluster > 1):
        cute.arch.cluster_arrive_relaxed()

    # 1. Each warp's share: its softmax state, and the elements that reach the row's threshold.
    maximum, sum_ = stream(config, mine)
    key = threshold_of(config, mine, warp, rank, shared.samples, shared.cluster_samples, maximum)
    count = collect(config, mine, key)
    if count > config.k_capacity:
        keep_largest(mine.candidates, count, mine.k, mine.lane)
        count = mine.k
    close_list(mine.candidates, count, mine.lane)
    maximum, sum_ = state_of_lanes(maximum, sum_, config.accurate)
    if mine.lane == 0:
        shared.counts[warp], shared.maxima[warp], shared.sums[warp] = count, maximum, sum_
    cute.arch.sync_threads()

    # 2. Send the candidates to the cluster's leader, ranked only if a CTA has too many.
    if cutlass.const_expr(config.cluster > 1):
        send_list(config, mine, shared, warp, rank, count)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    # 3. Ranks; one warp writes.
    if rank == LEADER:
        if cutlass.const_expr(config.cluster > 1):
            for c in cutlass.range(warp, config.cluster, config.warps, unroll=1):
                rank_list(shared.lists, shared.list_counts, config.cluster, c, mine, shared.ranked)
        else:
            rank_list(shared.candidates, shared.counts, config.warps, warp, mine, shared.ranked)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            if cutlass.const_expr(config.cluster > 1):
                maxima, sums, count = shared.list_maxima, shared.list_sums, config.cluster
            else:
                maxima, sums, count = shared.maxima, shared.sums, config.warps
            maximum, sum_ = joint_state(maxima, sums, count, config.accurate)
            write(config, shared.ranked[None, 0], mine, maximum, sum_, probs, indices, row)


@cute.jit
def send_list(config: cutlass.Constexpr, mine: WarpRow, shared: TopkStorage, warp, rank, count):
    """Give the cluster's leader the warp's candidates, and the first warp also the CTA's state. They are in order only
    if the CTA has more than fit. count: of the warp's candidates."""
    others = Int32(0)
    if mine.lane < config.warps:
        others = shared.counts[mine.lane]
    total = cute.arch.warp_redux_sync(others, "add")
    first = cute.arch.warp_redux_sync(Int32(cutlass.select_(mine.lane < warp, others, Int32(0))), "add")
    target = shared.lists.iterator + rank * config.cluster_list_size
    for i in cutlass.range(mine.lane, count, WARP_THREADS, unroll=1):
        word, position = mine.candidates[i], first + i
        if total > config.k_capacity:
            position = Int32(0)
            for other in cutlass.range(config.warps, unroll=1):
                position += rank_in(shared.candidates[None, other], shared.counts[other], word)
        if position < config.k_capacity:
            cute.arch.map_dsmem_ptr(target + position, LEADER).store(word)
    if warp == 0:
        total = cutlass.min(total, config.k_capacity)
        if mine.lane < RANK_BATCH:
            cute.arch.map_dsmem_ptr(target + (total + mine.lane), LEADER).store(Uint64(0))
        maximum, sum_ = joint_state(shared.maxima, shared.sums, config.warps, config.accurate)
        if mine.lane == 0:
            send_state(shared, rank, total, maximum, sum_)


@cute.jit
def rank_list(lists: cute.Tensor, counts: cute.Tensor, number: cutlass.Constexpr, own, mine: WarpRow, ranked):
    """Write every candidate of list ``own`` to its rank among those of all ``number`` lists."""
    count = counts[own]
    for batch in cutlass.range(0, count, WARP_THREADS, unroll=1):
        # The words past the end are below all candidates.
        word = lists[cutlass.min(batch + mine.lane, count), own]
        position = rank_among(lists, counts, number, word, mine.lane)
        if (batch + mine.lane < count) & (position < mine.k):
            ranked[position, 0] = word
