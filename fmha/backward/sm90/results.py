"""What a consumer hands on: its part of dQ, added to the sums in global memory; dK and dV, or a piece's part, once."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from warpspec.common.device import tma
from warpspec.common.device.wgmma import flat
from warpspec.common.hardware import FP32_BYTES, WARP_THREADS
from warpspec.fmha.backward.device.tile import slot_of
from warpspec.fmha.backward.features import THREAD_ELEMENTS, WARP_ELEMENTS, WARPS
from warpspec.fmha.backward.sm90.config import CONSUMER_KEYS
from warpspec.fmha.sm90.staging import (
    LOADS,
    TILE_WORDS,
    chunk_place,
    load_chunk,
    row_read,
    store_rows,
)

VECTOR = 4  # fp32 numbers of one 16-byte store


def warp_of(work, place, number) -> Int32:
    """Number of a warp's piece of a query tile's dQ among all pieces, in 32 bits: there are not registers for more."""
    config, sums = work.config, work.operands.dq_sums
    head, query_tile = place
    slots = Int32(sums.stride[0] // (config.tile_m * config.heads.qk))
    tile = head * slots + slot_of(config, work.operands, work.tile.request, query_tile)
    return tile * (config.parts * WARPS) + number


def sums_of(work, place, number):
    """Address of the sums of a query tile that warp ``number`` adds to."""
    start = work.operands.dq_sums.iterator.toint()
    return start + Int64(warp_of(work, place, number)) * (WARP_ELEMENTS * FP32_BYTES)


@cute.jit
def add_queries(work, part: cutlass.Constexpr, place):
    """One of a consumer's parts of dQ, added to global memory 16 bytes a thread."""
    config, dq = work.config, flat(work.mma.dq)
    warp, lane = work.thread // WARP_THREADS, work.thread % WARP_THREADS
    number = (work.consumer * config.consumer_parts + part) * WARPS + warp
    start = sums_of(work, place, number) + lane * VECTOR * FP32_BYTES
    for i in cutlass.range_constexpr(THREAD_ELEMENTS // VECTOR):
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.add.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
            read_only_args=[
                start + i * WARP_THREADS * VECTOR * FP32_BYTES,
                *(dq[VECTOR * i + j] for j in range(VECTOR)),
            ],
        )


@cute.jit
def finish(work):
    """What is under way must leave shared memory before the CTA ends."""
    if cutlass.const_expr(work.config.stores_bias):
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def write_keys(work) -> None:
    """dK, scaled, and dV of the thread's keys; or what a piece's steps add to them, in fp32."""
    operands, mma = work.operands, work.mma
    for tensor, values, factor in ((operands.dk, mma.dk, work.scales[1]), (operands.dv, mma.dv, 1.0)):
        if tensor is not None and values is not None:
            if work.config.cut:
                write_sums(work, tensor, flat(values))
            else:
                write_rows(work, tensor, flat(values), factor)


@cute.jit
def write_sums(work, sums: cute.Tensor, values: cute.Tensor):
    """Values to the piece's place among the sums, in the order of wgmma's registers, 512 bytes a warp at a time."""
    config, tile, thread = work.config, work.tile, work.thread
    row_block = 0 if cutlass.const_expr(config.paired) else work.consumer
    own = sums[tile.kv_head, tile.slot, tile.piece, None]
    first = row_block * (config.heads.qk_blocks * WARPS) + thread // WARP_THREADS  # which 4 KiB
    for block in cutlass.range_constexpr(config.heads.qk_blocks):
        target = cute.local_tile(own, (WARP_ELEMENTS,), (first + block * WARPS,))
        for i in cutlass.range_constexpr(THREAD_ELEMENTS // VECTOR):
            vector = cute.local_tile(values, (VECTOR,), (block * (THREAD_ELEMENTS // VECTOR) + i,))
            place = cute.local_tile(target, (VECTOR,), (i * WARP_THREADS + thread % WARP_THREADS,))
            cute.autovec_copy(vector, place)


@cute.jit
def write_rows(work, tensor: cute.Tensor, values: cute.Tensor, factor):
    """Values times a factor to the consumer's rows of dK or dV, in 16 bits, by lines of 128 bytes: each warp takes its
    16 rows, 64 columns at a time, through 2 KiB of the stage behind the last Q's, which nobody reads any more."""
    config, tile, thread = work.config, work.tile, work.thread
    batch = 0 if cutlass.const_expr(config.requests.packed_k) else tile.request
    keys = tile.place.length if cutlass.const_expr(config.requests.packed_k) else tensor.shape[1]
    stage = work.shared.q.toint() + tile.steps % config.q_stages * config.query_tile_bytes
    base = stage + Int32(work.consumer) * (CONSUMER_KEYS * tma.ROW_BYTES)
    values.store(values.load() * factor)
    narrow = cute.make_rmem_tensor(cute.size(values), tensor.element_type)
    narrow.store(values.load().to(tensor.element_type))
    words = cute.logical_divide(cute.recast_tensor(narrow, Int32), cute.make_layout(TILE_WORDS))
    for block in cutlass.range_constexpr(config.heads.qk_blocks):
        cute.arch.sync_warp()
        store_rows(base, thread, words[None, block])
        cute.arch.sync_warp()
        for load in cutlass.range_constexpr(LOADS):
            key = tile.first_key + work.first_row + row_read(thread, load)
            if key < keys:
                target = tensor[batch, tile.place.first_key + key, tile.kv_head, None]
                part = chunk_place(target, block, thread)
                chunk = load_chunk(base, thread, load)
                cute.autovec_copy(cute.recast_tensor(chunk, tensor.element_type), part)
