"""Turns for adding to dQ in a fixed order: a global-memory counter for each warp that adds to a query tile."""

from __future__ import annotations

from cutlass import Int32, cute


@cute.jit
def wait_turn(turn: cute.Pointer, number):
    """Wait until this many have added."""
    seen = Int32(-1)
    while seen != number:
        seen = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")


def end_turn(turn: cute.Pointer) -> None:
    """Publish what this thread has added and pass the turn on."""
    cute.arch.red(turn, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def wait_warp_turn(turn: cute.Pointer, number, lane):
    """``wait_turn`` for a whole warp."""
    if lane == 0:
        wait_turn(turn, number)
    cute.arch.sync_warp()


@cute.jit
def end_warp_turn(turn: cute.Pointer, lane):
    """``end_turn`` for a whole warp, each thread of which has added."""
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_warp()
    if lane == 0:
        end_turn(turn)
