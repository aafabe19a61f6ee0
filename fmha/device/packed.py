"""Packed batches: which request, and which of its queries, a query tile of the launch belongs to.

Requests' queries are packed one after another, and cu_seqlens_q says where each request begins. The host knows their
number B and their total T, not their lengths. So the grid has B + T // queries query tiles: first one tile for each
request, then further tiles, of which request b gets those from cu_seqlens_q[b] // queries up to cu_seqlens_q[b + 1] //
queries. That is enough for its queries; a tile without queries is idle. A further tile belongs to the last request that
begins no later; a warp searches for it, 32 requests at a time.

With many queries, tiles run from the last to the first: a request's later queries see more keys, so short tiles come at
the end. With few queries (decode), most further tiles are idle and come last.

Whatever cu_seqlens hold, nothing outside the tensors is accessed: every entry is clamped to the number of queries or
keys, and a length is never negative.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.hardware import WARP_THREADS


def query_tiles(queries: int, total, requests):
    """Number of query tiles of a launch over ``total`` packed queries; ints or Int32."""
    return total // queries + requests


def entry(cu_seqlens: cute.Tensor, number, total) -> Int32:
    """Where a request begins, within 0..total."""
    return cutlass.max(cutlass.min(cu_seqlens[number], total), 0)


def extent_of(cu_seqlens: cute.Tensor, request, total) -> tuple[Int32, Int32]:
    """(first row, rows) of a request."""
    first = entry(cu_seqlens, request, total)
    return first, cutlass.max(entry(cu_seqlens, request + 1, total) - first, 0)


@cute.jit
def request_of(cu_seqlens: cute.Tensor, tile, queries: cutlass.Constexpr, total) -> tuple:
    """(request, its query tile) of a query tile of the launch. Called by a whole warp."""
    requests = Int32(cute.size(cu_seqlens) - 1)
    request, query_tile = tile, Int32(0)
    if tile >= requests:
        request = begun_by(cu_seqlens, tile - requests, queries, total)
        query_tile = 1 + tile - requests - entry(cu_seqlens, request, total) // queries
    return request, query_tile


@cute.jit
def find_request(cu_seqlens: cute.Tensor, tile, queries: cutlass.Constexpr, total) -> tuple:
    """Like ``request_of``, for a single thread."""
    requests = Int32(cute.size(cu_seqlens) - 1)
    request, query_tile = tile, Int32(0)
    if tile >= requests:
        low, count = Int32(0), requests  # candidates
        while count > 1:
            half = count // 2
            begins = Boolean(entry(cu_seqlens, low + half, total) // queries <= tile - requests)
            low = Int32(cutlass.select_(begins, low + half, low))
            count = Int32(cutlass.select_(begins, count - half, half))
        request = low
        query_tile = 1 + tile - requests - entry(cu_seqlens, request, total) // queries
    return request, query_tile


@cute.jit
def begun_by(cu_seqlens: cute.Tensor, tile, queries: cutlass.Constexpr, total) -> Int32:
    """The last request that begins in a tile of T queries, or before it. Called by a whole warp."""
    lane = cute.arch.lane_idx()
    low, count = Int32(0), Int32(cute.size(cu_seqlens) - 1)  # candidates
    while count > 1:
        step = (count + WARP_THREADS - 1) // WARP_THREADS
        probe = low + cutlass.min(lane * step, count - 1)
        begins = Boolean(entry(cu_seqlens, probe, total) // queries <= tile)
        begun = cute.arch.popc(cute.arch.vote_ballot_sync(begins))
        passed = cutlass.min(cutlass.max(begun - 1, 0) * step, count - 1)
        low, count = low + passed, cutlass.min(step, count - passed)
    return low
