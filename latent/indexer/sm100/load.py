"""The load warps of sm_100a: bring index keys and queries to shared memory as tcgen05 reads them.

Rows are 64 bytes (FP4) or 128 (e4m3), contiguous along K, in the swizzle of that length. The four scales of an FP4 row
go where ``tmem.copy_scale_atom`` expects them.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from warpspec.common.device.pipeline import drain
from warpspec.common.device.words import shuffle_address
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WORD_BYTES
from warpspec.latent.indexer.device.entries import find_page, locate
from warpspec.latent.indexer.sm100.config import ATOM_BYTES, Sm100ScoresConfig

SPAN_BYTES = 128  # bytes of rows that the swizzle treats alike


class ScoresStorage(NamedTuple):
    """Addresses of the shared-memory regions: tiles of keys, the query, their block scales (or None).

    weights: fp32 (HEAD), the query's, times the scale of its row where the tensor core does not scale.
    """

    keys: cute.Pointer
    query: cute.Pointer
    key_scales: cute.Pointer | None
    query_scales: cute.Pointer | None
    weights: cute.Tensor


class ScoresWork(NamedTuple):
    """Tiles of a CTA: first, first + step, ... below end. The n-th tile is use n of the CTA's rings."""

    first: Int32
    end: Int32
    step: Int32


def place_vector(config: Sm100ScoresConfig, base: cute.Pointer, row, vector) -> Int32:
    """Address of 16 bytes of a row after the swizzle."""
    vectors, rows = config.row_vectors, SPAN_BYTES // config.fmt.data_bytes
    return base.toint() + row * config.fmt.data_bytes + (vector ^ (row // rows % vectors)) * VECTOR_BYTES


def place_scales(base: cute.Pointer, row) -> Int32:
    """Address of a row's four scales in their atom."""
    return base.toint() + row % WARP_THREADS * VECTOR_BYTES + row // WARP_THREADS * WORD_BYTES


def store(address, words: list) -> None:
    """Store words to shared memory."""
    size = len(words) * WORD_BYTES
    pointer = cute.make_ptr(Uint32, Int32(address), cute.AddressSpace.smem, assumed_align=size)
    vector = cute.make_rmem_tensor(len(words), Uint32)
    for i in range(len(words)):
        vector[i] = words[i]
    cute.autovec_copy(vector, cute.make_tensor(pointer, cute.make_layout(len(words))))


@cute.jit
def stage_query(config: cutlass.Constexpr, shared, query, weights, thread):
    """Copy the query's heads, scales and weights to shared memory, with zeros past the heads; executed by all threads.

    query: (WORD). weights: (HEAD).
    """
    words, vectors = VECTOR_BYTES // WORD_BYTES, config.row_vectors
    row_words = config.fmt.data_bytes // WORD_BYTES
    for at in cutlass.range(thread, config.columns * vectors, config.threads, unroll=1):
        head, vector = at // vectors, at % vectors
        loaded = cute.make_rmem_tensor(words, Uint32)
        loaded.fill(0)
        if head < config.heads:
            for i in cutlass.range_constexpr(words):
                loaded[i] = query[head * row_words + vector * words + i]
        store(place_vector(config, shared.query, head, vector), [loaded[i] for i in range(words)])
    if thread < config.tile_keys:
        scales, weight = Uint32(0), Float32(0.0)
        if thread < config.heads:
            scales, weight = Uint32(query[config.heads * row_words + thread]), Float32(weights[thread])
        if cutlass.const_expr(config.scaled):
            store(place_scales(shared.query_scales, thread), [scales])
        else:
            weight = weight * scales.bitcast(Float32)
        if thread < config.columns:
            shared.weights[thread] = weight


def copy(target, source, size: int, present) -> None:
    """Copy ``size`` bytes to shared memory, zeros if not present. A later arrival of the thread waits for the copy."""
    cached = "cg" if size == VECTOR_BYTES else "ca"  # .cg bypasses L1 but copies only 16 bytes
    wanted = Int32(cutlass.select_(Boolean(present), Int32(size), Int32(0)))
    cute.arch.inline_ptx(
        f"cp.async.{cached}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
        read_only_args=[Int32(target), source, wanted],
    )


@cute.jit
def load_tiles(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, entries, work, warp):
    """A load warp: its 32 keys of every tile, with zeros for missing keys.

    A lane looks up one key, a tile ahead, and copies 16 bytes of each of several keys. Consumes empty. Produces full:
    each thread's arrival happens by itself when its copies are done.
    """
    lane, vectors = cute.arch.lane_idx(), config.row_vectors
    at_once = WARP_THREADS // vectors  # rows copied at a time
    own = warp * WARP_THREADS + lane
    page = find_page(config, entries, work.first * config.tile_keys + own)
    use = Int32(0)
    for tile in cutlass.range(work.first, work.end, work.step, unroll=1):
        row, scales = locate(config, entries, tile * config.tile_keys + own, page)
        page = find_page(config, entries, (tile + work.step) * config.tile_keys + own)
        channels["empty"].wait_previous(use)
        stage = use % config.stages
        for i in cutlass.range_constexpr(WARP_THREADS // at_once):
            source = i * at_once + lane // vectors  # the lane that looked up the key
            address = shuffle_address(row, source)
            at = address + Int64(lane % vectors * VECTOR_BYTES)
            base = shared.keys + stage * config.key_bytes
            target = place_vector(config, base, warp * WARP_THREADS + source, lane % vectors)
            copy(target, at, VECTOR_BYTES, address != 0)
        if cutlass.const_expr(config.scaled):
            target = place_scales(shared.key_scales + stage * ATOM_BYTES, own)
            copy(target, scales, WORD_BYTES, row != 0)
        cute.arch.cp_async_mbarrier_arrive_noinc(channels["full"].barrier(use))
        use += 1
    drain((channels["empty"],), use)
