"""Q of a task in shared memory, as it is: rows of e4m3 in swizzled blocks of 64 columns."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common.device.words import copy_async
from warpspec.common.hardware import QUAD, VECTOR_BYTES, WARPGROUP_THREADS
from warpspec.fmha.heads import BLOCK
from warpspec.latent.gathered.raw.config import FLAGS, P_TURNS, QUERIES_BARRIER
from warpspec.latent.gathered.transposed.maxima import NO_REFERENCE, NO_SCORE

SWIZZLE_CHUNKS = BLOCK // VECTOR_BYTES  # 16-byte chunks of a swizzled row of 64 codes
ROWS_AT_A_TIME = WARPGROUP_THREADS // QUAD


@cute.jit
def copy_queries(role, task):
    """Copy a task's Q to shared memory, by the score warpgroup, and begin its maxima and references. Ends with their
    barrier. Rows without a query repeat another's."""
    config, shared, thread = role.config, role.shared, role.thread
    member = thread % QUAD
    for first in cutlass.range_constexpr(0, config.count, ROWS_AT_A_TIME):
        row = first + thread // QUAD
        place = task.place(row)
        head, token = cutlass.min(place.head, task.heads - 1), cutlass.min(place.query, task.last_token)
        source = role.operands.q[0, token, head, None].iterator.toint() + member * VECTOR_BYTES
        target = shared.q.toint() + row * BLOCK + (member ^ (row // 2 % SWIZZLE_CHUNKS)) * VECTOR_BYTES
        if row < config.count:
            for block in cutlass.range_constexpr(config.heads.qk_blocks):
                place_of = target + block * (config.count * BLOCK)
                copy_async(place_of, source + block * BLOCK, VECTOR_BYTES, VECTOR_BYTES)
    cute.arch.cp_async_commit_group()
    if thread < config.count:
        shared.maxima[thread] = Int32(NO_SCORE)
        shared.references[thread, 0] = Float32(NO_REFERENCE)
    sums = cute.make_rmem_tensor(config.sums_vector, Float32)
    sums.fill(0.0)
    for vector in cutlass.range_constexpr(config.columns // config.sums_vector):
        for turn in cutlass.range_constexpr(P_TURNS):
            cute.autovec_copy(sums, shared.weights[None, thread, vector, turn])
    if thread < FLAGS:
        shared.flags[0, thread] = Int32(-1)
    cute.arch.cp_async_wait_group(0)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=QUERIES_BARRIER, number_of_threads=WARPGROUP_THREADS)


assert SWIZZLE_CHUNKS == QUAD
