"""Scores of index keys on sm_90a: S = K Q^T by wgmma on e4m3, then a weighted sum of ReLUs over the heads.

A warpgroup takes 64 keys at a time as rows of A, straight from memory into registers. The queries lie in shared memory
in the order in which lanes have the keys' numbers (``keys``).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS
from warpspec.common.launch import Kernel
from warpspec.indexer.device.entries import WORD_BYTES, entries_of
from warpspec.indexer.device.scores_host import ScoresHost, WarpgroupScorer, score_part, scores_arguments
from warpspec.indexer.scores_config import BLOCKS, TILE_KEYS, WARP_ROWS, ScoresConfig
from warpspec.indexer.sm90.keys import (
    TABLE_ENTRIES,
    THREAD_ROWS,
    WORDS,
    LanePages,
    block_of,
    fill_table,
    find_pages,
    load_query,
    load_tile,
    loaded_words,
    pages_of_tile,
    store_tile,
)

E4M3 = cutlass.Float8E4M3FN
ROW_BYTES = 128  # of a query in shared memory: one span of the swizzle
STEPS = 4  # of 32 numbers, of a product


@dataclass(frozen=True)
class Scorer(WarpgroupScorer):
    """One query, prepared, as a thread has it; see ``scores_host.score_part``. mma: of 64 keys and all heads. b: the
    query's descriptors (MMA, MMA_N, MMA_K). table: ``keys.fill_table``; ones: its last. weight: of the heads in the
    thread's columns."""

    config: ScoresConfig
    mma: cute.TiledMma
    b: cute.Tensor
    table: cute.Tensor
    ones: Uint32
    weight: list
    thread: Int32

    def score(self, entries, first, end, step, sink) -> None:
        score_tiles(self, entries, first, end, step, sink)


def scorer(config: ScoresConfig, smem, query, weights, thread) -> Scorer:
    """Prepare a query, by all threads; ends with a barrier. smem: the kernel's allocator. query, weights: its rows."""
    layout = hopper.make_smem_layout_b(
        LayoutEnum.ROW_MAJOR, (TILE_KEYS, config.heads, config.fmt.dim), E4M3, 1
    )
    base = smem.allocate(config.heads * ROW_BYTES, 1024)
    q = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=E4M3), layout.outer)
    table = smem.allocate_tensor(Uint32, cute.make_layout((2, TABLE_ENTRIES)), byte_alignment=8)
    factors = smem.allocate_tensor(Float32, cute.make_layout(config.heads), byte_alignment=16)
    fill_table(table, thread)
    cute.arch.sync_threads()
    ones = table[0, TABLE_ENTRIES - 1]
    prepare(config, query, weights, base.toint(), table, ones, factors, thread)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()

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
    columns = [8 * (i // 2) + i % 2 for i in range(config.heads // 4)]  # of the quad's first lane
    return Scorer(config, mma, b, table, ones, [factors[column + 2 * member] for column in columns], thread)


@cute.jit
def score_tiles(query, entries, first, end, step, sink):
    """Scores of tiles first, first + step, ... below ``end``, by one warpgroup, to ``sink``: ``depth`` tiles' loads
    under way. query: ``Scorer``."""
    config, mma = query.config, query.mma
    own = query.thread % WARPGROUP_THREADS
    lane = own % WARP_THREADS
    member = lane % BLOCKS
    row = own // WARP_THREADS * WARP_ROWS + lane // BLOCKS
    a = cute.make_rmem_tensor(mma.partition_shape_A((TILE_KEYS, config.fmt.dim)), E4M3)
    scores = cute.make_rmem_tensor(mma.partition_shape_C((TILE_KEYS, config.heads)), Float32)
    words = cute.make_rmem_tensor((loaded_words(config), THREAD_ROWS, config.depth), Uint32)
    here = cute.make_rmem_tensor((THREAD_ROWS, config.depth), Int32)
    there = cute.make_rmem_tensor(THREAD_ROWS, Int32)
    pages = cute.make_rmem_tensor((pages_of_tile(config), config.depth), Int32)
    lap = config.depth * step * TILE_KEYS  # keys until the same registers' next tile
    by_lane = LanePages(config, entries, Int32(first), Int32(step), TILE_KEYS, row - lane // BLOCKS, lane)
    kept, number = None, Int32(config.depth)
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
            warpgroup.fence()
            for k in cutlass.range_constexpr(STEPS):
                mma.set(warpgroup.Field.ACCUMULATE, k > 0)
                cute.gemm(mma, scores, a[None, None, k], query.b[None, None, k], scores)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            store_tile(config, scores, query.weight, row_factors, there, sink, key, member)


class Scores(ScoresHost):
    """The kernel of one ``ScoresConfig``."""

    @cute.kernel
    def kernel(self, queries, weights, pool, page_table, requests, lengths, logits, parts):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        part, token, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        query = scorer(config, smem, queries[token, None], weights[token, None], thread)
        entries = entries_of(config, pool, page_table, requests, lengths, token)
        score_part(query, entries, logits[token, None], part, parts)


@cute.jit
def prepare(config: cutlass.Constexpr, query, weights, base, table, ones, factors, thread):
    """The query's heads in e4m3, in the order of the keys' numbers; factors (H): weights times the heads' scales."""
    head, block = thread // BLOCKS, thread % BLOCKS
    if head < config.heads:
        words = cute.make_rmem_tensor(loaded_words(config), Uint32)
        load_query(config, query, head, block, words)
        out, factor = block_of(config, words, table, ones, block)
        for i in cutlass.range_constexpr(WORDS):  # i: half of a step, in the order of steps
            chunk = Int32(i) ^ (head % 8)
            at = base + head * ROW_BYTES + chunk * VECTOR_BYTES + block * WORD_BYTES
            pointer = cute.make_ptr(Uint32, Int32(at), cute.AddressSpace.smem, assumed_align=WORD_BYTES)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = out[i]
        if block == 0:
            factors[head] = Float32(weights[head]) * factor


@cute.jit
def convert(config: cutlass.Constexpr, words: cute.Tensor, table, ones, member, a: cute.Tensor) -> tuple:
    """The thread's two rows as wgmma's A, a (MMA, MMA_M, MMA_K); returns the rows' factors."""
    target = cute.recast_tensor(cute.make_tensor(a.iterator, cute.make_layout(cute.size(a))), Uint32)
    factors = []
    for r in cutlass.range_constexpr(THREAD_ROWS):
        out, factor = block_of(config, words[None, r], table, ones, member)
        for i in cutlass.range_constexpr(WORDS):
            step, half = i // 2, i % 2
            target[step * 4 + half * THREAD_ROWS + r] = out[i]
        factors.append(factor)
    return tuple(factors)


def host_and_arguments(config: ScoresConfig) -> tuple:
    """The host function and its arguments but the stream."""
    return (Scores(config), *scores_arguments())


SCORES = Kernel("indexer.sm90.scores", host_and_arguments)  # by ScoresConfig
