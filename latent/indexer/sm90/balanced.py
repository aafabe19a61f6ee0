"""Index scores with tiles dealt by the queries' lengths.

All warpgroups of the grid take the same number of tiles that have keys, to within one. A warpgroup's tiles belong to
consecutive queries, and it prepares each of these queries itself. Every CTA computes the distribution alone, by a sum
over all queries' tiles, so the host plans nothing. Columns after the last tile that has keys are filled with -inf in
chunks, which CTAs take in turn.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from warpspec.common.device.warp import running_sum
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.latent.indexer.device.entries import Entries, request_of
from warpspec.latent.indexer.device.scores_host import LogitsRow
from warpspec.latent.indexer.scores_config import BLOCKS, TILE_KEYS
from warpspec.latent.indexer.sm90.keys import load_asked
from warpspec.latent.indexer.sm90.query import (
    ROW_BYTES,
    begin_loads,
    prepare,
    score_tiles,
    view_query,
)

GROUP_BARRIER = 1  # the first warpgroup's named barrier; the other warpgroups' barriers follow
FILL_COLUMNS = 4  # columns of a chunk that a thread fills


class DealtTiles(NamedTuple):
    """Distribution of the tiles, in shared memory; each thread has one query.

    ends (THREAD + 1): prefix sum of the queries' tiles that have keys. requests, lengths (THREAD): what ``request_of``
    returns. starts (WARPGROUP): the query of a warpgroup's first tile. sums (WARP): tiles of a warp's queries.
    """

    ends: cute.Tensor
    requests: cute.Tensor
    lengths: cute.Tensor
    starts: cute.Tensor
    sums: cute.Tensor

    @classmethod
    def allocate(cls, config, smem) -> DealtTiles:
        sizes = (config.threads + 1, config.threads, config.threads, config.warpgroups, config.warps)
        return cls(*(smem.allocate_tensor(Int32, cute.make_layout(size), byte_alignment=4) for size in sizes))


@cute.jit
def share(total: Int32, groups: Int32, group: Int32) -> Int32:
    """The first tile of a warpgroup, when ``total`` tiles are divided evenly."""
    each = Int32(Uint32(total) // Uint32(groups))
    return group * each + cutlass.min(group, total - each * groups)


@cute.jit
def deal(config: cutlass.Constexpr, plan, inputs, columns, cta, ctas, thread) -> Int32:
    """Fill in ``plan`` and return the number of tiles. Executed by all threads; ends with a barrier."""
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    count = Int32(0)
    if thread < inputs.lengths.shape[0]:
        request, length = request_of(config, inputs, thread)
        plan.requests[thread], plan.lengths[thread] = request, length
        count = cute.ceil_div(cutlass.min(length, columns), TILE_KEYS)
    until = running_sum(count, lane)
    if lane == WARP_THREADS - 1:
        plan.sums[warp] = until
    cute.arch.sync_threads()
    total = Int32(0)
    for i in cutlass.range_constexpr(config.warps):
        until += Int32(cutlass.select_(warp > i, plan.sums[i], Int32(0)))
        total += plan.sums[i]
    plan.ends[thread + 1] = until
    if thread == 0:
        plan.ends[0] = Int32(0)
    for i in cutlass.range_constexpr(config.warpgroups):
        first = share(total, ctas * config.warpgroups, i * ctas + cta)
        if (until - count <= first) & (first < until):
            plan.starts[i] = thread
    cute.arch.sync_threads()
    return total


@cute.jit
def score_shares(config: cutlass.Constexpr, operands, smem: cutlass.Constexpr, table, ones):
    """Compute a CTA's scores. table, ones: from ``fill_table``."""
    inputs, logits = operands.inputs, operands.logits
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    columns = logits.shape[1]
    base = Int32(smem.allocate(config.warpgroups * config.heads * ROW_BYTES, 1024).toint())
    factors = smem.allocate_tensor(
        Float32, cute.make_layout((config.heads, config.warpgroups)), byte_alignment=16
    )
    plan = DealtTiles.allocate(config, smem)
    total = deal(config, plan, inputs, columns, cta, ctas, thread)
    group = Int32(cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS))
    base += group * (config.heads * ROW_BYTES)
    number, groups = group * ctas + cta, ctas * config.warpgroups
    tile, end = share(total, groups, number), share(total, groups, number + 1)
    token = Int32(0)
    if tile < end:
        token = plan.starts[group]
    while tile < end:
        before = plan.ends[token]
        stop = cutlass.min(end, plan.ends[token + 1])
        if tile < stop:
            entries = Entries(
                inputs.pool,
                inputs.page_table[plan.requests[token], None],
                cutlass.min(plan.lengths[token], (stop - before) * TILE_KEYS),
            )
            rows = *inputs.of_query(token), logits[token, None]
            places = base, factors[None, group], table, ones
            score_share(config, rows, places, entries, tile - before, stop - before, group, thread)
        tile = stop
        token += 1
    fill(config, plan, logits, total, cta, ctas, thread)


@cute.jit
def score_share(config: cutlass.Constexpr, rows, places, entries, first, end, group, thread):
    """A warpgroup scores tiles first to end of a query.

    rows: the query's rows of queries, weights and logits. places: where the warpgroup puts the prepared query and its
    factors; the table.
    """
    query, weights, row = rows
    base, factors, table, ones = places
    own = thread % WARPGROUP_THREADS
    passes = -(-config.heads * BLOCKS // WARPGROUP_THREADS)
    asked = [load_asked(config, query, weights, own + i * WARPGROUP_THREADS) for i in range(passes)]
    limit = cutlass.min(row.shape[0], end * TILE_KEYS)
    begun = begin_loads(config, thread, entries, first, 1)
    meet(group)  # the previous query has been read
    for i in cutlass.range_constexpr(passes):
        prepare(config, asked[i], base, table, ones, factors, own + i * WARPGROUP_THREADS)
    cute.arch.fence_view_async_shared()
    meet(group)
    scorer = view_query(config, base, factors, table, ones, thread)
    score_tiles(scorer, entries, first, end, 1, LogitsRow(row, limit), begun)


def meet(group) -> None:
    """Barrier of a warpgroup's threads."""
    cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def fill(config: cutlass.Constexpr, plan, logits, total, cta, ctas, thread):
    """Write -inf after each query's last tile that has keys."""
    queries, columns = logits.shape
    if total < queries * cute.ceil_div(columns, TILE_KEYS):
        width = FILL_COLUMNS * config.threads
        chunks = cute.ceil_div(columns, width)
        for number in cutlass.range(cta, queries * chunks, ctas, unroll=1):
            token = Int32(Uint32(number) // Uint32(chunks))
            scored = (plan.ends[token + 1] - plan.ends[token]) * TILE_KEYS
            for i in cutlass.range_constexpr(FILL_COLUMNS):
                column = (number - token * chunks) * width + i * config.threads + thread
                if (column >= scored) & (column < columns):
                    logits[token, column] = -Float32.inf
