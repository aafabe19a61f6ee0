"""P and dS of a head size that a cluster's CTAs share: each has some columns of K, V, Q and dO, and S and dP are sums
over all of them.

A CTA gets the others' partial sums for some of the tile's queries, makes P and dS of these, and hands them to all. A
key is a thread's in every CTA, so that what a thread needs has been sent by threads of its number. Nothing else says
that a buffer may be written again: partial sums of a step are sent when all CTAs' P and dS of the step before have
come, and P and dS when all partial sums have.
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
    """As ``scores.make_block``, of the tile's only block. Produces other CTAs' sums_there and results_there, consumes
    its own."""
    config, dtype = work.config, work.operands.q.element_type
    others, count = config.column_parts - 1, config.made_queries
    if work.thread == 0:
        for name, size in (
            ("sums_there", config.sent_sums_bytes),
            ("results_there", config.sent_results_bytes),
        ):
            barrier = work.channels[name].barrier(step)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, kinds(config) * others * size)
    first = work.part * count
    for distance in cutlass.range_constexpr(1, config.column_parts):
        rank = rank_at(work, distance)
        for kind in cutlass.range_constexpr(kinds(config)):
            sums = sums_of(work, kind, rank * count)
            target = buffer(work, "sums", kind, distance)
            barrier = work.channels["sums_there"].barrier(step)
            handover.send_words(cute.recast_tensor(sums, Int32), target, work.thread, barrier, rank)
    own = [sums_of(work, kind, first) for kind in range(kinds(config))]
    work.channels["sums_there"].wait(step)
    for distance in cutlass.range_constexpr(1, config.column_parts):
        for kind, values in enumerate(own):
            words = handover.received_words(buffer(work, "sums", kind, distance), work.thread, count)
            values.store(values.load() + cute.recast_tensor(words, Float32).load())
    block = work.block(step, first, head, query_tile)
    masked = work.tile.needs_mask(query_tile, 0)
    weigh(block, own[0], masked)
    if cutlass.const_expr(config.wanted.ds):
        derive(block, *own, masked)
    made = [scores.as_words(values, dtype) for values in own]
    for distance in cutlass.range_constexpr(1, config.column_parts):
        rank = rank_at(work, distance)
        for kind, words in enumerate(made):
            target = buffer(work, "results", kind, distance)
            barrier = work.channels["results_there"].barrier(step)
            handover.send_words(words, target, work.thread, barrier, rank)
    work.channels["results_there"].wait(step)
    for kind, words in enumerate(made):
        collect(work, kind, words)


def kinds(config) -> int:
    """1: S and P alone are needed; 2: dP and dS, too."""
    return 1 + config.wanted.ds


def rank_at(work, distance: int):
    """The CTA that comes so many behind this one in the cluster."""
    return (work.part + distance) % work.config.column_parts


def buffer(work, region: str, kind: int, distance: int) -> cute.Pointer:
    """Where a CTA gets something from the one that comes so many before it. region: "sums", "results"."""
    config = work.config
    size = getattr(config, f"sent_{region}_bytes")
    return getattr(work.shared, region) + (kind * (config.column_parts - 1) + distance - 1) * size


@cute.jit
def sums_of(work, kind: cutlass.Constexpr, query) -> cute.Tensor:
    """The CTA's own sums of S or dP, of ``made_queries`` from ``query`` on, in registers."""
    config = work.config
    sums = cute.make_rmem_tensor(config.made_queries, Float32)
    first = config.tmem_s if cutlass.const_expr(kind == 0) else config.tmem_dp
    tmem.load_row(work.columns + first + query, sums, work.thread)
    tmem.wait_loads()
    return sums


@cute.jit
def collect(work, kind: cutlass.Constexpr, made: cute.Tensor):
    """P or dS of all queries of the block, in 16 bits, to where products read it. made: of the CTA's own queries."""
    config = work.config
    count = config.made_queries // PAIR
    for distance in cutlass.range_constexpr(config.column_parts):
        words = made
        if cutlass.const_expr(distance > 0):
            words = handover.received_words(buffer(work, "results", kind, distance), work.thread, count)
        rank = (work.part + config.column_parts - distance) % config.column_parts
        if cutlass.const_expr(kind == 1):
            scores.store_ds(work, rank * count, words)
        elif cutlass.const_expr(config.wanted.v):
            scores.store_p(work, rank * count, words)
