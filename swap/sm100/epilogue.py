"""The epilogue: four warps, a row a thread, from tensor memory to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from warpspec.common.device import tmem
from warpspec.swap.config import TILE_M
from warpspec.swap.device.activation import swiglu
from warpspec.swap.weights import INTERLEAVE

STEP = 32  # columns of the accumulator read at a time


@cute.jit
def epilogue(config: cutlass.Constexpr, channels: cutlass.Constexpr, columns, work, ops, thread):
    """Process every tile of the CTA. columns: TMEM pointer to the accumulator.

    Consumes accumulator_full; produces accumulator_empty, one arrival a warp.
    """
    tile = Int32(0)
    for index in cutlass.range(work.cluster, work.items, work.clusters, unroll=1):
        item = work.item(config, index)
        row = item.row_tile * TILE_M + thread
        in_range = Boolean(row < ops.hidden.shape[0])
        channels["accumulator_full"].wait(tile)
        tmem.fence_after_wait()
        if cutlass.const_expr(config.phase == "up"):
            store_hidden(config, ops, columns, row, in_range, item, thread)
        else:
            store_partial(config, ops, columns, row, in_range, item, thread)
        tmem.fence_before_arrive()
        channels["accumulator_empty"].arrive_behind_collective(tile)
        tile += 1


@cute.jit
def load_step(columns, step: cutlass.Constexpr, thread) -> cute.Tensor:
    """(STEP): the thread's row of the step-th columns."""
    sums = cute.make_rmem_tensor(STEP, Float32)
    tmem.load_row(columns + step * STEP, sums, thread)
    tmem.wait_loads()
    return sums


@cute.jit
def store_hidden(config: cutlass.Constexpr, ops, columns, row, in_range, item, thread):
    """Store silu(gate) * up as bf16. columns: 8 of gate and 8 of up alternate, before the row's factor 1 / RMS."""
    inverse = Float32(0.0)
    if in_range:
        inverse = ops.inverse[row]
    outputs = STEP // 2
    for step in cutlass.range_constexpr(config.tiles.up_n // STEP):
        sums = load_step(columns, step, thread)
        found = cute.make_rmem_tensor(outputs, BFloat16)
        for i in cutlass.range_constexpr(outputs):
            gate = i // INTERLEAVE * 2 * INTERLEAVE + i % INTERLEAVE
            found[i] = swiglu(sums[gate] * inverse, sums[gate + INTERLEAVE] * inverse).to(BFloat16)
        if in_range:
            at = item.column_tile * (config.tiles.up_n // STEP) + step
            cute.autovec_copy(found, cute.local_tile(ops.hidden[row, None], (outputs,), (at,)))


@cute.jit
def store_partial(config: cutlass.Constexpr, ops, columns, row, in_range, item, thread):
    """Store the split's sums in fp32."""
    for step in cutlass.range_constexpr(config.tiles.down_n // STEP):
        sums = load_step(columns, step, thread)
        if in_range:
            at = item.column_tile * (config.tiles.down_n // STEP) + step
            cute.autovec_copy(sums, cute.local_tile(ops.partial[item.split, row, None], (STEP,), (at,)))
