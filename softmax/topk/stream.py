"""One warp's part of a row: read once, its softmax state summed, its candidates for the top k kept. Device side.

Each lane has the maximum of what it has seen, which the online softmax needs anyway. Take the maxima of the 32
lanes in order: as many elements reach the j-th as there are lanes down to it, so the k-th largest of a row cannot
be below the k-th largest of one warp's lanes; nor below the smallest, over a row's warps, of their ceil(k /
warps)-th largest. Either is a *threshold*: an element below it is done with, one comparison for a lane's whole
batch. The others, about a hundred of a row's fifty thousand, become candidates in shared memory. The thresholds
are renewed as candidates come in.

Ties. Columns rise as the warp goes along, so an element equal to the warp's own threshold that comes after the
elements which set it loses to them, and is dropped: a row of equal logits costs no more than any other. An
element equal to what another warp has set stays: its column may be the lower one.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64

from warpspec.softmax.online import exponential, reference_of
from warpspec.softmax.topk.config import WARP, TopkConfig
from warpspec.softmax.topk.keys import (
    LOWEST_KEY,
    NAN_KEY,
    NOTHING_YET,
    bar_of,
    candidate,
    key_of,
    passes,
)
from warpspec.softmax.topk.select import before, keep_largest, sort_lanes
from warpspec.softmax.vectors import VECTOR_BYTES, WORDS, Row, edge_of, load_edge, load_vector

RENEW_AFTER = 12  # lanes with candidates until the threshold is renewed
HIGH_HALF = -0x10000  # of a word
HALF_BITS = 16


@dataclass(frozen=True)
class Part:
    """Which part of a row a warp reads, and where it keeps what.

    row: where it lies. warp: of the row's warps, over the cluster. warp_in_cta, lane. k: of the result. slots:
    (SLOT) candidates of this warp. shares: (WARP) keys that the warps of the CTA have set, for their share of k.
    """

    row: Row
    warp: Int32
    warp_in_cta: Int32
    lane: Int32
    k: Int32
    slots: cute.Tensor
    shares: cute.Tensor


def floats(words: cute.Tensor, dtype: str) -> list:
    """The elements of words (WORDS) Int32, as Float32."""
    values = []
    for i in range(WORDS):
        word = words[i]
        if dtype == "float32":
            values.append(word.bitcast(Float32))
        elif dtype == "bfloat16":
            values += [(word << HALF_BITS).bitcast(Float32), (word & HIGH_HALF).bitcast(Float32)]
        else:
            values += list(
                cute.arch.inline_ptx(
                    "{ .reg .b16 low_half, high_half; mov.b32 {low_half, high_half}, {$r0}; "
                    "cvt.f32.f16 {$w0}, low_half; cvt.f32.f16 {$w1}, high_half; }",
                    write_only_types=[Float32, Float32],
                    read_only_args=[word],
                )
            )
    return values


def largest(values: list) -> Float32:
    """Their maximum, NaN if there is one."""
    while len(values) > 1:
        pairs = [cute.arch.fmax(values[i], values[i + 1], nan=True) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


def total(values: list) -> Float32:
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


@cute.jit
def load_tile(config: cutlass.Constexpr, part: Part, turn: Int32, words: cute.Tensor):
    """words (WORDS, UNROLL) become the lane's vectors of the row's ``turn``-th tile, -inf past its end."""
    span = config.warps * config.cluster * WARP
    first = turn * config.tile_vectors + part.warp * WARP + part.lane
    last = (turn + 1) * config.tile_vectors - span + (part.warp + 1) * WARP  # one past this warp's
    address = part.row.first + Int64(first) * VECTOR_BYTES
    if last <= part.row.vectors:
        for u in cutlass.range_constexpr(config.unroll):
            load_vector(words[None, u], address + u * span * VECTOR_BYTES, True, config.dtype, "once")
    else:
        for u in cutlass.range_constexpr(config.unroll):
            present = Boolean(first + u * span < part.row.vectors)
            load_vector(words[None, u], address + u * span * VECTOR_BYTES, present, config.dtype, "once")


@cute.jit
def renewed(config: cutlass.Constexpr, part: Part, maximum: Float32):
    """(this warp's threshold, the row's) as keys, from the lanes' maxima so far.

    Elements at the row's, and those at the warp's own that came no later than the maxima, must be kept.
    """
    ordered = sort_lanes(key_of(maximum), part.lane)
    own = Int32(NOTHING_YET)
    if cutlass.const_expr(config.k_capacity <= WARP):
        own = cute.arch.shuffle_sync(ordered, part.k - 1)
    shared = Int32(NOTHING_YET)
    if cutlass.const_expr(config.warps > 1):
        share = cute.arch.shuffle_sync(ordered, (part.k + config.warps - 1) // config.warps - 1)
        if part.lane == 0:
            cute.arch.store(part.shares.iterator + part.warp_in_cta, share, ss="cta", sem="relaxed", scope="cta")
        cute.arch.sync_warp()
        shared = Int32(NAN_KEY)
        if part.lane < config.warps:
            shared = cute.arch.load(
                part.shares.iterator + part.lane, Int32, ss="cta", sem="relaxed", scope="cta"
            )
        shared = cute.arch.warp_redux_sync(shared, "min")
    return own, shared


@cute.jit
def stream(config: cutlass.Constexpr, part: Part):
    """Reads the warp's part -> (maximum, sum of exp(x - maximum)) of the lane, (count, key) of the warp.

    count: candidates in part.slots. Elements whose key is below ``key`` are not in the row's top k.
    """
    span = config.warps * config.cluster * WARP
    limit = config.slots - WARP * config.per_vector
    edge = edge_of(part.row, part.warp * WARP + part.lane, config.dtype)
    edge_value = -Float32.inf
    if cutlass.const_expr(config.edges):
        edge_value = load_edge(part.row, edge, config.dtype)
    words = cute.make_rmem_tensor((WORDS, config.unroll), Int32)
    ahead = cute.make_rmem_tensor((WORDS, config.unroll), Int32)
    turns = cute.ceil_div(part.row.vectors, config.tile_vectors)
    load_tile(config, part, Int32(0), ahead)

    maximum, sum_ = -Float32.inf, Float32(0.0)
    threshold, since, count = Int32(NOTHING_YET), Int32(0), Int32(0)
    for turn in cutlass.range(turns, unroll=1):
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = ahead[i]
        if turn + 1 < turns:
            load_tile(config, part, turn + 1, ahead)

        # 1. Online softmax.
        vectors = [floats(words[None, u], config.dtype) for u in range(config.unroll)]
        maxima = [largest(vector) for vector in vectors]
        tile_maximum = largest(maxima)
        previous = maximum
        maximum = cute.arch.fmax(maximum, tile_maximum, nan=True)
        reference = reference_of(maximum)
        sums = [total([exponential(x - reference, False) for x in vector]) for vector in vectors]
        sum_ = sum_ * exponential(previous - reference, False) + total(sums)

        # 2. Candidates.
        here = cute.arch.vote_ballot_sync(passes(tile_maximum, bar_of(threshold)))
        if here != 0:
            floor = threshold  # candidates of this tile are above it
            since += cute.arch.popc(here)
            if since >= RENEW_AFTER:
                own, shared = renewed(config, part, maximum)
                threshold = cutlass.max(threshold, shared - 1)
                floor = cutlass.max(threshold, own - 1)
                threshold = cutlass.max(threshold, own)
                since = Int32(0)
            for u in cutlass.range_constexpr(config.unroll):
                vector = turn * config.tile_vectors + u * span + part.warp * WARP + part.lane
                present = Boolean(vector < part.row.vectors)
                bar = bar_of(floor)
                if cute.arch.vote_any_sync(present & passes(maxima[u], bar)):
                    if count > limit:
                        key = keep_largest(part.slots, count, part.k, part.lane)
                        count = part.k
                        floor = cutlass.max(floor, key)
                        threshold = cutlass.max(threshold, key)
                        bar = bar_of(floor)
                    for e in cutlass.range_constexpr(config.per_vector):
                        chosen = present & passes(vectors[u][e], bar)
                        ballot = cute.arch.vote_ballot_sync(chosen)
                        if ballot != 0:
                            if chosen:
                                column = part.row.head + vector * config.per_vector + e
                                part.slots[count + before(ballot)] = candidate(vectors[u][e], column)
                            count += cute.arch.popc(ballot)

    # 3. The row's ends. Their columns lie before and behind all others: equal to the threshold, they stay.
    if cutlass.const_expr(config.edges):
        previous = maximum
        maximum = cute.arch.fmax(maximum, edge_value, nan=True)
        reference = reference_of(maximum)
        sum_ = sum_ * exponential(previous - reference, False)
        sum_ += exponential(edge_value - reference, False)
        chosen = edge.present & Boolean(key_of(edge_value) >= threshold)
        ballot = cute.arch.vote_ballot_sync(chosen)
        if ballot != 0:
            if count > limit:
                keep_largest(part.slots, count, part.k, part.lane)
                count = part.k
            if chosen:
                column = edge.offset // (VECTOR_BYTES // config.per_vector)
                part.slots[count + before(ballot)] = candidate(edge_value, column)
            count += cute.arch.popc(ballot)
    return maximum, sum_, count, threshold
