"""Maxima and sums over keys, which are rows of S^T: over the lanes of a warp that share columns, then over warps."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.device.wgmma import PAIR, QUAD
from warpspec.common.hardware import WARP_THREADS

SIGN = 0x7FFFFFFF
NO_SCORE = 0x807FFFFF - (1 << 32)  # -inf as an ordered integer
NO_REFERENCE = -1e30  # of a column without scores: its first one outgrows it
COLUMN_STEP = 8  # columns of a product between a thread's pairs


def ordered(value: Float32) -> Int32:
    """A number as an integer that orders likewise."""
    return flipped(value.bitcast(Int32))


def number_of(word: Int32) -> Float32:
    """The number that ``ordered`` made an integer of."""
    return flipped(word).bitcast(Float32)


def flipped(bits: Int32) -> Int32:
    return bits ^ ((bits >> 31) & Int32(SIGN))


def column_of(v: int, member):
    """Column of a thread's v-th; member: its number among the four lanes of a key."""
    return v // PAIR * COLUMN_STEP + PAIR * member + v % PAIR


def over_lanes(values: list, lane, combine) -> tuple:
    """Reduce a list of a thread's columns over the eight lanes that share them.

    Lanes halve their lists where they can: a lane keeps one half and sends the other. Returns (the lane's results, the
    number of the first in the list).
    """
    first = Int32(0)
    for distance in (16, 8, 4):
        if len(values) > 1:
            half = len(values) // 2
            upper = Boolean((lane & distance) != 0)
            pairs = [(values[i], values[half + i]) for i in range(half)]
            sent = [cutlass.select_(upper, low, high) for low, high in pairs]
            kept = [cutlass.select_(upper, high, low) for low, high in pairs]
            first = first + Int32(cutlass.select_(upper, Int32(half), Int32(0)))
        else:
            kept = sent = values
        values = [
            combine(Float32(own), Float32(cute.arch.shuffle_sync_bfly(Float32(other), distance)))
            for own, other in zip(kept, sent, strict=True)
        ]
    return values, first


assert WARP_THREADS // QUAD == 8
