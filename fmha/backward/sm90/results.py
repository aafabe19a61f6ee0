"""A consumer's results: it adds its blocks of dQ to the sums in global memory, and at the end writes dK and dV, or a
piece's sums of them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.device import tma
from warpspec.common.device.handover import received_words, store_words
from warpspec.common.device.wgmma import COLUMNS, flat
from warpspec.common.hardware import FP32_BYTES, WARP_THREADS
from warpspec.fmha.backward.device.tile import own_group
from warpspec.fmha.backward.features import THREAD_ELEMENTS, WARP_ELEMENTS, WARPS
from warpspec.fmha.backward.sm90.config import CONSUMER_KEYS, CONSUMERS
from warpspec.fmha.heads import BLOCK, STEP
from warpspec.fmha.sm90.staging import (
    CHUNKS,
    LOADS,
    TILE_WORDS,
    chunk_read,
    row_read,
    store_chunk,
    store_rows,
)

VECTOR = 4  # fp32 numbers of one 16-byte store


def warp_of(work, place, number) -> Int32:
    """Number of a warp's share of a query tile's dQ among all shares, in 32 bits to save registers."""
    config, sums = work.config, work.operands.dq_sums
    head, query_tile = place
    tile_count = Int32(sums.stride[0] // (config.tile_m * config.heads.qk))
    tile = head * tile_count + work.tile.index_of(query_tile)
    return tile * (config.dq_subtiles * WARPS) + number


def sums_of(work, place, number):
    """Address of the sums of a query tile that warp ``number`` adds to."""
    start = work.operands.dq_sums.iterator.toint()
    return start + Int64(warp_of(work, place, number)) * (WARP_ELEMENTS * FP32_BYTES)


@cute.jit
def add_queries(work, dq_block: cutlass.Constexpr, place):
    """Add one of a consumer's blocks of dQ to global memory, 16 bytes per thread. L2 keeps the sums before all else:
    for an addition to what is not there, memory reads and writes 4 bytes an element, for a load it reads 2."""
    config = work.config
    if cutlass.const_expr(work.mma.dq[dq_block] is None):
        return
    if cutlass.const_expr(config.sent_spans > 0):
        send_queries(work, place)
    dq = flat(work.mma.dq[dq_block])
    warp, lane = work.thread // WARP_THREADS, work.thread % WARP_THREADS
    first = own_group(config) * CONSUMERS + work.consumer  # among the consumers of a tile's dQ
    number, column = config.dq_place(first * config.dq_blocks + dq_block)
    start = sums_of(work, place, number * WARPS + warp)
    start += (column // COLUMNS * WARP_THREADS + lane) * VECTOR * FP32_BYTES
    each = THREAD_ELEMENTS // VECTOR  # vectors of a subtile
    for i in cutlass.range_constexpr(config.sent_spans * each, cute.size(dq) // VECTOR):
        place = i // each * WARPS * WARP_ELEMENTS + i % each * WARP_THREADS * VECTOR
        add_vector(start + place * FP32_BYTES, dq, VECTOR * i, keeps=True)


@cute.jit
def stage_queries(work):
    """Put spans of dQ where the copy engine reads them, each warp its share in the order of the sums. The caller makes
    them visible to the copy engine."""
    dq = work.mma.dq[0]
    if cutlass.const_expr(work.config.sent_spans > 0 and dq is not None):
        dq, lane = flat(dq), work.thread % WARP_THREADS
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # its lane has issued the warp's previous additions
        cute.arch.sync_warp()
        for first, count, target in spans_sent(work):
            strides = (1, VECTOR, VECTOR * WARP_THREADS)
            share = cute.make_tensor(target, cute.make_layout((VECTOR, WARP_THREADS, count), stride=strides))
            for i in cutlass.range_constexpr(count):
                cute.autovec_copy(block_of(dq, first + i, VECTOR), share[None, lane, i])


@cute.jit
def send_queries(work, place):
    """Have the copy engine add what ``stage_queries`` left of a query tile's dQ."""
    warp = work.thread // WARP_THREADS
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for number, (_, count, source) in enumerate(spans_sent(work)):
            size = Int32(count * WARP_THREADS * VECTOR * FP32_BYTES)
            tma.bulk_add(sums_of(work, place, number * WARPS + warp), source, size)
        cute.arch.cp_async_bulk_commit_group()


def spans_sent(work) -> list:
    """(first vector, vectors of a thread, the warp's share in shared memory) of each span of dQ that is sent."""
    config, warp, each = work.config, work.thread // WARP_THREADS, THREAD_ELEMENTS // VECTOR
    bases, found = [work.shared.dq], []
    if config.holds_v:
        bases.insert(0, work.shared.v + config.tile_n * tma.ROW_BYTES)
    for span, base in enumerate(bases):
        count = min(cute.size(work.mma.dq[0]) // VECTOR - span * each, each)
        share = cute.recast_ptr(base, dtype=Float32) + warp * (count * WARP_THREADS * VECTOR)
        found.append((span * each, count, share.align(VECTOR * FP32_BYTES)))
    return found


@cute.jit
def wait_sent(work):
    """Wait until what the copy engine adds has been read, or, if other CTAs are told so, is there."""
    if cutlass.const_expr(work.config.sent_spans > 0):
        cute.arch.cp_async_bulk_wait_group(0, read=not work.config.finishes)


def add_vector(address, values: cute.Tensor, first: int, *, keeps: bool = False) -> None:
    """Add four of the values, from number ``first`` on, to fp32 numbers in global memory. keeps: their lines are the
    last to leave L2."""
    add, operands = "red.relaxed.gpu.global.add", "[{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} }"
    code = f"{add}.v4.f32 {operands};"
    if keeps:
        policy = f".reg .b64 policy; mov.b64 policy, {tma.EVICT_LAST:#x};"
        code = f"{{ {policy} {add}.L2::cache_hint.v4.f32 {operands}, policy; }}"
    cute.arch.inline_ptx(code, read_only_args=[address, *(values[first + j] for j in range(VECTOR))])


@cute.jit
def finish(work):
    """Wait until stores in flight have read shared memory, before the CTA ends."""
    if cutlass.const_expr(work.config.stores_bias):
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def write_keys(work):
    """Write dK and dV of the thread's keys, or what a piece's steps add to them."""
    config, tile = work.config, work.tile
    if cutlass.const_expr(config.slices):
        if (tile.pieces > 0) & (tile.steps > 0):
            leave_keys(work)
    elif cutlass.const_expr(config.cuts_by_length):
        if tile.pieces > 1:
            leave_keys(work)
        elif tile.pieces == 1:
            finish_keys(work)
    elif cutlass.const_expr(config.cut):
        leave_keys(work)
    else:
        finish_keys(work)


def leave_keys(work) -> None:
    """Write what a piece's steps add to dK and dV, in fp32."""
    operands, mma = work.operands, work.mma
    for sums, values in ((operands.dk_sums, mma.dk), (operands.dv_sums, mma.dv)):
        if sums is not None and values is not None:
            write_sums(work, sums, flat(values))


@cute.jit
def finish_keys(work):
    """Write dK, scaled, and dV; if V is K, their sum."""
    config, operands, mma = work.config, work.operands, work.mma
    if cutlass.const_expr(mma.dk is not None):
        values = flat(mma.dk)
        values.store(values.load() * work.scales[1])
    if cutlass.const_expr(config.wanted.joins_keys):
        join(work)
    for tensor, values in ((operands.dk, mma.dk), (operands.dv, mma.dv)):
        if cutlass.const_expr(tensor is not None and values is not None):
            write_rows(work, tensor, flat(values))


@cute.jit
def join(work):
    """dK of the thread's keys, scaled, plus dV. One of a pair's consumers gets dV from the other, through the buffers
    of K and V."""
    config, mma = work.config, work.mma
    if cutlass.const_expr(config.paired):
        work.barrier()  # nobody reads K any more
        if cutlass.const_expr(mma.dv is not None):
            store_words(cute.recast_tensor(flat(mma.dv), Int32), work.shared.k, work.thread)
        work.barrier()
        if cutlass.const_expr(mma.dk is not None):
            values = flat(mma.dk)
            words = received_words(work.shared.k, work.thread, cute.size(values))
            values.store(values.load() + cute.recast_tensor(words, Float32).load())
    else:
        values = flat(mma.dk)
        values.store(values.load() + flat(mma.dv).load())


@cute.jit
def write_sums(work, sums: cute.Tensor, values: cute.Tensor):
    """Write values to the piece's place in the sums, in the order of wgmma's registers, 512 bytes per warp at a time;
    with sliced heads, add them there."""
    config, tile, thread = work.config, work.tile, work.thread
    row_block = 0 if cutlass.const_expr(config.paired) else work.consumer
    own = sums[*tile.sums_place, None]
    first = row_block * (config.heads.qk_blocks * WARPS) + thread // WARP_THREADS  # which 4 KiB
    first += own_group(config) * (config.width // BLOCK * WARPS)
    for number in cutlass.range_constexpr(-(-cute.size(values) // THREAD_ELEMENTS)):
        target = cute.local_tile(own, (WARP_ELEMENTS,), (first + number * WARPS,))
        block = block_of(values, number, THREAD_ELEMENTS)
        for i in cutlass.range_constexpr(cute.size(block) // VECTOR):
            vector = cute.local_tile(block, (VECTOR,), (i,))
            place = cute.local_tile(target, (VECTOR,), (i * WARP_THREADS + thread % WARP_THREADS,))
            if cutlass.const_expr(config.slices):
                add_vector(place.iterator.toint(), vector, 0)
            else:
                cute.autovec_copy(vector, place)


def block_of(values: cute.Tensor, number: int, size: int) -> cute.Tensor:
    """The number-th block of this many of the values (n); the last may be smaller."""
    first = number * size
    count = min(size, cute.size(values) - first)
    return cute.make_tensor(values.iterator + first, cute.make_layout(count))


@cute.jit
def write_rows(work, tensor: cute.Tensor, values: cute.Tensor):
    """Write values to the consumer's rows of dK or dV, in 16 bits, in lines of 128 bytes: each warp stages its 16 rows,
    64 columns at a time, in 2 KiB of the stage after the last Q's, which nobody reads any more."""
    config, tile, thread = work.config, work.tile, work.thread
    batch = 0 if cutlass.const_expr(config.requests.packed_k) else tile.request
    keys = tile.place.length if cutlass.const_expr(config.requests.packed_k) else tensor.shape[1]
    stage = work.shared.q.toint() + tile.steps % config.q_stages * config.tile_bytes("q")
    base = stage + Int32(work.consumer) * (CONSUMER_KEYS * tma.ROW_BYTES)
    narrow = cute.make_rmem_tensor(cute.size(values), tensor.element_type)
    narrow.store(values.load().to(tensor.element_type))
    words = cute.recast_tensor(narrow, Int32)
    first_block = own_group(config) * (config.width // BLOCK)
    for block in cutlass.range_constexpr(-(-cute.size(words) // TILE_WORDS)):
        cute.arch.sync_warp()
        store_rows(base, thread, block_of(words, block, TILE_WORDS))
        cute.arch.sync_warp()
        for load in cutlass.range_constexpr(LOADS):
            key = tile.first_key + work.first_row + row_read(thread, load)
            row = tensor[batch, tile.place.first_key + key, tile.kv_head, None]
            inside = Boolean(key < keys)
            if cutlass.const_expr(config.rows is not None):
                inside &= Boolean(block * CHUNKS + chunk_read(thread) < tensor.shape[3] // STEP)
            store_chunk(base, thread, load, row, first_block + block, inside)
