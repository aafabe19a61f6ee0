"""Short rows: the whole row in registers, by a few lanes of a warp or by a few warps. Device side.

One pass gives every lane's maximum. The k-th largest of the maxima of one warp's lanes on this row is the threshold
(see ``stream``). The elements that reach it, little more than k, are fetched again by column, because registers cannot
be indexed; they come from L1. They are ranked and then written by the lane that has them. Rows of many equal elements
have more candidates than there is room for; their k largest are picked one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64

from warpspec.common.device.warp import running_sum
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.softmax.online import exponential
from warpspec.softmax.problem import WIDTHS
from warpspec.softmax.topk.elements import exponentials, largest_in, total
from warpspec.softmax.topk.keys import (
    candidate,
    candidate_column,
    candidate_key,
    key_of,
    logit_of,
)
from warpspec.softmax.topk.select import close_list, rank_in, sort_lanes
from warpspec.softmax.vectors import (
    PLAIN,
    TYPES,
    WORDS,
    RowSpan,
    edge_of,
    load_edge,
    load_vector,
    unpack,
)

WORD_BITS = 32


@dataclass(frozen=True)
class Group:
    """Lanes of one warp that have a row or a share of it.

    row: where the row lies. first: the group's first lane. lane: this lane's number in the group. number: this lane's
    number among all lanes that share the row. k: how many elements are wanted. candidates: (CANDIDATE) the group's.
    """

    row: RowSpan
    first: Int32
    lane: Int32
    number: Int32
    k: Int32
    candidates: cute.Tensor


@cute.jit
def hold(config: cutlass.Constexpr, group: Group):
    """Read the row -> (largest element, sum of exp(x - largest), count) of the group, known to all of its lanes.

    count: candidates in group.candidates, among which are the group's k largest.
    """
    across = config.lanes * config.warps  # vectors from one of a lane's to its next
    address = group.row.first + Int64(group.number) * VECTOR_BYTES
    words = cute.make_rmem_tensor((WORDS, config.unroll), Int32)
    for u in cutlass.range_constexpr(config.unroll):
        present = config.full or Boolean(group.number + u * across < group.row.vectors)
        load_vector(words[None, u], address, u * across * VECTOR_BYTES, present, config.dtype, PLAIN)
    packed = [words[i, u] for u in range(config.unroll) for i in range(WORDS)]
    edge = edge_of(group.row, group.number, config.dtype)
    at_edge = -Float32.inf
    lane_maximum = largest_in(packed, config.dtype)
    if cutlass.const_expr(config.edges):
        at_edge = load_edge(group.row, edge, config.dtype)
        lane_maximum = cute.arch.fmax(lane_maximum, at_edge, nan=True)

    # 1. Sort the lanes' maxima. The first is the maximum of the row, or of the warp's share; the k-th is the threshold.
    ordered = sort_lanes(key_of(lane_maximum), group.lane, config.lanes)
    maximum = logit_of(cute.arch.shuffle_sync(ordered, group.first))
    threshold = logit_of(cute.arch.shuffle_sync(ordered, group.first + group.k - 1))

    # 2. Softmax.
    values = [x for word in packed for x in unpack(word, config.dtype)]
    everything = [*values, at_edge] if cutlass.const_expr(config.edges) else values
    sum_ = cute.arch.warp_reduction_sum(
        exponentials(everything, lane_maximum, maximum, config.dtype), threads_in_group=config.lanes
    )

    # 3. Mark the elements that reach the threshold, one bit each, and find where the lane's candidates go.
    bits = Uint32(0)
    for i in cutlass.range_constexpr(len(values)):
        bits = Uint32(cutlass.select_(reaches(values[i], threshold), bits | Uint32(1 << i), bits))
    if cutlass.const_expr(not config.full):
        held = held_vectors(config, group) * config.per_vector
        if held < WORD_BITS:
            bits = bits & ((Uint32(1) << Uint32(held)) - 1)
    chosen_edge = Boolean(False)
    if cutlass.const_expr(config.edges):
        chosen_edge = edge.present & reaches(at_edge, threshold)
    place = Int32(cute.arch.popc(bits)) + Int32(chosen_edge)
    count = running_sum(place, group.lane, config.lanes)
    place = count - place
    count = cute.arch.shuffle_sync(count, group.first + config.lanes - 1)

    # 4. Write the candidates.
    if cute.arch.vote_any_sync(Boolean(count > config.list_room)):
        edge_word = Uint64(0)
        if chosen_edge:
            edge_word = candidate(at_edge, edge.offset // WIDTHS[config.dtype])
        pick(config, group, edge_word)
        count = cutlass.min(count, group.k)
    else:
        while bits != Uint32(0):
            i = Int32(cute.arch.bfind(bits))
            bits = bits ^ (Uint32(1) << Uint32(i))
            column = column_of(config, group, i)
            group.candidates[place] = candidate(fetch(config, group, column), column)
            place += 1
        if chosen_edge:
            group.candidates[place] = candidate(at_edge, edge.offset // WIDTHS[config.dtype])
    close_list(group.candidates, count, group.lane)
    cute.arch.sync_warp()
    return maximum, sum_, count


def held_vectors(config, group: Group):
    """Number of vectors that the lane has."""
    across = config.lanes * config.warps
    return cutlass.max(group.row.vectors - group.number + across - 1, Int32(0)) >> (across.bit_length() - 1)


def reaches(logit: Float32, threshold: Float32) -> Boolean:
    """Whether logit is at least ``threshold`` or either is NaN, in one instruction."""
    return ~Boolean(logit < threshold)


def column_of(config, group: Group, i):
    """Column of the lane's i-th element."""
    vector = group.number + (i >> (config.per_vector.bit_length() - 1)) * (config.lanes * config.warps)
    return group.row.head + vector * config.per_vector + (i & (config.per_vector - 1))


def fetch(config, group: Group, column) -> Float32:
    """The element of a column, read again from the cache."""
    address = group.row.address + Int64(column) * WIDTHS[config.dtype]
    pointer = cute.make_ptr(TYPES[config.dtype], address, cute.AddressSpace.gmem)
    return cute.make_tensor(pointer, cute.make_layout(1))[0].to(Float32)


@cute.jit
def pick(config: cutlass.Constexpr, group: Group, edge_word: Uint64):
    """Fill group.candidates with the k largest elements, one after another, for each group of the warp. Works for any
    row; slow.

    edge_word: the lane's candidate from the row's edges, 0 if it has none.
    """
    held = held_vectors(config, group) * config.per_vector
    last = Uint64(0) - Uint64(1)  # above every candidate
    for rank in cutlass.range(group.k, unroll=1):
        best = Uint64(cutlass.select_(Boolean(edge_word < last), edge_word, Uint64(0)))
        for i in cutlass.range(0, held, 1, unroll=1):
            column = column_of(config, group, i)
            word = candidate(fetch(config, group, column), column)
            best = Uint64(cutlass.select_(Boolean(word < last) & Boolean(word > best), word, best))
        for step in cutlass.range_constexpr(config.lanes.bit_length() - 1):
            best = cutlass.max(best, cute.arch.shuffle_sync_bfly(best, 1 << step))
        if group.lane == 0:
            group.candidates[rank] = best
        last = best


@cute.jit
def write_ranked(
    config: cutlass.Constexpr, group: Group, count, others: list, maximum, sum_, divisors, probs, indices, row
):
    """Write the group's candidates that are among the row's first k, each by the lane that has it.

    others: (candidates, count) of every group of the row, including this one. maximum, sum_: the row's maximum and sum
    of exponentials. divisors: (W) fp32 in shared memory, if several warps have the row.
    """
    rounds = config.list_room // config.lanes
    ranks = cute.make_rmem_tensor(rounds, Int32)
    weights = cute.make_rmem_tensor(rounds, Float32)
    columns = cute.make_rmem_tensor(rounds, Int32)
    divisor = Float32(0.0)
    for i in cutlass.range_constexpr(rounds):
        ranks[i], weights[i], columns[i] = group.k, Float32(0.0), Int32(0)
        at = i * config.lanes + group.lane
        if at < count:
            word = group.candidates[at]
            ranks[i] = Int32(0)
            for candidates, number in others:
                ranks[i] += rank_in(candidates, number, word)
            if ranks[i] < group.k:
                weights[i] = exponential(logit_of(candidate_key(word)) - maximum, True)
                columns[i] = candidate_column(word)
        divisor += weights[i]
    if cutlass.const_expr(config.renormalize):
        divisor = cute.arch.warp_reduction_sum(divisor, threads_in_group=config.lanes)
        if cutlass.const_expr(config.warps > 1):
            if group.lane == 0:
                divisors[group.number // WARP_THREADS] = divisor
            cute.arch.sync_threads()
            divisor = total([divisors[w] for w in range(config.warps)])
    else:
        divisor = sum_
    for i in cutlass.range_constexpr(rounds):
        if (ranks[i] < group.k) & (row < probs.shape[0]):
            probs[row, ranks[i]] = weights[i] / divisor
            indices[row, ranks[i]] = columns[i]
