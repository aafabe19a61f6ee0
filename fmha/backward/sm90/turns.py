"""The turn warp: whose turn it is to add to dQ, where its order is fixed.

A query tile of one head has a count in global memory for each consumer: how many key tiles have added what that
consumer makes of dQ. The turn warp reads the consumers' counts, tells each when its turn has come, and counts on when
it has added. To wait for what was added to arrive (a fence of the GPU), and for a count, takes half a step and longer;
here it holds up nobody who computes.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.backward.device.tile import slot_of
from warpspec.fmha.backward.device.turns import end_turn
from warpspec.fmha.backward.sm90 import results
from warpspec.fmha.backward.sm90.config import CONSUMERS


@cute.jit
def take_turns(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands, tile):
    """The turn warp. Produces turn and consumes added, of every step and consumer.

    A lane for each consumer. The lanes of a warp wait for each other behind a loop: so neither ever waits in one, and
    each looks once a round at what it is waiting for.
    """
    consumer = cute.arch.lane_idx()
    if consumer < CONSUMERS:
        head, query_tile = tile.first
        step, adding = Int32(0), Boolean(False)
        while step < tile.steps:
            slot = slot_of(config, operands, tile.request, query_tile)
            count = operands.turns[head, slot, None].iterator + consumer
            use = use_of(step, consumer)
            if adding:
                if cute.arch.mbarrier_test_wait(channels["added"].barrier(use), use // CONSUMERS % 2):
                    end_turn(count)
                    head, query_tile = tile.following(head, query_tile)
                    step, adding = step + 1, Boolean(False)
            elif cute.arch.load(count, Int32, sem="acquire", scope="gpu") == tile.turn(query_tile):
                channels["turn"].arrive(use)
                adding = Boolean(True)


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
