"""The turn warps: they grant turns to add to dQ in a fixed order.

A query tile of one head has a counter in global memory for each consumer: how many key tiles have added that consumer's
blocks of dQ. One warp reads the counters and tells each consumer when its turn has come, up to TURN_STAGES steps ahead;
another warp for each consumer increments its counter after it has added. Waiting for additions to arrive (a GPU-scope
fence) and waiting for a counter each take about half a step; in these warps the waits delay neither the consumers nor
each other.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.backward.device.tile import own_group
from warpspec.fmha.backward.device.turns import end_turn
from warpspec.fmha.backward.sm90 import results
from warpspec.fmha.backward.sm90.config import CONSUMERS


@cute.jit
def take_turns(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands, tile, warp):
    """Run a turn warp, numbered from 0. Together they produce turn and consume added for every step and consumer."""
    if warp == 0:
        grant_turns(config, channels, operands, tile)
    elif warp <= CONSUMERS:
        leave_turns(config, channels, operands, tile, warp - 1)


@cute.jit
def grant_turns(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands, tile):
    """Produces turn, consumes left.

    Each consumer has a lane. Lanes of a warp wait for each other at the end of a loop, so no lane waits in a loop of
    its own: each polls once per round.
    """
    consumer, left = cute.arch.lane_idx(), channels["left"]
    if consumer < CONSUMERS:
        head, query_tile = tile.first
        step = Int32(0)
        while step < tile.steps:
            use = use_of(step, consumer)
            count = count_of(config, operands, tile, head, query_tile, consumer)
            seen = cute.arch.load(count, Int32, sem="acquire", scope="gpu")
            comes = Boolean(seen == tile.turn(head, query_tile))
            free = cute.arch.mbarrier_test_wait(
                left.barrier(use), (use // left.stages + 1) % 2
            )  # of wait_previous
            if comes & free:
                channels["turn"].arrive(use)
                head, query_tile = tile.following(head, query_tile)
                step += 1


@cute.jit
def leave_turns(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands, tile, consumer):
    """Consume a consumer's added, produce its left, and increment its counter. Called by one lane."""
    if cute.arch.lane_idx() == 0:
        head, query_tile = tile.first
        for step in cutlass.range(tile.steps, unroll=1):
            use = use_of(step, consumer)
            channels["added"].wait(use)
            channels["left"].arrive(use)
            end_turn(count_of(config, operands, tile, head, query_tile, consumer))
            head, query_tile = tile.following(head, query_tile)


def count_of(config, operands, tile, head, query_tile, consumer) -> cute.Pointer:
    """Pointer to the counter of key tiles that have added a consumer's blocks of a query tile's dQ."""
    tile_index = tile.index_of(query_tile)
    return operands.turns[head, tile_index, None].iterator + (own_group(config) * CONSUMERS + consumer)


def use_of(step, consumer) -> Int32:
    """Use count of the mbarriers, of which each consumer has its own."""
    return step * CONSUMERS + consumer


@cute.jit
def add(work, step, place):
    """Add all of a consumer's blocks of dQ of a step when its turn has come. Paired consumers call ``wait`` and
    ``leave`` themselves."""
    wait(work, step)
    results.add_queries(work, 0, place)
    leave(work, step)


@cute.jit
def wait(work, step):
    """Wait for the consumer's turn, if dQ's order is fixed."""
    if cutlass.const_expr(work.config.deterministic):
        work.channels["turn"].wait(use_of(step, work.consumer))


@cute.jit
def leave(work, step):
    """Signal that the consumer has added all its dQ of the step, if dQ's order is fixed."""
    if cutlass.const_expr(work.config.deterministic):
        work.channels["added"].arrive_warp(use_of(step, work.consumer))
