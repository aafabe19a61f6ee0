"""Sums that the lanes of one warp compute together, and a warp's number, read anew."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from warpspec.common.hardware import WARP_THREADS

GROUP_BITS = 8  # where shfl's mask of groups begins, above its clamp


@dsl_user_op
def thread_anew(*, loc=None, ip=None) -> Int32:
    """The thread's number in its CTA, read here. The compiler would keep one that was read before, and what follows
    from it, and where registers are full that is too much."""
    asm = {"has_side_effects": True, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    return Int32(llvm.inline_asm(T.i32(), [], "mov.u32 $0, %tid.x;", "=r", loc=loc, ip=ip, **asm))


@dsl_user_op
def warp_anew(*, loc=None, ip=None) -> Int32:
    """The warp's number in its CTA, read here; the compiler knows that it is the same in a warp."""
    return cute.arch.make_warp_uniform(thread_anew(loc=loc, ip=ip) // WARP_THREADS, loc=loc, ip=ip)


def running_sum(value, lane, lanes: int = WARP_THREADS):
    """Sum of ``value``, an Int32 or Int64, over this lane and all lower lanes of its group of ``lanes`` lanes.

    lane: number of this lane in its group. All lanes of the warp execute it.
    """
    kind, groups = type(value), (WARP_THREADS - lanes) << GROUP_BITS
    for bit in range(lanes.bit_length() - 1):
        below = kind(cute.arch.shuffle_sync_up(value, 1 << bit, mask_and_clamp=groups))
        value += kind(cutlass.select_(Boolean(lane >= 1 << bit), below, kind(0)))
    return value
