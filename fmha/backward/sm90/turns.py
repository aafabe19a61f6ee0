"""The turn warps: whose turn it is to add to dQ, where its order is fixed.

A query tile of one head has a count in global memory for each consumer: how many key tiles have added what that
consumer makes of dQ. One warp reads the consumers' counts, of TURN_STAGES steps at a time, and tells each consumer when
its turn has come; a warp for each consumer counts on when it has added. To wait for what was added to arrive (a fence
of the GPU), and for a count, each takes about half a step: here it holds up nobody who computes, and neither the other.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.backward.device.tile import column_part, tile_index_of
from warpspec.fmha.backward.device.turns import end_turn
from warpspec.fmha.backward.sm90 import results
from warpspec.fmha.backward.sm90.config import CONSUMERS, TURN_STAGES


@cute.jit
def take_turns(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands, tile, warp):
    """The turn warps, of which the first is number 0. Together they produce turn and consume added, of every step and
    consumer."""
    if warp == 0:
        grant_turns(config, channels, operands, tile)
    elif warp <= CONSUMERS:
        leave_turns(config, channels, operands, tile, warp - 1)


@cute.jit
def grant_turns(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands, tile):
    """Produces turn, consumes left.

    A lane for each consumer and every TURN_STAGES-th step: their loads of counts are under way together. The lanes of a
    warp wait for each other behind a loop: so none ever waits in one, and each looks once a round at what it is waiting
    for.
    """
    lane, left = cute.arch.lane_idx(), channels["left"]
    if lane < CONSUMERS * TURN_STAGES:
        head, query_tile = tile.first
        for _ in cutlass.range(lane // CONSUMERS, unroll=1):
            head, query_tile = tile.following(head, query_tile)
        use = lane  # the mbarriers' uses go round by as many as there are lanes
        while use < tile.steps * CONSUMERS:
            count = count_of(config, operands, tile, head, query_tile, lane % CONSUMERS)
            seen = cute.arch.load(count, Int32, sem="acquire", scope="gpu")
            comes = Boolean(seen == tile.turn(query_tile))
            free = cute.arch.mbarrier_test_wait(
                left.barrier(use), (use // left.stages + 1) % 2
            )  # of wait_previous
            if comes & free:
                channels["turn"].arrive(use)
                for _ in cutlass.range(TURN_STAGES, unroll=1):
                    head, query_tile = tile.following(head, query_tile)
                use += CONSUMERS * TURN_STAGES


@cute.jit
def leave_turns(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands, tile, consumer):
    """Consumes a consumer's added, produces its left, and counts on. By one lane."""
    if cute.arch.lane_idx() == 0:
        head, query_tile = tile.first
        for step in cutlass.range(tile.steps, unroll=1):
            use = use_of(step, consumer)
            channels["added"].wait(use)
            channels["left"].arrive(use)
            end_turn(count_of(config, operands, tile, head, query_tile, consumer))
            head, query_tile = tile.following(head, query_tile)


def count_of(config, operands, tile, head, query_tile, consumer) -> cute.Pointer:
    """The count of those that have added what a consumer makes of a query tile's dQ."""
    tile_index = tile_index_of(config, operands, tile.request, query_tile)
    return operands.turns[head, tile_index, None].iterator + (column_part(config) * CONSUMERS + consumer)


def use_of(step, consumer) -> Int32:
    """Which use of the mbarriers, of which each consumer has its own."""
    return step * CONSUMERS + consumer


@cute.jit
def add(work, step, place):
    """A consumer adds all its parts of dQ of a step, when its turn has come. Only one part: a pair calls ``wait`` and
    ``leave`` itself."""
    wait(work, step)
    results.add_queries(work, 0, place)
    leave(work, step)


@cute.jit
def wait(work, step):
    """The consumer's turn has come, where dQ's order is fixed."""
    if cutlass.const_expr(work.config.deterministic):
        work.channels["turn"].wait(use_of(step, work.consumer))


@cute.jit
def leave(work, step):
    """The consumer has added all its dQ of the step, where its order is fixed."""
    if cutlass.const_expr(work.config.deterministic):
        work.channels["added"].arrive_warp(use_of(step, work.consumer))
