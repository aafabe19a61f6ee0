"""The longest tiles first: the order in which CTAs take the query tiles of packed requests from a queue.

A causal query tile is as long as the keys up to its last query. A tile's *level* counts these keys in units of a tile's
queries, so a request of ``tiles`` query tiles has one tile on each of the levels ``top`` - ``tiles`` + 1 to ``top``,
and the tiles of all requests above some level are counted without listing them. Tiles run from the highest level down;
within a level, in the order of the requests. CTAs that take tiles in this order as they become free end at nearly the
same time, whatever the lengths: each starts its last tile within one tile's time of the others, and the last tiles are
the shortest.

The scheduler warp writes a word for each request into shared memory once and finds a tile by bisection. Calls with more
requests than there are words, or with longer ones than a word holds, keep the order of ``device.packed``.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.device.grid import heads_of_tiles
from warpspec.fmha.device.request import request_at
from warpspec.fmha.schedule import SORTED_REQUESTS, SORTED_TILES

HALF_BITS, HALF = 16, SORTED_TILES  # a word: ``top`` above, ``tiles`` below


@dataclass(frozen=True)
class Order:
    """words: (REQUEST) Int32 in shared memory. requests: number of requests. highest: the highest level. tiles: query
    tiles with a query. sorts: whether tiles are sorted at all."""

    words: cute.Tensor
    requests: Int32
    highest: Int32
    tiles: Int32
    sorts: Boolean

    def grid(self, config, grid, tiles, operands) -> tuple:
        """(``grid`` without query tiles that have no query, tiles in it); both as given if tiles are not sorted."""
        query_tiles = Int32(cutlass.select_(self.sorts, self.tiles, grid.query_tiles))
        found = query_tiles * grid.head_tiles * heads_of_tiles(config, operands)
        return grid._replace(query_tiles=query_tiles), Int32(cutlass.select_(self.sorts, found, tiles))


def order_of(config, operands, words: cute.Tensor) -> Order:
    """The order of a call's query tiles; writes the words. Called by a whole warp."""
    highest, tiles, sorts = write_words(config, operands, words)
    return Order(words, Int32(cute.size(operands.cu_seqlens_q) - 1), highest, tiles, sorts)


@cute.jit
def write_words(config: cutlass.Constexpr, operands, words: cute.Tensor) -> tuple:
    """(highest level, query tiles, whether tiles are sorted) of a call. Called by a whole warp."""
    queries = config.rows.queries
    requests = Int32(cute.size(operands.cu_seqlens_q) - 1)
    highest, tiles = Int32(0), Int32(0)
    for first in cutlass.range(0, cutlass.min(requests, SORTED_REQUESTS), WARP_THREADS, unroll=1):
        request = first + cute.arch.lane_idx()
        found = request_at(config.requests, operands, cutlass.min(request, requests - 1))
        count = (found.seq_q + queries - 1) // queries
        count = Int32(cutlass.select_(Boolean(request < requests), count, Int32(0)))
        top = cutlass.max((found.length + queries - 1) // queries, count)
        words[request] = (top << HALF_BITS) | (count & HALF)
        highest, tiles = cutlass.max(highest, top), tiles + count
    cute.arch.sync_warp()
    highest = Int32(cute.arch.warp_redux_sync(highest, "max"))
    tiles = Int32(cute.arch.warp_redux_sync(tiles, "add"))
    return highest, tiles, Boolean(requests <= SORTED_REQUESTS) & Boolean(highest <= HALF)


def level_of(word) -> tuple:
    """(top, tiles) of a request's word."""
    return (word >> HALF_BITS) & HALF, word & HALF


@cute.jit
def tiles_from(order, level) -> Int32:
    """Number of query tiles on a level and above. Called by a whole warp."""
    found = Int32(0)
    for first in cutlass.range(0, order.requests, WARP_THREADS, unroll=1):
        top, count = level_of(order.words[first + cute.arch.lane_idx()])
        found += cutlass.max(cutlass.min(top - level + 1, count), 0)
    return Int32(cute.arch.warp_redux_sync(found, "add"))


@cute.jit
def nth_longest(order, rank) -> tuple:
    """(request, its query tile) of the query tile with ``rank`` tiles before it. Called by a whole warp."""
    low, above, before = Int32(0), order.highest + 1, Int32(0)  # tiles_from(low) > rank >= tiles_from(above)
    while above - low > 1:
        middle = (low + above) // 2
        count = tiles_from(order, middle)
        if count > rank:
            low = middle
        else:
            above, before = middle, count
    left, lane = rank - before, cute.arch.lane_idx()
    request, query_tile = Int32(0), Int32(0)
    for first in cutlass.range(0, order.requests, WARP_THREADS, unroll=1):
        top, count = level_of(order.words[first + lane])
        there = Boolean(low <= top) & Boolean(low > top - count)
        votes = Int32(cute.arch.vote_ballot_sync(there))
        place = cute.arch.popc(votes & ((Int32(1) << lane) - 1))
        chosen = Int32(cute.arch.vote_ballot_sync(there & Boolean(place == left)))
        if chosen != 0:
            number = cute.arch.popc((chosen & -chosen) - 1)
            request = first + number
            query_tile = Int32(cute.arch.shuffle_sync(count - 1 - (top - low), number))
        left -= cute.arch.popc(votes)
    return request, query_tile
