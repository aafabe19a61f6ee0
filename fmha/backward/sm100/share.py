"""P and dS when a cluster's CTAs share a head: each CTA has some columns of K, V, Q and dO, and S and dP are sums over
all CTAs.

A CTA receives the other CTAs' partial sums for some of the tile's queries, makes P and dS of these queries, and sends
them to all CTAs. A key belongs to the same thread in every CTA, so a thread receives only from threads with its number.
Buffers need no release: a CTA sends partial sums of a step once it has all CTAs' P and dS of the previous step, and P
and dS once it has all partial sums.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common.device import handover, tmem
from warpspec.common.device.wgmma import PAIR
from warpspec.fmha.backward.device.arithmetic import derive, weigh
from warpspec.fmha.backward.sm100 import scores


@cute.jit
def make_block(work, step, head, query_tile):
    """Like ``scores.make_block``, for the tile's only block. Produces the other CTAs' sums_there and results_there,
    consumes its own."""
    config, dtype = work.config, work.operands.q.element_type
    others, count = config.column_groups - 1, config.made_queries
    if work.thread == 0:
        for name, size in (
            ("sums_there", config.sent_sums_bytes),
            ("results_there", config.sent_results_bytes),
        ):
            barrier = work.channels[name].barrier(step)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, kinds(config) * others * size)
    first = work.column_group * count
    for distance in cutlass.range_constexpr(1, config.column_groups):
        rank = rank_at(work, distance)
        for kind in cutlass.range_constexpr(kinds(config)):
            sums = sums_of(work, kind, rank * count)
            target = buffer(work, "sums", kind, distance)
            barrier = work.channels["sums_there"].barrier(step)
            handover.send_words(cute.recast_tensor(sums, Int32), target, work.thread, barrier, rank)
    own = [sums_of(work, kind, first) for kind in range(kinds(config))]
    work.channels["sums_there"].wait(step)
    for distance in cutlass.range_constexpr(1, config.column_groups):
        for kind, values in enumerate(own):
            words = handover.received_words(buffer(work, "sums", kind, distance), work.thread, count)
            values.store(values.load() + cute.recast_tensor(words, Float32).load())
    block = work.block(step, first, head, query_tile)
    masked = work.tile.needs_mask(head, query_tile, 0)
    weigh(block, own[0], masked)
    if cutlass.const_expr(config.wanted.ds):
        derive(block, *own, masked)
    made = [scores.as_words(values, dtype) for values in own]
    for distance in cutlass.range_constexpr(1, config.column_groups):
        rank = rank_at(work, distance)
        for kind, words in enumerate(made):
            target = buffer(work, "results", kind, distance)
            barrier = work.channels["results_there"].barrier(step)
            handover.send_words(words, target, work.thread, barrier, rank)
    work.channels["results_there"].wait(step)
    for kind, words in enumerate(made):
        collect(work, kind, words)


def kinds(config) -> int:
    """1 if only S and P are needed; 2 if dP and dS are, too."""
    return 1 + config.wanted.ds


def rank_at(work, distance: int):
    """Rank of the CTA ``distance`` places after this one in the cluster, which wraps around."""
    return (work.column_group + distance) % work.config.column_groups


def buffer(work, region: str, kind: int, distance: int) -> cute.Pointer:
    """The buffer in which a CTA receives data from the CTA ``distance`` places before it. region: "sums", "results"."""
    config = work.config
    size = getattr(config, f"sent_{region}_bytes")
    return getattr(work.shared, region) + (kind * (config.column_groups - 1) + distance - 1) * size


@cute.jit
def sums_of(work, kind: cutlass.Constexpr, query) -> cute.Tensor:
    """Read the CTA's own sums of S or dP for ``made_queries`` queries from ``query`` on into registers."""
    config = work.config
    sums = cute.make_rmem_tensor(config.made_queries, Float32)
    first = config.tmem_s if cutlass.const_expr(kind == 0) else config.tmem_dp
    tmem.load_row(work.columns + first + query, sums, work.thread)
    tmem.wait_loads()
    return sums


@cute.jit
def collect(work, kind: cutlass.Constexpr, made: cute.Tensor):
    """Store P or dS of all queries of the block, in 16 bits, where products read it. made: that of the CTA's own
    queries."""
    config = work.config
    count = config.made_queries // PAIR
    for distance in cutlass.range_constexpr(config.column_groups):
        words = made
        if cutlass.const_expr(distance > 0):
            words = handover.received_words(buffer(work, "results", kind, distance), work.thread, count)
        rank = (work.column_group + config.column_groups - distance) % config.column_groups
        if cutlass.const_expr(kind == 1):
            scores.store_ds(work, rank * count, words)
        elif cutlass.const_expr(config.wanted.v):
            scores.store_p(work, rank * count, words)
