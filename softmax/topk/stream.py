"""One warp's share of a row: read it once, sum its softmax state, and keep its candidates for the top k. Device side.

Each lane has the maximum of what it has seen, which the online softmax needs anyway. If j lanes have a maximum of at
least b, at least j elements of the row reach b. The k-th largest of the maxima of a warp's 32 lanes is therefore a
*threshold*: the row's k-th largest element is not below it. Samples of all warps' maxima give a better one. An element
below the threshold can be dropped; one comparison suffices for a lane's whole batch. The others, about a hundred of a
row's fifty thousand, become candidates in shared memory. Thresholds are renewed as candidates come in.

Ties: columns rise as the warp proceeds, so an element that equals the warp's own threshold and comes after the elements
that set it loses to them and is dropped. A row of equal logits thus costs no more than any other. An element that
equals another warp's threshold is kept, because its column may be the lower one.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.softmax.online import exponential, reference_of
from warpspec.softmax.topk.config import SAMPLES
from warpspec.softmax.topk.elements import exponentials, floats, largest, largest_in
from warpspec.softmax.topk.keys import (
    NOTHING_YET,
    bar_of,
    candidate,
    candidate_key,
    key_of,
    passes,
)
from warpspec.softmax.topk.select import before, keep_largest, sort_lanes
from warpspec.softmax.topk.tiles import load_tile
from warpspec.softmax.vectors import WORDS, RowSpan, edge_of, forget, load_edge

JOINT_RANK = 16  # rank of the row's threshold among the samples, at most


@dataclass(frozen=True)
class WarpRow:
    """What a warp reads of a row, and the warp's shared memory.

    row: where it lies. warp: number among the row's warps, over the cluster. warp_in_cta, lane: its place in the CTA,
    and the lane's in the warp. k: how many elements are wanted. candidates: (CANDIDATE) this warp's candidates.
    samples: (SAMPLES) keys of lanes' maxima, from all warps of the CTA. bound: (1) key, the row's threshold: the
    highest that a warp of the CTA has found.
    """

    row: RowSpan
    warp: Int32
    warp_in_cta: Int32
    lane: Int32
    k: Int32
    candidates: cute.Tensor
    samples: cute.Tensor
    bound: cute.Tensor


def read_shared(place: cute.Pointer) -> Int32:
    """The value that any warp of the CTA wrote last."""
    return cute.arch.load(place, Int32, ss="cta", sem="relaxed", scope="cta")


def write_shared(place: cute.Pointer, value: Int32) -> None:
    cute.arch.store(place, value, ss="cta", sem="relaxed", scope="cta")


@cute.jit
def give_samples(config: cutlass.Constexpr, mine: WarpRow, ordered: Int32):
    """Write this warp's samples of its lanes' maxima, ``ordered``: those of rank q, 2 q, ..."""
    given = SAMPLES // config.warps
    rank = (mine.lane % given + 1) * samples_apart(mine.k) - 1
    sample = cute.arch.shuffle_sync(ordered, cutlass.min(rank, WARP_THREADS - 1))
    if mine.lane < given:
        sample = Int32(cutlass.select_(Boolean(rank < WARP_THREADS), sample, Int32(NOTHING_YET)))
        write_shared(mine.samples.iterator + (mine.warp_in_cta * given + mine.lane), sample)


@cute.jit
def joint_threshold(mine: WarpRow) -> Int32:
    """The row's threshold as a key. If n of all samples reach a value, at least n q elements of the row do, no matter
    when the samples were taken."""
    ordered = sort_lanes(read_shared(mine.samples.iterator + mine.lane), mine.lane, WARP_THREADS)
    q = samples_apart(mine.k)
    return cute.arch.shuffle_sync(ordered, (mine.k + q - 1) // q - 1)


def samples_apart(k: Int32) -> Int32:
    """q, such that the row's threshold is at most the JOINT_RANK-th of the samples."""
    return (k + JOINT_RANK - 1) // JOINT_RANK


@cute.jit
def renewed(config: cutlass.Constexpr, mine: WarpRow, maximum: Float32):
    """(the warp's own threshold, the row's) as keys, from the lanes' maxima so far."""
    ordered = sort_lanes(key_of(maximum), mine.lane, WARP_THREADS)
    own, joint = Int32(NOTHING_YET), Int32(NOTHING_YET)
    if cutlass.const_expr(config.k_capacity <= WARP_THREADS):
        own = cute.arch.shuffle_sync(ordered, mine.k - 1)
    if cutlass.const_expr(config.warps > 1):
        give_samples(config, mine, ordered)
        cute.arch.sync_warp()
        joint = joint_threshold(mine)
        if mine.lane == 0:
            cute.arch.atomic_max(mine.bound.iterator, joint, sem="relaxed", scope="cta")
    return own, joint


@cute.jit
def collect(
    config: cutlass.Constexpr,
    mine: WarpRow,
    words: cute.Tensor,
    maxima: list,
    first: Int32,
    maximum: Float32,
    hits: Int32,
    threshold: Int32,
    since: Int32,
    count: Int32,
):
    """Keep the tile's candidates -> new (threshold, since, count).

    words: (WORDS, UNROLL) the lane's vectors. maxima: the maximum of each vector. first: number of the first vector.
    maximum: the lane's maximum so far. hits: number of lanes that have candidates. threshold: elements whose key is not
    above it can be dropped. since: lanes that have had candidates since thresholds were renewed.
    """
    span = config.lane_stride
    since += hits
    if cutlass.const_expr(config.warps > 1):
        threshold = cutlass.max(threshold, read_shared(mine.bound.iterator) - 1)
    floor = threshold  # for this tile: elements that equal the warp's own threshold may have set it
    if since >= config.renew_after:
        own, joint = renewed(config, mine, maximum)
        threshold = cutlass.max(threshold, joint - 1)
        floor = cutlass.max(threshold, own - 1)
        threshold = cutlass.max(threshold, own)
        since = Int32(0)
    bar = bar_of(floor)
    for u in cutlass.range_constexpr(config.unroll):
        if cute.arch.vote_any_sync(passes(maxima[u], bar)):
            if count > config.list_room - WARP_THREADS * config.per_vector:
                key = candidate_key(keep_largest(mine.candidates, count, mine.k, mine.lane))
                count = mine.k
                threshold = cutlass.max(threshold, key)
                floor = cutlass.max(floor, key)
                bar = bar_of(floor)
            vector = first + u * span
            present = Boolean(vector < mine.row.vectors)
            values = floats(words[None, u], config.dtype)
            for e in cutlass.range_constexpr(config.per_vector):
                chosen = present & passes(values[e], bar)
                ballot = cute.arch.vote_ballot_sync(chosen)
                if ballot != 0:
                    if chosen:
                        column = mine.row.head + vector * config.per_vector + e
                        mine.candidates[count + before(ballot)] = candidate(values[e], column)
                    count += cute.arch.popc(ballot)
    return threshold, since, count


@cute.jit
def stream(config: cutlass.Constexpr, mine: WarpRow):
    """Read the warp's share -> (maximum, sum of exp(x - maximum)) of the lane, (count, key) of the warp.

    count: candidates in mine.candidates. Elements whose key is below ``key`` are not in the row's top k.
    """
    edge = edge_of(mine.row, mine.warp * WARP_THREADS + mine.lane, config.dtype)
    edge_value = -Float32.inf
    if cutlass.const_expr(config.edges):
        edge_value = load_edge(mine.row, edge, config.dtype)
    words = cute.make_rmem_tensor((WORDS, config.unroll), Int32)
    ahead = cute.make_rmem_tensor((WORDS, config.unroll), Int32)
    turns = cute.ceil_div(mine.row.vectors, config.tile_vectors)
    load_tile(config, mine.row, mine.warp, mine.lane, Int32(0), ahead)

    maximum, sum_ = -Float32.inf, Float32(0.0)
    threshold, since, count = Int32(NOTHING_YET), Int32(0), Int32(0)
    bar = bar_of(threshold)
    for turn in cutlass.range(turns, unroll=1):
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = ahead[i]
        if turn + 1 < turns:
            load_tile(config, mine.row, mine.warp, mine.lane, turn + 1, ahead)
        maxima = [largest_in([words[i, u] for i in range(WORDS)], config.dtype) for u in range(config.unroll)]
        tile_maximum = largest(maxima)

        previous = maximum
        maximum = cute.arch.fmax(maximum, tile_maximum, nan=True)
        reference = reference_of(maximum)
        sum_ = sum_ * exponential(previous - reference, config.accurate)
        vectors = [floats(words[None, u], config.dtype) for u in range(config.unroll)]
        sum_ += exponentials([x for vector in vectors for x in vector], tile_maximum, maximum, config.dtype)
        # Unpacked again for candidates: keeping unpacked 16-bit elements would take twice the registers.
        forget(words)

        if cutlass.const_expr(config.needs_others):  # noqa: SIM102, one is for the compiler, the other for the GPU
            if turn == 0:  # all warps have the same number of turns
                give_samples(config, mine, sort_lanes(key_of(maximum), mine.lane, WARP_THREADS))
                cute.arch.sync_threads()
        ballot = cute.arch.vote_ballot_sync(passes(tile_maximum, bar))
        if ballot != 0:
            first = turn * config.tile_vectors + mine.warp * WARP_THREADS + mine.lane
            hits = cute.arch.popc(ballot)
            threshold, since, count = collect(
                config, mine, words, maxima, first, maximum, hits, threshold, since, count
            )
            bar = bar_of(threshold)

    # The row's edges. Their columns lie before and after all others; those that equal the threshold are kept.
    if cutlass.const_expr(config.edges):
        previous = maximum
        maximum = cute.arch.fmax(maximum, edge_value, nan=True)
        reference = reference_of(maximum)
        sum_ = sum_ * exponential(previous - reference, config.accurate)
        sum_ += exponential(edge_value - reference, config.accurate)
        chosen = edge.present & Boolean(key_of(edge_value) >= threshold)
        ballot = cute.arch.vote_ballot_sync(chosen)
        if ballot != 0:
            if count > config.list_room - WARP_THREADS:
                keep_largest(mine.candidates, count, mine.k, mine.lane)
                count = mine.k
            if chosen:
                column = edge.offset // (VECTOR_BYTES // config.per_vector)
                mine.candidates[count + before(ballot)] = candidate(edge_value, column)
            count += cute.arch.popc(ballot)
    return maximum, sum_, count, threshold
