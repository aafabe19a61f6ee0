"""Packed batches: which request, and which of its queries, a query tile of the launch belongs to.

Requests' queries stand one behind another, and cu_seqlens_q says where each one's begin. The host knows their number B
and their total T, not their lengths. So the grid has T // queries + B query tiles, and request b gets those from
cu_seqlens_q[b] // queries + b up to where the next request's begin: enough for its queries, and at most one too many.
The last query tile that begins no later than a given one is found by a search that a warp does together, 32 requests at
a time.

Whatever cu_seqlens hold, nothing outside the tensors is touched: every entry is clamped to the queries or keys there
are, and a length is never negative.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.hardware import WARP_THREADS

SEARCH_ROUNDS = 3  # each leaves one 32nd of the requests
MOST_REQUESTS = WARP_THREADS**SEARCH_ROUNDS


def query_tiles(queries: int, total, requests):
    """Query tiles of a launch over ``total`` packed queries; ints or Int32."""
    return total // queries + requests


def entry(cu_seqlens: cute.Tensor, number, total) -> Int32:
    """Where a request begins, within 0..total."""
    return cutlass.max(cutlass.min(cu_seqlens[number], total), 0)


def extent_of(cu_seqlens: cute.Tensor, request, total) -> tuple[Int32, Int32]:
    """(first row, rows) of a request."""
    first = entry(cu_seqlens, request, total)
    return first, cutlass.max(entry(cu_seqlens, request + 1, total) - first, 0)


@cute.jit
def request_of(cu_seqlens: cute.Tensor, query_tile, queries: cutlass.Constexpr, total) -> tuple:
    """(request, first query tile of it) of a query tile of the launch. By a whole warp."""
    lane = cute.arch.lane_idx()
    low, count = Int32(0), Int32(cute.size(cu_seqlens) - 1)  # candidates
    for _ in cutlass.range(SEARCH_ROUNDS, unroll=1):
        step = (count + WARP_THREADS - 1) // WARP_THREADS
        probe = low + cutlass.min(lane * step, count - 1)
        first_tile = entry(cu_seqlens, probe, total) // queries + probe
        begun = cute.arch.popc(cute.arch.vote_ballot_sync(Boolean(first_tile <= query_tile)))
        passed = cutlass.min(cutlass.max(begun - 1, 0) * step, count - 1)
        low, count = low + passed, cutlass.min(step, count - passed)
    return low, entry(cu_seqlens, low, total) // queries + low
