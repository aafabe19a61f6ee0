"""Rows whose candidates are picked while they stream (``stream``), by a warp, the warps of a CTA or the CTAs of a
cluster.

Candidates below any of the thresholds are dropped. The others are ranked by counting the larger ones, which sorts them,
and one warp turns the first k into probabilities.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.softmax.topk.config import LEADER
from warpspec.softmax.topk.keys import NOTHING_YET, key_of, lowest_candidate
from warpspec.softmax.topk.select import (
    close_list,
    keep_from,
    keep_largest,
    rank_in,
    rank_in_sorted,
    sort_lanes,
)
from warpspec.softmax.topk.states import joint_state, send_state, state_of_lanes, write
from warpspec.softmax.topk.stream import WarpRow, give_samples, joint_threshold, renewed, stream
from warpspec.softmax.topk.tiles import TopkStorage, allocate
from warpspec.softmax.vectors import row_span


@cute.jit
def stream_rows(config: cutlass.Constexpr, logits, probs, indices):
    """Compute this CTA's row, or rows."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), thread % WARP_THREADS
    k, shared = Int32(probs.shape[1]), allocate(config)
    candidates, samples, bound = shared.candidates[None, warp], shared.samples, shared.bound
    if cutlass.const_expr(config.warps * config.cluster == 1):
        row = block * config.rows + warp
        if row < logits.shape[0]:
            place = row_span(logits, row, config.dtype, config.edges)
            mine = WarpRow(place, Int32(0), Int32(0), lane, k, candidates, samples, bound)
            row_of_warp(config, mine, shared.ranked[None, warp], probs, indices, row)
    else:
        row, rank = block // config.cluster, block % config.cluster
        place = row_span(logits, row, config.dtype, config.edges)
        mine = WarpRow(place, rank * config.warps + warp, warp, lane, k, candidates, samples, bound)
        row_of_cta(config, mine, shared, rank, probs, indices, row)


@cute.jit
def row_of_warp(config: cutlass.Constexpr, mine: WarpRow, ranked: cute.Tensor, probs, indices, row):
    maximum, sum_, count, threshold = stream(config, mine)
    if count > WARP_THREADS:
        own, _ = renewed(config, mine, maximum)
        floor = lowest_candidate(cutlass.max(own, threshold))
        count = keep_from(mine.candidates, count, floor, mine.lane)
        if count > WARP_THREADS:
            keep_largest(mine.candidates, count, mine.k, mine.lane)
            count = mine.k
    close_list(mine.candidates, count, mine.lane)
    maximum, sum_ = state_of_lanes(maximum, sum_, config.accurate)
    cute.arch.sync_warp()
    if mine.lane < count:
        word = mine.candidates[mine.lane]
        rank = rank_in(mine.candidates, count, word)
        if rank < mine.k:
            ranked[rank] = word
    cute.arch.sync_warp()
    write(config, ranked, mine, maximum, sum_, probs, indices, row)


@cute.jit
def row_of_cta(config: cutlass.Constexpr, mine: WarpRow, shared: TopkStorage, rank, probs, indices, row):
    if mine.warp_in_cta == 0:
        shared.samples[mine.lane] = Int32(NOTHING_YET)
        shared.bound[0] = Int32(NOTHING_YET)
    if cutlass.const_expr(config.cluster > 1):
        cute.arch.cluster_arrive_relaxed()
    cute.arch.sync_threads()

    # 1. Read every warp's share; drop what the warps' thresholds together rule out.
    maximum, sum_, count, threshold = stream(config, mine)
    lane_maximum = key_of(maximum)
    maximum, sum_ = state_of_lanes(maximum, sum_, config.accurate)
    if cutlass.const_expr(config.needs_others):
        give_samples(config, mine, sort_lanes(lane_maximum, mine.lane, WARP_THREADS))
    if mine.lane == 0:
        shared.maxima[mine.warp_in_cta] = maximum
        shared.sums[mine.warp_in_cta] = sum_
        cute.arch.atomic_max(mine.bound.iterator, threshold, sem="relaxed", scope="cta")
    cute.arch.sync_threads()
    count = keep_above_bound(config, mine, count)
    if mine.lane == 0:
        shared.counts[mine.warp_in_cta] = count
    cute.arch.sync_threads()

    # 2. Ranks among the CTA's candidates.
    if cutlass.const_expr(config.cluster > 1):
        cute.arch.cluster_wait()
    rank_candidates(config, mine, shared, rank, count)
    maximum, sum_ = joint_state(shared.maxima, shared.sums, config.warps, config.accurate)

    # 3. Ranks among the cluster's.
    if cutlass.const_expr(config.cluster > 1):
        if (mine.warp_in_cta == 0) & (mine.lane == 0):
            candidates = Int32(0)
            for w in cutlass.range_constexpr(config.warps):
                candidates += shared.counts[w]
            send_state(shared, rank, cutlass.min(candidates, mine.k), maximum, sum_)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if rank == LEADER:
            merge_lists(config, mine, shared)
            maximum, sum_ = joint_state(shared.list_maxima, shared.list_sums, config.cluster, config.accurate)
    cute.arch.sync_threads()
    if (rank == LEADER) & (mine.warp_in_cta == 0):
        write(config, shared.ranked[None, 0], mine, maximum, sum_, probs, indices, row)


@cute.jit
def keep_above_bound(config: cutlass.Constexpr, mine: WarpRow, count):
    """Drop the warp's candidates that the row's bound rules out, and all but the first k if there are more than fit.
    count: candidates. Returns the number of those that are left."""
    bound = mine.bound[0]
    if cutlass.const_expr(config.needs_others):
        bound = cutlass.max(bound, joint_threshold(mine))
    count = keep_from(mine.candidates, count, lowest_candidate(bound), mine.lane)
    if count > config.k_capacity:
        keep_largest(mine.candidates, count, mine.k, mine.lane)
        count = mine.k
    close_list(mine.candidates, count, mine.lane)
    return count


@cute.jit
def rank_candidates(config: cutlass.Constexpr, mine: WarpRow, shared: TopkStorage, rank, count):
    """Write the warp's candidates that are among the CTA's first k to their places: in shared.ranked, or in a cluster
    in the CTA's list, which the leader has."""
    for i in cutlass.range(mine.lane, count, WARP_THREADS, unroll=1):
        word = mine.candidates[i]
        position = Int32(0)
        for w in cutlass.range(config.warps, unroll=1):
            position += rank_in(shared.candidates[None, w], shared.counts[w], word)
        if position < mine.k:
            if cutlass.const_expr(config.cluster > 1):
                place = shared.lists.iterator + (rank * config.cluster_list_size + position)
                cute.arch.map_dsmem_ptr(place, LEADER).store(word)
            else:
                shared.ranked[position, 0] = word


@cute.jit
def merge_lists(config: cutlass.Constexpr, mine: WarpRow, shared: TopkStorage):
    """Write the first k of all CTAs' candidates to shared.ranked. Called by all threads of the leader."""
    for c in cutlass.range(mine.warp_in_cta, config.cluster, config.warps, unroll=1):
        for i in cutlass.range(mine.lane, shared.list_counts[c], WARP_THREADS, unroll=1):
            word = shared.lists[i, c]
            position = i
            for other in cutlass.range(config.cluster, unroll=1):
                if other != c:
                    larger = rank_in_sorted(shared.lists[None, other], shared.list_counts[other], word)
                    position += larger
            if position < mine.k:
                shared.ranked[position, 0] = word
