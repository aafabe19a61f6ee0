"""Scores of index keys on sm_90a: S = K Q^T by wgmma on e4m3, then a weighted sum of ReLUs over the heads.

A warpgroup takes 64 keys at a time as rows of A in registers, either loaded from memory or from what its lanes have
copied to shared memory (``ring``). The queries lie in shared memory, in the order in which lanes hold the keys' numbers
(``keys``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS, WORD_BYTES
from warpspec.latent.indexer.device.scores_host import WarpgroupScorer
from warpspec.latent.indexer.scores_config import BLOCKS, TILE_KEYS, WARP_ROWS, ScoresConfig
from warpspec.latent.indexer.sm90.keys import (
    ROW_DISTANCE,
    TABLE_ENTRIES,
    THREAD_ROWS,
    WORDS,
    LanePages,
    block_of,
    fill_table,
    find_pages,
    load_tile,
    loaded_words,
    pages_of_tile,
    store_row,
    store_tile,
)
from warpspec.latent.indexer.sm90.ring import opaque

E4M3 = cutlass.Float8E4M3FN
ROW_BYTES = 128  # bytes of a query row in shared memory: one span of the swizzle
STEPS = 4  # steps of a product along K, of 32 numbers each


@dataclass(frozen=True)
class Scorer(WarpgroupScorer):
    """One prepared query, as a thread has it; see ``scores_host.score_split``.

    mma: the product of 64 keys and all heads. b: the query's descriptors (MMA, MMA_N, MMA_K). table: the table of
    ``keys.fill_table``; ones: its last word. weight: weights of the heads in the thread's columns.
    """

    config: ScoresConfig
    mma: cute.TiledMma
    b: cute.Tensor
    table: cute.Tensor
    ones: Uint32
    weight: list
    thread: Int32

    def score(self, entries, first, end, step, sink) -> None:
        loads = begin_loads(self.config, self.thread, entries, first, step)
        score_tiles(self, entries, first, end, step, sink, loads)


def scorer(config: ScoresConfig, smem, asked, thread) -> Scorer:
    """Prepare a query, by all threads; ends with a barrier.

    smem: the kernel's allocator. asked: from ``load_asked``.
    """
    base = Int32(smem.allocate(config.heads * ROW_BYTES, 1024).toint())
    factors = smem.allocate_tensor(Float32, cute.make_layout(config.heads), byte_alignment=16)
    table, ones = allocate_table(config, smem, thread)
    prepare(config, asked, base, table, ones, factors, thread)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    return view_query(config, base, factors, table, ones, thread)


def allocate_table(config: ScoresConfig, smem, thread) -> tuple:
    """(the filled table, its last word). FP8 needs none."""
    table = smem.allocate_tensor(Uint32, cute.make_layout((2, TABLE_ENTRIES)), byte_alignment=8)
    if config.format == "fp8":
        return table, Uint32(0)
    fill_table(table, thread)
    cute.arch.sync_threads()
    return table, table[0, TABLE_ENTRIES - 1]


def view_query(config: ScoresConfig, base: Int32, factors, table, ones, thread) -> Scorer:
    """The scorer of a query that has been prepared at ``base``."""
    layout = hopper.make_smem_layout_b(
        LayoutEnum.ROW_MAJOR, (TILE_KEYS, config.heads, config.fmt.dim), E4M3, 1
    )
    pointer = cute.make_ptr(Uint8, base, cute.AddressSpace.smem, assumed_align=1024)
    q = cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=E4M3), layout.outer)
    mma = hopper.make_trivial_tiled_mma(
        E4M3,
        E4M3,
        OperandMajorMode.K,
        OperandMajorMode.K,
        Float32,
        (1, 1, 1),
        (TILE_KEYS, config.heads),
        warpgroup.OperandSource.RMEM,
    )
    b = mma.make_fragment_B(mma.get_slice(thread % WARPGROUP_THREADS).partition_B(q))[None, None, None, 0]
    member = thread % BLOCKS
    columns = [8 * (i // 2) + i % 2 for i in range(config.heads // 4)]  # columns of the quad's first lane
    return Scorer(config, mma, b, table, ones, [factors[column + 2 * member] for column in columns], thread)


def lane_of(thread) -> tuple:
    """(lane, its place among the four lanes of a row, row of its first key in a tile) of a thread."""
    own = thread % WARPGROUP_THREADS
    lane = own % WARP_THREADS
    return lane, lane % BLOCKS, own // WARP_THREADS * WARP_ROWS + lane // BLOCKS


class QueryLoads(NamedTuple):
    """Loads in flight, in registers.

    words: (WORD, ROW, TILE). here: (ROW, TILE). pages: (PAGE, TILE) of the next tiles. kept: state of ``LanePages``, or
    None.
    """

    words: cute.Tensor
    here: cute.Tensor
    pages: cute.Tensor
    kept: tuple | None


def pages_by_lane(config, thread, entries, first, step) -> LanePages:
    lane, _, row = lane_of(thread)
    return LanePages(config, entries, Int32(first), Int32(step), TILE_KEYS, row - lane // BLOCKS, lane)


@cute.jit
def begin_loads(config: cutlass.Constexpr, thread, entries, first, step) -> QueryLoads:
    """Issue the loads of the first ``depth`` tiles."""
    _, member, row = lane_of(thread)
    words = cute.make_rmem_tensor((loaded_words(config), THREAD_ROWS, config.depth), Uint32)
    here = cute.make_rmem_tensor((THREAD_ROWS, config.depth), Int32)
    pages = cute.make_rmem_tensor((pages_of_tile(config), config.depth), Int32)
    lap = config.depth * step * TILE_KEYS  # keys until the same registers are loaded again
    by_lane = pages_by_lane(config, thread, entries, first, step)
    kept = None
    if cutlass.const_expr(config.pages_by_lane):
        kept = by_lane.begin()
    for i in cutlass.range_constexpr(config.depth):
        if cutlass.const_expr(config.pages_by_lane):
            pages[0, i], kept = by_lane.of(Int32(i), kept)
        else:
            find_pages(config, entries, (first + i * step) * TILE_KEYS + row, pages[None, i])
    for i in cutlass.range_constexpr(config.depth):
        key = (first + i * step) * TILE_KEYS + row
        load_tile(config, entries, key, member, pages[None, i], words[None, None, i], here[None, i])
        if cutlass.const_expr(not config.pages_by_lane):
            find_pages(config, entries, key + lap, pages[None, i])
    return QueryLoads(words, here, pages, kept)


@cute.jit
def score_tiles(query, entries, first, end, step, sink, loads):
    """One warpgroup scores tiles first, first + step, ... below ``end`` into ``sink``, with ``depth`` tiles in flight.

    query: ``Scorer``. loads: from ``begin_loads``.
    """
    config, mma = query.config, query.mma
    _, member, row = lane_of(query.thread)
    a = cute.make_rmem_tensor(mma.partition_shape_A((TILE_KEYS, config.fmt.dim)), E4M3)
    scores = cute.make_rmem_tensor(mma.partition_shape_C((TILE_KEYS, config.heads)), Float32)
    there = cute.make_rmem_tensor(THREAD_ROWS, Int32)
    lap = config.depth * step * TILE_KEYS  # keys until the same registers are loaded again
    by_lane, number = pages_by_lane(config, query.thread, entries, first, step), Int32(config.depth)
    words, here, pages, kept = loads
    for tile in cutlass.range(first, end, step * config.depth, unroll=1):
        for i in cutlass.range_constexpr(config.depth):
            key = (tile + i * step) * TILE_KEYS + row
            row_factors = convert(config, words[None, None, i], query.table, query.ones, member, a)
            for r in cutlass.range_constexpr(THREAD_ROWS):
                there[r] = here[r, i]
            if cutlass.const_expr(config.pages_by_lane):
                pages[0, i], kept = by_lane.of(number, kept)
                number += 1
            load_tile(config, entries, key + lap, member, pages[None, i], words[None, None, i], here[None, i])
            if cutlass.const_expr(not config.pages_by_lane):
                find_pages(config, entries, key + 2 * lap, pages[None, i])
            multiply(query, a, scores)
            store_tile(scores, query.weight, row_factors, there, sink, key, member)


@cute.jit
def score_copied(query, ring: cutlass.Constexpr, state, end, sink):
    """``score_tiles`` for tiles that lanes copy to shared memory. state: from ``Ring.begin``."""
    config, mma = query.config, query.mma
    _, member, row = lane_of(opaque(query.thread))
    row += member % THREAD_ROWS * ROW_DISTANCE
    a = cute.make_rmem_tensor(mma.partition_shape_A((TILE_KEYS, config.fmt.dim)), E4M3)
    scores = cute.make_rmem_tensor(mma.partition_shape_C((TILE_KEYS, config.heads)), Float32)
    words = cute.make_rmem_tensor((loaded_words(config), THREAD_ROWS), Uint32)
    tile = Int32(ring.first)
    while tile < end:
        key = tile * TILE_KEYS + row
        there = ring.read(state, words) & Boolean(key < ring.entries.length)
        factors = convert(config, words, query.table, query.ones, member, a)
        state = ring.follow(*state)
        multiply(query, a, scores)
        store_row(scores, query.weight, factors, there, sink, key, member)
        tile += ring.step


def multiply(query: Scorer, a, scores) -> None:
    """scores = a times the query's heads; waits for the product."""
    warpgroup.fence()
    for k in range(STEPS):
        query.mma.set(warpgroup.Field.ACCUMULATE, k > 0)
        cute.gemm(query.mma, scores, a[None, None, k], query.b[None, None, k], scores)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


def in_registers(row: cute.Tensor) -> cute.Tensor:
    """The row with its address kept in registers."""
    address = row.iterator.toint()
    low, high = (
        Uint32(cute.arch.shuffle_sync_bfly(Uint32(word), 0)) for word in (address & 0xFFFFFFFF, address >> 32)
    )
    address = (Int64(high) << Int64(32)) | Int64(low)
    return cute.make_tensor(
        cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4), row.layout
    )


@cute.jit
def prepare(config: cutlass.Constexpr, asked, base, table, ones, factors, thread):
    """Convert the query's heads to e4m3 in the order of the keys' numbers; factors (H): weights times the heads'
    scales.

    asked: from ``load_asked``.
    """
    head, block = thread // BLOCKS, thread % BLOCKS
    words, weight = asked
    if head < config.heads:
        out, factor = block_of(config, words, table, ones, block)
        for i in cutlass.range_constexpr(WORDS):  # i: half of a step, in the order of steps
            chunk = Int32(i) ^ (head % 8)
            at = base + head * ROW_BYTES + chunk * VECTOR_BYTES + block * WORD_BYTES
            pointer = cute.make_ptr(Uint32, Int32(at), cute.AddressSpace.smem, assumed_align=WORD_BYTES)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = out[i]
        if block == 0:
            factors[head] = weight[0] * factor


@cute.jit
def convert(config: cutlass.Constexpr, words: cute.Tensor, table, ones, member, a: cute.Tensor) -> tuple:
    """Convert the thread's two rows to wgmma's A, a (MMA, MMA_M, MMA_K); returns the rows' factors."""
    target = cute.recast_tensor(cute.make_tensor(a.iterator, cute.make_layout(cute.size(a))), Uint32)
    factors = []
    for r in cutlass.range_constexpr(THREAD_ROWS):
        out, factor = block_of(config, words[None, r], table, ones, member)
        for i in cutlass.range_constexpr(WORDS):
            step, half = i // 2, i % 2
            target[step * 4 + half * THREAD_ROWS + r] = out[i]
        factors.append(factor)
    return tuple(factors)
