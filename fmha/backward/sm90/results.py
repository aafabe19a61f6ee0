"""What a consumer hands on: its part of dQ, added to the sums in global memory; dK and dV, once."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common import tma
from warpspec.common.hardware import WARP_THREADS
from warpspec.common.wgmma import THREAD_ROWS, flat, store_row
from warpspec.fmha.backward.device.tile import slot_of
from warpspec.fmha.backward.device.turns import end_turn, end_warp_turn, wait_turn, wait_warp_turn
from warpspec.fmha.backward.features import THREAD_ELEMENTS, WARP_ELEMENTS, WARPS
from warpspec.fmha.features import FP32_BYTES

VECTOR = 4  # fp32 numbers of one 16-byte store


@cute.jit
def add_queries(work, step, place):
    """dQ of a step to shared memory, from where the copy engine adds it: 4 KiB a warp, by one thread of it.

    Where the order is fixed a warp waits for its turn, and tells the next once its own has arrived, a step later.
    """
    config, operands, dq = work.config, work.operands, flat(work.mma.dq)
    warp, lane = work.thread // WARP_THREADS, work.thread % WARP_THREADS
    number = work.consumer * WARPS + warp
    stage = (work.shared.dq + number * WARP_ELEMENTS).align(16)
    head, query_tile = place
    slot = slot_of(config, operands, work.tile.request, query_tile)
    if cutlass.const_expr(config.deterministic):
        if step > 0:
            pass_turn(work, step - 1, number, lane)
    else:
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()
    target = cute.make_tensor(stage, cute.make_layout((VECTOR, WARP_THREADS, THREAD_ELEMENTS // VECTOR)))
    for i in cutlass.range_constexpr(THREAD_ELEMENTS // VECTOR):
        cute.autovec_copy(cute.local_tile(dq, (VECTOR,), (i,)), target[None, lane, i])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    if lane == 0:
        sums = cute.local_tile(operands.dq_sums[head, slot, None], (WARP_ELEMENTS,), (number,))
        if cutlass.const_expr(config.deterministic):
            wait_turn(operands.turns[head, slot, None].iterator + number, work.tile.turn(query_tile))
        tma.bulk_add(sums.iterator.toint(), stage, Int32(WARP_ELEMENTS * FP32_BYTES))
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def add_from_registers(work, part: cutlass.Constexpr, place):
    """One of a consumer's parts of dQ, added to global memory 16 bytes a thread. Order as of ``add_queries``."""
    config, operands, dq = work.config, work.operands, flat(work.mma.dq)
    warp, lane = work.thread // WARP_THREADS, work.thread % WARP_THREADS
    number = (work.consumer * config.consumer_parts + part) * WARPS + warp
    head, query_tile = place
    slot = slot_of(config, operands, work.tile.request, query_tile)
    sums = cute.local_tile(operands.dq_sums[head, slot, None], (WARP_ELEMENTS,), (number,))
    if cutlass.const_expr(config.deterministic):
        turn = operands.turns[head, slot, None].iterator + number
        wait_warp_turn(turn, work.tile.turn(query_tile), lane)
    start = sums.iterator.toint() + lane * VECTOR * FP32_BYTES
    for i in cutlass.range_constexpr(THREAD_ELEMENTS // VECTOR):
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
            read_only_args=[
                start + i * WARP_THREADS * VECTOR * FP32_BYTES,
                *(dq[VECTOR * i + j] for j in range(VECTOR)),
            ],
        )
    if cutlass.const_expr(config.deterministic):
        end_warp_turn(turn, lane)


@cute.jit
def pass_turn(work, step, number, lane):
    """What the warp added in a step has arrived: the next one's turn."""
    tile = work.tile
    if lane == 0:
        cute.arch.cp_async_bulk_wait_group(0)
        head, query_tile = tile.kv_head * tile.group + step // tile.count, tile.begin + step % tile.count
        slot = slot_of(work.config, work.operands, tile.request, query_tile)
        turn = work.operands.turns[head, slot, None].iterator + number
        end_turn(turn)


@cute.jit
def finish_queries(work):
    """After the last step: what is under way must leave shared memory before the CTA ends."""
    warp, lane = work.thread // WARP_THREADS, work.thread % WARP_THREADS
    if cutlass.const_expr(work.config.deterministic):
        pass_turn(work, work.tile.steps - 1, work.consumer * WARPS + warp, lane)
    elif lane == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def write_keys(work) -> None:
    """dK, scaled, and dV of the thread's keys."""
    if work.operands.dk is not None and work.mma.dk is not None:
        write_rows(work, work.operands.dk, flat(work.mma.dk), work.scales[1])
    if work.operands.dv is not None and work.mma.dv is not None:
        write_rows(work, work.operands.dv, flat(work.mma.dv), 1.0)


@cute.jit
def write_rows(work, tensor: cute.Tensor, values: cute.Tensor, factor):
    """Values times a factor to the thread's keys of dK or dV."""
    config, tile = work.config, work.tile
    batch = 0 if cutlass.const_expr(config.packed_k) else tile.request
    keys = tile.place.length if cutlass.const_expr(config.packed_k) else tensor.shape[1]
    values.store(values.load() * factor)
    for r in cutlass.range_constexpr(THREAD_ROWS):
        key = tile.first_key + work.key(r)
        row = cutlass.min(tile.place.first_key + key, tensor.shape[1] - 1)
        store_row(values, r, work.member, tensor[batch, row, tile.kv_head, None], Boolean(key < keys))
