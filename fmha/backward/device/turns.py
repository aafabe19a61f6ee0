"""Turns at adding to dQ, where its order is fixed: a count in global memory for each warp that adds to a query tile."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def wait_turn(turn: cute.Pointer, number):
    """Until so many have added."""
    seen = Int32(-1)
    while seen != number:
        seen = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")


def end_turn(turn: cute.Pointer) -> None:
    """What the thread has added is there: the next one's turn."""
    cute.arch.red(turn, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def wait_warp_turn(turn: cute.Pointer, number, lane):
    """``wait_turn`` of a whole warp."""
    if lane == 0:
        wait_turn(turn, number)
    cute.arch.sync_warp()


@cute.jit
def end_warp_turn(turn: cute.Pointer, lane):
    """``end_turn`` of a whole warp, each thread of which has added."""
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_warp()
    if lane == 0:
        end_turn(turn)
