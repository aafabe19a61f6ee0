"""Selection among what lanes and warps hold: order statistics, compaction, ranks. Device side.

Functions are collective unless they say otherwise: every lane of the warp calls them together.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint64

from warpspec.common.hardware import WARP_THREADS
from warpspec.softmax.topk.config import RANK_BATCH

TOP_BIT = 63
RANK_SHIFT = RANK_BATCH.bit_length() - 1


def before(ballot: Int32) -> Int32:
    """Number of lower lanes that voted."""
    return cute.arch.popc(ballot & Int32(cute.arch.lanemask_lt()))


@cute.jit
def sort_lanes(key: Int32, lane: Int32, lanes: cutlass.Constexpr) -> Int32:
    """Sort the keys of each group of ``lanes`` lanes in descending order, one key a lane (bitonic).

    lane: this lane's number in the group.

    Runs of 2**level lanes are sorted in alternating directions. Where the direction is ascending, keys are
    complemented, so that every comparison puts the larger one into the lower lane.
    """
    levels = lanes.bit_length() - 1
    lower = [Boolean(lane & (1 << step) == 0) for step in range(levels)]
    flip = Int32(0)
    for level in cutlass.range_constexpr(1, levels + 1):
        before_flip = flip
        flip = Int32(0) if level == levels else -((lane >> level) & 1)
        key = key ^ (flip ^ before_flip)
        for step in cutlass.range_constexpr(level - 1, -1, -1):
            other = cute.arch.shuffle_sync_bfly(key, 1 << step)
            key = Int32(cutlass.select_(lower[step], cutlass.max(key, other), cutlass.min(key, other)))
    return key


@cute.jit
def keep_from(candidates: cute.Tensor, count: Int32, floor: Uint64, lane: Int32) -> Int32:
    """Move those of the first ``count`` candidates that reach ``floor`` to the front; returns how many there are."""
    kept = Int32(0)
    cute.arch.sync_warp()
    for first in cutlass.range(0, count, WARP_THREADS, unroll=1):
        here = Boolean(first + lane < count)
        word = Uint64(0)
        if here:
            word = candidates[first + lane]
        keep = here & Boolean(word >= floor)
        ballot = cute.arch.vote_ballot_sync(keep)
        cute.arch.sync_warp()
        if keep:
            candidates[kept + before(ballot)] = word
        kept += cute.arch.popc(ballot)
        cute.arch.sync_warp()
    return kept


@cute.jit
def keep_largest(candidates: cute.Tensor, count: Int32, k: Int32, lane: Int32) -> Uint64:
    """Move the k largest of ``count`` > k candidates to the front; returns a word that exactly these reach.

    The word is found by bisection, bit by bit; that works because no two candidates are equal.
    """
    cute.arch.sync_warp()
    floor = Uint64(0)
    bit = Int32(TOP_BIT)
    while bit >= 0:
        trial = floor | (Uint64(1) << Uint64(bit))
        reach = Int32(0)
        for i in cutlass.range(lane, count, WARP_THREADS, unroll=1):
            reach += Int32(candidates[i] >= trial)
        reach = cute.arch.warp_redux_sync(reach, "add")
        floor = Uint64(cutlass.select_(Boolean(reach >= k), trial, floor))
        bit = Int32(cutlass.select_(Boolean(reach == k), Int32(-1), bit - 1))
    keep_from(candidates, count, floor, lane)
    return floor


@cute.jit
def close_list(candidates: cute.Tensor, count: Int32, lane: Int32):
    """Terminate a list of ``count`` candidates: ``rank_in`` reads words past its end, which must be below all of
    them."""
    if lane < RANK_BATCH:
        candidates[count + lane] = Uint64(0)


@cute.jit
def rank_in(candidates: cute.Tensor, count: Int32, word: Uint64, first: cutlass.Constexpr = 0) -> Int32:
    """Count the candidates, of ``count`` in all and from batch ``first`` on, that are larger than ``word``.

    The list must be terminated by ``close_list``. Not collective.
    """
    rank = Int32(0)
    for i in cutlass.range(first, (count + (RANK_BATCH - 1)) >> RANK_SHIFT, unroll=1):
        for j in cutlass.range_constexpr(RANK_BATCH):
            rank += Int32(candidates[i * RANK_BATCH + j] > word)
    return rank


@cute.jit
def rank_among(
    lists: cute.Tensor, counts: cute.Tensor, number: cutlass.Constexpr, word: Uint64, lane: Int32
) -> Int32:
    """Count the candidates of ``number`` terminated lists (CANDIDATE, LIST) that are larger than ``word``.

    counts (LIST): candidates of each list. Most lists are no longer than a batch, so the first batches of all lists are
    read together.
    """
    rank = Int32(0)
    for other in cutlass.range_constexpr(number):
        for j in cutlass.range_constexpr(RANK_BATCH):
            rank += Int32(lists[j, other] > word)
    longer = Boolean(False)
    if lane < number:
        longer = Boolean(counts[lane] > RANK_BATCH)
    left = cute.arch.vote_ballot_sync(longer)
    while left != 0:
        other = Int32(cute.arch.bfind(left))
        left = left ^ (Int32(1) << other)
        rank += rank_in(lists[None, other], counts[other], word, 1)
    return rank


@cute.jit
def rank_in_sorted(candidates: cute.Tensor, count: Int32, word: Uint64) -> Int32:
    """Count those of ``count`` candidates in descending order that are larger than ``word``, which is none of them."""
    low, high = Int32(0), count
    while low < high:
        middle = (low + high) // 2
        larger = Boolean(candidates[middle] > word)
        low = Int32(cutlass.select_(larger, middle + 1, low))
        high = Int32(cutlass.select_(larger, high, middle))
    return low
