"""Scores of index keys on sm_90a: S = K Q^T by wgmma on e4m3, then a weighted sum of ReLUs over the heads.

A warpgroup takes 64 keys at a time as rows of A, straight from memory into registers. The queries lie in shared memory
in the order in which lanes have the keys' numbers (``device.keys``).
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
from warpspec.indexer.device.keys import (
    THREAD_ROWS,
    WARP_ROWS,
    WORD_BYTES,
    WORDS,
    LanePages,
    block_of,
    fill_table,
    find_pages,
    load_query,
    load_tile,
    loaded_words,
    pages_of_tile,
    scores_arguments,
    store_tile,
)
from warpspec.indexer.device.scores_host import ScoresHost
from warpspec.indexer.scores_config import BLOCKS, SCALE_STEPS, TILE_KEYS, ScoresConfig

E4M3 = cutlass.Float8E4M3FN
ROW_BYTES = 128  # of a query in shared memory: one span of the swizzle
STEPS = 4  # of 32 numbers, of a product


@dataclass(frozen=True)
class Scorer:
    """One query, prepared, as a thread has it. mma: of 64 keys and all heads. b: the query's descriptors (MMA, MMA_N,
    MMA_K). table: ``keys.fill_table``. weight: of the heads in the thread's columns. tile_keys: of a group of threads;
    groups: of them in a CTA; group: the thread's."""

    config: ScoresConfig
    mma: cute.TiledMma
    b: cute.Tensor
    table: cute.Tensor
    weight: list
    thread: Int32

    tile_keys = TILE_KEYS

    @property
    def groups(self) -> int:
        return self.config.warpgroups

    @property
    def group(self) -> Int32:
        return self.thread // WARPGROUP_THREADS


def scorer(config: ScoresConfig, smem, query, weights, thread) -> Scorer:
    """Prepare a query, by all threads; ends with a barrier. smem: the kernel's allocator. query, weights: its rows."""
    layout = hopper.make_smem_layout_b(
        LayoutEnum.ROW_MAJOR, (TILE_KEYS, config.heads, config.fmt.dim), E4M3, 1
    )
    base = smem.allocate(config.heads * ROW_BYTES, 1024)
    q = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=E4M3), layout.outer)
    table = smem.allocate_tensor(Uint32, cute.make_layout((2, SCALE_STEPS + 1)), byte_alignment=8)
    factors = smem.allocate_tensor(Float32, cute.make_layout(config.heads), byte_alignment=16)
    fill_table(table, thread)
    cute.arch.sync_threads()
    prepare(config, query, weights, base.toint(), table, factors, thread)
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
    return Scorer(config, mma, b, table, [factors[column + 2 * member] for column in columns], thread)


@cute.jit
def score(query, entries, first, end, step, sink):
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
    warp_row = own // WARP_THREADS * WARP_ROWS
    looked_up = LanePages(config, entries, Int32(first), Int32(step), TILE_KEYS, warp_row, lane)
    kept = looked_up.begin()
    lap = config.depth * step * TILE_KEYS  # keys until the same registers' next tile
    for i in cutlass.range_constexpr(config.depth):
        key = (first + i * step) * TILE_KEYS + row
        pages, kept = pages_at(looked_up, Int32(i), key, kept)
        load_tile(config, entries, key, member, pages, words[None, None, i], here[None, i])
    number = Int32(config.depth)
    for tile in cutlass.range(first, end, step * config.depth, unroll=1):
        for i in cutlass.range_constexpr(config.depth):
            key = (tile + i * step) * TILE_KEYS + row
            row_factors = convert(config, words[None, None, i], query.table, member, a)
            for r in cutlass.range_constexpr(THREAD_ROWS):
                there[r] = here[r, i]
            pages, kept = pages_at(looked_up, number, key + lap, kept)
            load_tile(config, entries, key + lap, member, pages, words[None, None, i], here[None, i])
            number += 1
            warpgroup.fence()
            for k in cutlass.range_constexpr(STEPS):
                mma.set(warpgroup.Field.ACCUMULATE, k > 0)
                cute.gemm(mma, scores, a[None, None, k], query.b[None, None, k], scores)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            store_tile(config, scores, query.weight, row_factors, there, sink, key, member)


@cute.jit
def pages_at(looked_up, number, key, kept) -> tuple:
    """(pages of the thread's keys of the number-th tile, what is kept)."""
    pages = cute.make_rmem_tensor(pages_of_tile(looked_up.config), Int32)
    if cutlass.const_expr(pages_of_tile(looked_up.config) == 1):
        page, kept = looked_up.of(number, kept)
        pages[0] = page
    else:
        find_pages(looked_up.config, looked_up.entries, key, pages)
    return pages, kept


class Scores(ScoresHost):
    """Tensor cores by wgmma."""

    scorer, score = staticmethod(scorer), staticmethod(score)


@cute.jit
def prepare(config: cutlass.Constexpr, query, weights, base, table, factors, thread):
    """The query's heads in e4m3, in the order of the keys' numbers; factors (H): weights times the heads' scales."""
    head, block = thread // BLOCKS, thread % BLOCKS
    if head < config.heads:
        words = cute.make_rmem_tensor(loaded_words(config), Uint32)
        load_query(config, query, head, block, words)
        out, factor = block_of(config, words, table, block)
        for i in cutlass.range_constexpr(WORDS):  # i: half of a step, in the order of steps
            chunk = Int32(i) ^ (head % 8)
            at = base + head * ROW_BYTES + chunk * VECTOR_BYTES + block * WORD_BYTES
            pointer = cute.make_ptr(Uint32, Int32(at), cute.AddressSpace.smem, assumed_align=WORD_BYTES)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = out[i]
        if block == 0:
            factors[head] = Float32(weights[head]) * factor


@cute.jit
def convert(config: cutlass.Constexpr, words: cute.Tensor, table, member, a: cute.Tensor) -> tuple:
    """The thread's two rows as wgmma's A, a (MMA, MMA_M, MMA_K); returns the rows' factors."""
    target = cute.recast_tensor(cute.make_tensor(a.iterator, cute.make_layout(cute.size(a))), Uint32)
    factors = []
    for r in cutlass.range_constexpr(THREAD_ROWS):
        out, factor = block_of(config, words[None, r], table, member)
        for i in cutlass.range_constexpr(WORDS):
            step, half = i // 2, i % 2
            target[step * 4 + half * THREAD_ROWS + r] = out[i]
        factors.append(factor)
    return tuple(factors)


def host_and_arguments(config: ScoresConfig) -> tuple:
    """The host function and its arguments but the stream."""
    return (Scores(config), *scores_arguments(config))


SCORES = Kernel("indexer.sm90.scores", host_and_arguments)  # by ScoresConfig
