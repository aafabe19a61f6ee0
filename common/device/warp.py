"""Sums that the lanes of one warp compute together."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean

from warpspec.common.hardware import WARP_THREADS

GROUP_BITS = 8  # where shfl's mask of groups begins, above its clamp


def running_sum(value, lane, lanes: int = WARP_THREADS):
    """Sum of ``value``, an Int32 or Int64, over this lane and all lower lanes of its group of ``lanes`` lanes.

    lane: number of this lane in its group. All lanes of the warp execute it.
    """
    kind, groups = type(value), (WARP_THREADS - lanes) << GROUP_BITS
    for bit in range(lanes.bit_length() - 1):
        below = kind(cute.arch.shuffle_sync_up(value, 1 << bit, mask_and_clamp=groups))
        value += kind(cutlass.select_(Boolean(lane >= 1 << bit), below, kind(0)))
    return value
