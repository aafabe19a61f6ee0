"""The collapse: three small phases, by 256 threads a CTA. Every sum has a fixed order.

pool: pooled[b, k] = sum over cores of alpha[c, k] x[c]; each CTA takes eight columns of all cores.
basis: summed[b, s] = sum over k of basis[k, s] . pooled[b, k]; each CTA takes one s, each warp one k.
decode: delta[b] = decoder . silu(summed[b]); each warp takes one column.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32

from warpspec.common.hardware import WARP_THREADS
from warpspec.swap.config import (
    OUTPUTS,
    POOL_COLUMNS,
    SLOTS,
    THREADS,
    TILE_M,
    WARPS,
)
from warpspec.swap.device.activation import silu
from warpspec.swap.device.flow import count, groups_of, synchronize, wait_for
from warpspec.swap.device.row_group import warp_sum

POOLED = SLOTS * POOL_COLUMNS  # numbers of a pooled tile
BASIS_VECTOR = 8  # bf16 of a 16-byte load


@cute.jit
def pool(config: cutlass.Constexpr, ops, sums, flow, place, step):
    """The pool phase.

    place: (thread, CTA, CTAs). sums: fp32 in shared memory, POOLED a warp. step: FFN steps done. In the fused kernel it
    consumes the rows counts of a request's row tiles and produces pooled.
    """
    thread, cta, ctas = place
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    cores = ops.core_alpha.shape[0]
    slices = config.d_model // POOL_COLUMNS
    batch = ops.pooled.shape[0]
    for task in cutlass.range(cta, batch * slices, ctas, unroll=1):
        request, column = task // slices, task % slices
        if cutlass.const_expr(config.fused):
            wait_for_rows(ops, flow, request, cores, thread, step)
        found = cute.make_rmem_tensor(POOLED, Float32)
        found.fill(0.0)
        for core in cutlass.range(thread, cores, THREADS, unroll=1):
            values = cute.make_rmem_tensor(POOL_COLUMNS, BFloat16)
            alpha = cute.make_rmem_tensor(SLOTS, Float32)
            row = ops.vectors[request * cores + core, None]
            cute.autovec_copy(cute.local_tile(row, (POOL_COLUMNS,), (column,)), values)
            cute.autovec_copy(ops.core_alpha[core, None], alpha)
            for k in cutlass.range_constexpr(SLOTS):
                for i in cutlass.range_constexpr(POOL_COLUMNS):
                    found[k * POOL_COLUMNS + i] += alpha[k] * values[i].to(Float32)
        mine = share_sums([found[i] for i in range(POOLED)], lane)
        for i in cutlass.range_constexpr(len(mine)):
            sums[warp * POOLED + lane * len(mine) + i] = mine[i]
        synchronize()
        if thread < POOLED:
            total = Float32(0.0)
            for w in cutlass.range_constexpr(WARPS):
                total = total + sums[w * POOLED + thread]
            ops.pooled[request, thread // POOL_COLUMNS, column * POOL_COLUMNS + thread % POOL_COLUMNS] = total
        if cutlass.const_expr(config.fused):
            count(flow.grid("pooled"), thread)
        else:
            synchronize()


@cute.jit
def wait_for_rows(ops, flow, request, cores, thread, step):
    """Wait until a request's vectors are final. step: FFN steps done."""
    if thread == 0:
        rows = ops.vectors.shape[0]
        first, last = request * cores // TILE_M, ((request + 1) * cores - 1) // TILE_M
        for row_tile in cutlass.range(first, last + 1, unroll=1):
            wait_for(flow.tile("rows", row_tile), groups_of(rows, row_tile) * (step + 1))
    synchronize()


def share_sums(values: list, lane) -> list:
    """Sum 64 numbers over a warp's lanes; lane l gets the sums of numbers 2 l and 2 l + 1."""
    offset = WARP_THREADS // 2
    while offset:
        upper = Boolean((lane & offset) != 0)
        half = len(values) // 2
        kept = []
        for low, high in zip(values[:half], values[half:], strict=True):
            send = Float32(cutlass.select_(upper, low, high))
            keep = Float32(cutlass.select_(upper, high, low))
            kept.append(keep + cute.arch.shuffle_sync_bfly(send, offset))
        values, offset = kept, offset // 2
    return values


@cute.jit
def basis(config: cutlass.Constexpr, ops, sums, flow, place):
    """The basis phase. In the fused kernel it consumes pooled and produces summed. Arguments as in ``pool``."""
    thread, cta, ctas = place
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    batch, rank = ops.summed.shape
    vectors = config.d_model // (WARP_THREADS * BASIS_VECTOR)
    for s in cutlass.range(cta, rank, ctas, unroll=1):
        weights = cute.make_rmem_tensor((BASIS_VECTOR, vectors), BFloat16)
        for i in cutlass.range_constexpr(vectors):
            source = cute.local_tile(ops.basis[warp, s, None], (BASIS_VECTOR,), (i * WARP_THREADS + lane,))
            cute.autovec_copy(source, weights[None, i])
        if cutlass.const_expr(config.fused):
            if thread == 0:
                slices = config.d_model // POOL_COLUMNS
                wait_for(flow.grid("pooled"), batch * slices)
            synchronize()
        else:
            cute.arch.griddepcontrol_wait()
        for first in cutlass.range(0, batch, OUTPUTS, unroll=1):
            for b in cutlass.range(cutlass.min(batch - first, OUTPUTS), unroll=1):
                total = Float32(0.0)
                for i in cutlass.range_constexpr(vectors):
                    pooled = cute.make_rmem_tensor(BASIS_VECTOR, Float32)
                    row = ops.pooled[first + b, warp, None]
                    cute.autovec_copy(
                        cute.local_tile(row, (BASIS_VECTOR,), (i * WARP_THREADS + lane,)), pooled
                    )
                    for j in cutlass.range_constexpr(BASIS_VECTOR):
                        total = total + weights[j, i].to(Float32) * pooled[j]
                total = warp_sum(total)
                if lane == 0:
                    sums[b * WARPS + warp] = total
            synchronize()
            if (thread < OUTPUTS) & (first + thread < batch):
                total = Float32(0.0)
                for w in cutlass.range_constexpr(WARPS):
                    total = total + sums[thread * WARPS + w]
                ops.summed[first + thread, s] = total
            synchronize()
        if cutlass.const_expr(config.fused):
            count(flow.grid("summed"), thread)


@cute.jit
def decode(config: cutlass.Constexpr, ops, flow, place):
    """The decode phase. In the fused kernel it consumes summed. Arguments as in ``pool``."""
    thread, cta, ctas = place
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    batch, rank = ops.summed.shape
    if cutlass.const_expr(config.fused):
        if thread == 0:
            wait_for(flow.grid("summed"), rank)
        synchronize()
    for column in cutlass.range(cta * WARPS + warp, config.d_model, ctas * WARPS, unroll=1):
        for request in cutlass.range(batch, unroll=1):
            total = Float32(0.0)
            for s in cutlass.range(lane, rank, WARP_THREADS, unroll=1):
                total += ops.decoder[column, s].to(Float32) * silu(ops.summed[request, s])
            total = warp_sum(total)
            if lane == 0:
                ops.delta[request, column] = total.to(BFloat16)
