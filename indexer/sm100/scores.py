"""Scores of FP4 index keys on sm_100a: S = K Q^T by tcgen05 on FP4 as it lies, then a weighted sum of ReLUs.

A tile is 128 keys, rows of the product; the heads are its columns. Both operands are packed e2m1 with a ue8m0 scale for
32 numbers (kind mxf4), two products of K 64. Loaders bring rows through registers, as pages are anywhere; scales go to
tensor memory by tcgen05.cp. The order of the sums over heads is that of the other scores kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Boolean, Float4E2M1FN, Float8E8M0FNU, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from warpspec.common import tmem
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.common.launch import Kernel
from warpspec.common.pipeline import init_barriers
from warpspec.common.words import shuffle_address
from warpspec.indexer.device.keys import WORD_BYTES, divided, entries_of, load_global, scores_arguments
from warpspec.indexer.device.scores_host import ScoresHost
from warpspec.indexer.sm100.config import Mxf4Config

BLOCK = 32  # numbers that share a scale
K_STEPS = 2  # products of a tile
STEP_SCALES = 2  # of a row, of a product
ROW_VECTORS = 4  # of 16 bytes, of a row: lanes that load it together
ROWS_AT_ONCE = WARP_THREADS // ROW_VECTORS
ROW_WORDS = 16
ATOM_BYTES = 512  # the scales of 128 rows
READ_COLUMNS = 16  # of an accumulator, at a time
MEMBERS, PAIR = 4, 2  # partial sums over heads: of two of every eight heads each


class Shared(NamedTuple):
    """Where the regions of shared memory begin: tiles of keys, the query, the scales of both."""

    keys: cute.Pointer
    query: cute.Pointer
    key_scales: cute.Pointer
    query_scales: cute.Pointer


class Work(NamedTuple):
    """Tiles of a CTA: first, first + step, ... below end."""

    first: Int32
    end: Int32
    step: Int32


class Mxf4Scores(ScoresHost):
    """The kernel of one ``Mxf4Config``."""

    @cute.kernel
    def kernel(self, queries, weights, pool, page_table, requests, lengths, logits, parts):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        part, token, _ = cute.arch.block_idx()

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, sum(b.stages for b in config.barriers)]
            tmem_address: Int32
            keys: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, config.stages * config.key_bytes], 1024
            ]
            query: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, config.query_bytes], 1024]
            key_scales: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, config.stages * ATOM_BYTES], 128
            ]
            query_scales: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, ATOM_BYTES], 128]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        allocated = tmem.allocation(config.tmem_columns)
        if warp == 0:
            cute.arch.alloc_tmem(allocated, storage.tmem_address)
            cute.arch.relinquish_tmem_alloc_permit()
        shared = Shared(
            storage.keys.data_ptr(),
            storage.query.data_ptr(),
            storage.key_scales.data_ptr(),
            storage.query_scales.data_ptr(),
        )
        stage_query(config, shared, queries[token, None], thread)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        columns = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address)
        entries = entries_of(config, pool, page_table, requests, lengths, token)
        work = Work(part, cute.ceil_div(logits.shape[1], config.tile_keys), parts)
        if warp == config.mma_warp:
            multiply_tiles(config, channels, shared, columns, work)
        elif warp >= config.first_loader:
            load_tiles(config, channels, shared, entries, work, warp - config.first_loader)
        else:
            finish_tiles(
                config, channels, columns, entries, weights[token, None], logits[token, None], work, thread
            )
            cute.arch.barrier(barrier_id=1, number_of_threads=config.tile_keys)
            if warp == 0:
                cute.arch.dealloc_tmem(columns, allocated)


def place_vector(base: cute.Pointer, row, vector) -> Int32:
    """Address of 16 bytes of a row of 64, where the 64-byte swizzle puts them."""
    return (
        base.toint() + row * (ROW_VECTORS * VECTOR_BYTES) + (vector ^ (row // 2 % ROW_VECTORS)) * VECTOR_BYTES
    )


def place_scales(base: cute.Pointer, row) -> Int32:
    """Address of a row's four scales in their atom."""
    return base.toint() + row % WARP_THREADS * VECTOR_BYTES + row // WARP_THREADS * WORD_BYTES


def store(address, words: list) -> None:
    """Words to shared memory."""
    size = len(words) * WORD_BYTES
    pointer = cute.make_ptr(Uint32, Int32(address), cute.AddressSpace.smem, assumed_align=size)
    vector = cute.make_rmem_tensor(len(words), Uint32)
    for i in range(len(words)):
        vector[i] = words[i]
    cute.autovec_copy(vector, cute.make_tensor(pointer, cute.make_layout(len(words))))


@cute.jit
def stage_query(config: cutlass.Constexpr, shared, query, thread):
    """The query's heads and their scales to shared memory; rows of scales past the heads are zeros. query: (WORD)."""
    head, vector = thread // ROW_VECTORS, thread % ROW_VECTORS
    if head < config.heads:
        words = [query[head * ROW_WORDS + vector * 4 + i] for i in range(4)]
        store(place_vector(shared.query, head, vector), [Uint32(word) for word in words])
    if thread < config.tile_keys:
        scales = Uint32(0)
        if thread < config.heads:
            scales = Uint32(query[config.heads * ROW_WORDS + thread])
        store(place_scales(shared.query_scales, thread), [scales])


@cute.jit
def load_tiles(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, entries, work, warp):
    """A loader: its 32 keys of every tile; keys that are not there are zeros. A lane looks up one key, and loads 16
    bytes of every eighth. Consumes empty; produces full, one arrival a warp."""
    fmt, lane = config.fmt, cute.arch.lane_idx()
    use = Int32(0)
    for tile in cutlass.range(work.first, work.end, work.step, unroll=1):
        index = tile * config.tile_keys + warp * WARP_THREADS + lane
        row, scales = locate(config, entries, index)
        scale_word = load_global(scales, Int32(row != 0), 1)[0]
        vectors = []
        for i in cutlass.range_constexpr(WARP_THREADS // ROWS_AT_ONCE):
            address = shuffle_address(row, i * ROWS_AT_ONCE + lane // ROW_VECTORS)
            at = address + Int64(lane % ROW_VECTORS * VECTOR_BYTES)
            vectors.append(load_global(at, Int32(address != 0), VECTOR_BYTES // WORD_BYTES))
        channels["empty"].wait_previous(use)
        stage = use % config.stages
        for i in cutlass.range_constexpr(WARP_THREADS // ROWS_AT_ONCE):
            key = warp * WARP_THREADS + i * ROWS_AT_ONCE + lane // ROW_VECTORS
            store(place_vector(shared.keys + stage * config.key_bytes, key, lane % ROW_VECTORS), vectors[i])
        store(place_scales(shared.key_scales + stage * ATOM_BYTES, warp * WARP_THREADS + lane), [scale_word])
        cute.arch.fence_view_async_shared()
        channels["full"].arrive_warp(use)
        use += 1
    for last in cutlass.range(cutlass.max(use - config.stages, 0), use, unroll=1):
        channels["empty"].wait(last)
    assert fmt.data_bytes == ROW_VECTORS * VECTOR_BYTES and fmt.block == BLOCK


@cute.jit
def locate(config: cutlass.Constexpr, entries, index) -> tuple:
    """(address of the index-th entry, of its scales); both 0 where there is none."""
    fmt, pool = config.fmt, entries.pool
    row, scales = Int64(0), Int64(0)
    if index < entries.length:
        number, within = divided(index, config.page_size)
        page = Int32(entries.pages[number])
        if (page >= 0) & (page < pool.shape[0]):
            start = pool.iterator.toint() + Int64(page) * Int64(pool.stride[0] * WORD_BYTES)
            row = start + Int64(within * fmt.data_bytes)
            scales = start + Int64(config.page_size * fmt.data_bytes + within * fmt.scale_bytes)
    return row, scales


def make_mma(config: Mxf4Config) -> cute.TiledMma:
    """D [keys, heads] = A [keys, K] B [heads, K]^T, both from shared memory, scales in tensor memory."""
    major, dtype = OperandMajorMode.K, Float4E2M1FN
    shape = (config.tile_keys, config.heads)
    return blackwell.make_blockscaled_trivial_tiled_mma(
        dtype, dtype, major, major, Float8E8M0FNU, BLOCK, tcgen05.CtaGroup.ONE, shape
    )


@cute.jit
def multiply_tiles(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, columns, work):
    """The MMA warp. Consumes full, sum_empty. Produces, each by a commit: empty, sum_full. Copies of scales and
    products run in order, so one place for the scales is enough."""
    mma, dtype = make_mma(config), Float4E2M1FN
    mine = mma.get_slice(0)
    tiler = (config.tile_keys, config.heads, config.fmt.dim)
    layouts = (
        blackwell.make_smem_layout_a(mma, tiler, dtype, config.stages),
        blackwell.make_smem_layout_b(mma, tiler, dtype, 1),
    )
    a, b = (
        cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=dtype), layout.outer)
        for base, layout in zip((shared.keys.align(1024), shared.query.align(1024)), layouts, strict=True)
    )
    a, b = mine.make_fragment_A(a), mine.make_fragment_B(b)  # (MMA, MMA_MN, MMA_K, STAGE)
    layout = mine.make_fragment_C(mine.partition_shape_C(tiler[:2])).layout
    d = cute.make_tensor(
        columns, cute.append(layout, cute.make_layout(config.accumulators, stride=config.heads))
    )
    key_scales, query_scales = columns + config.tmem_key_scales, columns + config.tmem_query_scales
    with cute.arch.elect_one():
        tmem.copy_scale_atom(shared.query_scales, query_scales)
    use = Int32(0)
    for _ in cutlass.range(work.first, work.end, work.step, unroll=1):
        channels["sum_empty"].wait_previous(use)
        channels["full"].wait(use)
        tmem.fence_after_wait()
        stage = use % config.stages
        with cute.arch.elect_one():
            tmem.copy_scale_atom(shared.key_scales + stage * ATOM_BYTES, key_scales)
        total = d[None, None, None, use % config.accumulators]
        for k in cutlass.range_constexpr(K_STEPS):
            scales = [
                cute.recast_ptr(pointer, dtype=Float8E8M0FNU) + k * STEP_SCALES
                for pointer in (key_scales, query_scales)
            ]
            mma.set(tcgen05.Field.ACCUMULATE, k > 0)
            mma.set(tcgen05.Field.SFA, scales[0])
            mma.set(tcgen05.Field.SFB, scales[1])
            cute.gemm(mma, total, a[None, None, k, stage], b[None, None, k, 0], total)
        channels["empty"].commit_mma(use)
        channels["sum_full"].commit_mma(use)
        use += 1


@cute.jit
def finish_tiles(
    config: cutlass.Constexpr, channels: cutlass.Constexpr, columns, entries, weights, row, work, thread
):
    """An epilogue thread: its key of every tile. weights: (H). row: of logits (N). Consumes sum_full; produces
    sum_empty."""
    weight = [Float32(weights[head]) for head in range(config.heads)]
    use = Int32(0)
    for tile in cutlass.range(work.first, work.end, work.step, unroll=1):
        index = tile * config.tile_keys + thread
        address, _ = locate(config, entries, index)
        channels["sum_full"].wait(use)
        tmem.fence_after_wait()
        plain, magnitudes = [Float32(0.0)] * MEMBERS, [Float32(0.0)] * MEMBERS
        for first in cutlass.range_constexpr(0, config.heads, READ_COLUMNS):
            read = cute.make_rmem_tensor(READ_COLUMNS, Float32)
            tmem.load_row(columns + (use % config.accumulators * config.heads + first), read, thread)
            tmem.wait_loads()
            for i in cutlass.range_constexpr(READ_COLUMNS):
                member = (first + i) // PAIR % MEMBERS
                plain[member] = plain[member] + weight[first + i] * read[i]
                magnitudes[member] = magnitudes[member] + weight[first + i] * cute.math.absf(read[i])
        tmem.fence_before_arrive()
        channels["sum_empty"].arrive(use)
        sums = [0.5 * (one + other) for one, other in zip(plain, magnitudes, strict=True)]
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        if index < row.shape[0]:
            row[index] = Float32(cutlass.select_(Boolean(address != 0), total, -Float32.inf))
        use += 1


def host_and_arguments(config: Mxf4Config) -> tuple:
    """The host function and its arguments but the stream."""
    return (Mxf4Scores(config), *scores_arguments(config))


MXF4_SCORES = Kernel("indexer.sm100.scores", host_and_arguments)  # by Mxf4Config
