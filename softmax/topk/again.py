"""One warp's share of a row: read it once and sum its softmax state; then fetch its candidates for the top k again.

Each lane has the maximum of what it has seen, which the online softmax needs anyway. If j lanes have a maximum of at
least b, at least j elements of the row reach b. The k-th largest maximum of all lanes that share a row is therefore a
*threshold*: the row's k-th largest element is not below it, and in random rows little more than k elements reach it. It
is computed once, when the row has been read (``threshold``).

While it reads, a lane leaves the maximum of every *chunk* in shared memory. Only chunks whose maximum reaches the
threshold have candidates; they are fetched again, usually from a cache. An element thus costs nothing but a look at its
value, whatever k is and in whatever order elements come. Device side.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint64

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.softmax.online import exponential, reference_of
from warpspec.softmax.problem import WIDTHS
from warpspec.softmax.topk.config import CHUNKS, FETCHED
from warpspec.softmax.topk.elements import exponentials, floats, largest_in
from warpspec.softmax.topk.keys import candidate, key_of, lowest_candidate
from warpspec.softmax.topk.select import before, keep_largest
from warpspec.softmax.topk.tiles import load_tile
from warpspec.softmax.vectors import PLAIN, WORDS, RowSpan, edge_of, load_edge, load_vector

LANE_BITS = WARP_THREADS.bit_length() - 1
CHUNK_BITS = CHUNKS.bit_length() - 1


@dataclass(frozen=True)
class WarpRow:
    """What a warp reads of a row, and the warp's shared memory.

    row: where it lies. warp: number among the row's warps, over the cluster. lane: number in the warp. k: how many
    elements are wanted. candidates: (CANDIDATE) this warp's candidates. maxima: (CHUNKS * WARP_THREADS) Int32, the fp32
    bits of the maxima of its lanes' chunks, lanes side by side.
    """

    row: RowSpan
    warp: Int32
    lane: Int32
    k: Int32
    candidates: cute.Tensor
    maxima: cute.Tensor


@dataclass(frozen=True)
class Turns:
    """A warp reads ``count`` tiles; each 2**shift of them are a chunk of a lane, ``chunks`` in all."""

    count: Int32
    shift: Int32
    chunks: Int32


@cute.jit
def turns_of(config: cutlass.Constexpr, mine: WarpRow) -> Turns:
    count = cute.ceil_div(mine.row.vectors, config.tile_vectors)
    # 0: no bit set.
    shift = cutlass.max(Int32(cute.arch.bfind(cutlass.max(count - 1, 0))) + 1 - CHUNK_BITS, 0)
    return Turns(count, shift, (count + (Int32(1) << shift) - 1) >> shift)


@cute.jit
def edge_element(config: cutlass.Constexpr, mine: WarpRow):
    """(value, column) of the lane's element of the row's edges; -inf and a negative column if it has none."""
    edge = edge_of(mine.row, mine.warp * WARP_THREADS + mine.lane, config.dtype)
    column = edge.offset // WIDTHS[config.dtype]
    return load_edge(mine.row, edge, config.dtype), Int32(cutlass.select_(edge.present, column, Int32(-1)))


@cute.jit
def stream(config: cutlass.Constexpr, mine: WarpRow):
    """Read the warp's share -> (maximum, sum of exp(x - maximum)) of the lane; fills mine.maxima."""
    maximum, sum_ = -Float32.inf, Float32(0.0)
    if cutlass.const_expr(config.edges):
        maximum, _ = edge_element(config, mine)
        sum_ = exponential(maximum - reference_of(maximum), config.accurate)
    words = cute.make_rmem_tensor((WORDS, config.unroll), Int32)
    ahead = cute.make_rmem_tensor((WORDS, config.unroll), Int32)
    turns = turns_of(config, mine)
    begins = (Int32(1) << turns.shift) - 1  # a chunk begins at turns whose number has none of these bits
    chunk_maximum = -Float32.inf
    load_tile(config, mine.row, mine.warp, mine.lane, Int32(0), ahead)
    for turn in cutlass.range(turns.count, unroll=1):
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = ahead[i]
        if turn + 1 < turns.count:
            load_tile(config, mine.row, mine.warp, mine.lane, turn + 1, ahead)
        packed = [words[i, u] for u in range(config.unroll) for i in range(WORDS)]
        tile_maximum = largest_in(packed, config.dtype)
        chunk_maximum = cute.arch.fmax(chunk_maximum, tile_maximum, nan=True)
        chunk_maximum = Float32(cutlass.select_(Boolean(turn & begins == 0), tile_maximum, chunk_maximum))
        mine.maxima[(turn >> turns.shift) * WARP_THREADS + mine.lane] = chunk_maximum.bitcast(Int32)
        previous = maximum
        maximum = cute.arch.fmax(maximum, tile_maximum, nan=True)
        sum_ = sum_ * exponential(previous - reference_of(maximum), config.accurate)
        vectors = [floats(words[None, u], config.dtype) for u in range(config.unroll)]
        values = [x for vector in vectors for x in vector]
        sum_ += exponentials(values, tile_maximum, maximum, config.dtype)
    return maximum, sum_


@cute.jit
def reaching_chunks(mine: WarpRow, chunks: Int32, key: Int32) -> Int32:
    """Replace mine.maxima by the numbers of the chunks whose maximum is not below ``key``; returns how many there are.

    The list can overwrite the maxima, because its n-th number comes from the n-th maximum or a later one.
    """
    count = Int32(0)
    for chunk in cutlass.range(chunks, unroll=1):
        number = chunk * WARP_THREADS + mine.lane
        hit = Boolean(key_of(mine.maxima[number].bitcast(Float32)) >= key)
        ballot = cute.arch.vote_ballot_sync(hit)
        cute.arch.sync_warp()  # all lanes have read their maxima
        if hit:
            mine.maxima[count + before(ballot)] = number
        count += cute.arch.popc(ballot)
    cute.arch.sync_warp()
    return count


@cute.jit
def append(
    config: cutlass.Constexpr, mine: WarpRow, words: list, present: Boolean, floor: Uint64, count: Int32
):
    """Append the lanes' candidates ``words`` that are ``present`` and not below ``floor`` -> new (floor, count).

    If there is no room, the candidates are reduced to the k largest, as often as necessary, and the floor rises.
    """
    chosen = [present & Boolean(word >= floor) for word in words]
    ballots = [cute.arch.vote_ballot_sync(here) for here in chosen]
    places = [count]
    for ballot in ballots:
        places.append(places[-1] + cute.arch.popc(ballot))
    if places[-1] <= config.list_room:
        for i in cutlass.range_constexpr(len(words)):
            if chosen[i]:
                mine.candidates[places[i] + before(ballots[i])] = words[i]
        count = places[-1]
    else:
        for i in cutlass.range_constexpr(len(words)):
            if count > config.list_room - WARP_THREADS:
                floor = cutlass.max(floor, keep_largest(mine.candidates, count, mine.k, mine.lane))
                count = mine.k
            here = present & Boolean(words[i] >= floor)
            ballot = cute.arch.vote_ballot_sync(here)
            if here:
                mine.candidates[count + before(ballot)] = words[i]
            count += cute.arch.popc(ballot)
    return floor, count


@cute.jit
def collect(config: cutlass.Constexpr, mine: WarpRow, key: Int32) -> Int32:
    """Fill mine.candidates with the share's elements whose key is not below ``key``; returns how many there are.

    If they do not fit, the candidates end up with the k largest and some others.
    """
    floor, count = lowest_candidate(key), Int32(0)
    turns = turns_of(config, mine)
    chunks = reaching_chunks(mine, turns.chunks, key)
    each = Int32(config.unroll) << turns.shift  # vectors of a chunk
    span = config.lane_stride
    words = cute.make_rmem_tensor((WORDS, FETCHED), Int32)
    columns = cute.make_rmem_tensor(FETCHED, Int32)
    for first in cutlass.range(0, chunks * each, FETCHED * WARP_THREADS, unroll=1):
        for f in cutlass.range_constexpr(FETCHED):
            item = first + f * WARP_THREADS + mine.lane
            listed = item // each
            number = mine.maxima[cutlass.min(listed, chunks - 1)]
            within = item - listed * each
            turn = (number >> LANE_BITS << turns.shift) + within // config.unroll
            vector = turn * config.tile_vectors + within % config.unroll * span
            vector += mine.warp * WARP_THREADS + (number & (WARP_THREADS - 1))
            present = Boolean(listed < chunks) & Boolean(vector < mine.row.vectors)
            address = mine.row.first + Int64(vector) * VECTOR_BYTES
            load_vector(words[None, f], address, 0, present, config.dtype, PLAIN)
            columns[f] = Int32(
                cutlass.select_(present, mine.row.head + vector * config.per_vector, Int32(-1))
            )
        for f in cutlass.range_constexpr(FETCHED):
            column = columns[f]
            found = [candidate(x, column + e) for e, x in enumerate(floats(words[None, f], config.dtype))]
            floor, count = append(config, mine, found, Boolean(column >= 0), floor, count)
    if cutlass.const_expr(config.edges):
        value, column = edge_element(config, mine)
        floor, count = append(config, mine, [candidate(value, column)], Boolean(column >= 0), floor, count)
    return count
