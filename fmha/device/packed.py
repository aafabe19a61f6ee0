"""Packed batches: which request, and which of its queries, a query tile of the launch belongs to.

Requests' queries are packed one after another, and cu_seqlens_q says where each request begins. The host knows their
number B and their total T, not their lengths. So the grid has B + T // queries query tiles. Request b gets one of them,
and further ones: as many as there are multiples of ``queries`` from cu_seqlens_q[b] up to cu_seqlens_q[b + 1]. That is
enough for its queries; a tile without queries is idle. A warp searches for a tile's request, 32 requests at a time.

With many queries, all tiles of a request stand together (``in_order``), so that CTAs that read the same K and V run at
the same time; and they run from the last to the first, because later queries see more keys. With few queries (decode),
the first tiles of all requests come first (``request_of``), which need no search; most further tiles are idle.

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
    """The row at which a request begins, kept within 0..total."""
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
        request = begun_by(cu_seqlens, tile - requests, queries, total, 0)
        query_tile = 1 + tile - requests - entry(cu_seqlens, request, total) // queries
    return request, query_tile


@cute.jit
def in_order(cu_seqlens: cute.Tensor, tile, queries: cutlass.Constexpr, total) -> tuple:
    """Like ``request_of``, for tiles that are numbered request by request."""
    request = begun_by(cu_seqlens, tile, queries, total, 1)
    query_tile = tile - request - entry(cu_seqlens, request, total) // queries
    return request, cutlass.max(query_tile, 0)


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
def begun_by(
    cu_seqlens: cute.Tensor, tile, queries: cutlass.Constexpr, total, more: cutlass.Constexpr
) -> Int32:
    """The last request that begins in a tile of T queries, or before it, if each request before it has this many tiles
    more. Called by a whole warp."""
    lane = cute.arch.lane_idx()
    low, count = Int32(0), Int32(cute.size(cu_seqlens) - 1)  # candidates
    while count > 1:
        step = (count + WARP_THREADS - 1) // WARP_THREADS
        probe = low + cutlass.min(lane * step, count - 1)
        begin = entry(cu_seqlens, probe, total) // queries
        if cutlass.const_expr(more > 0):
            begin = begin + probe * more
        begins = Boolean(begin <= tile)
        begun = cute.arch.popc(cute.arch.vote_ballot_sync(begins))
        passed = cutlass.min(cutlass.max(begun - 1, 0) * step, count - 1)
        low, count = low + passed, cutlass.min(step, count - passed)
    return low
