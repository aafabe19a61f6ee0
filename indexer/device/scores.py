"""Scores of index keys by mma.sync on e4m3, for any architecture: each warp with the whole query in registers.

A warp takes 16 keys at a time as rows of A, straight from memory; the query's heads are columns of B, loaded and
converted once. Neither goes through shared memory. On sm_90a wgmma does the same faster (``sm90.scores``).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from warpspec.common.hardware import WARP_THREADS
from warpspec.common.launch import Kernel
from warpspec.indexer.device.keys import (
    THREAD_ROWS,
    WARP_ROWS,
    WORDS,
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
from warpspec.indexer.scores_config import BLOCKS, HEADS_STEP, SCALE_STEPS, ScoresConfig

STEPS = 4  # of 32 numbers, of a product
ACCUMULATORS = 4  # of a thread, of 8 heads


@dataclass(frozen=True)
class WarpScorer:
    """One query, prepared, as a thread has it; as ``sm90.scores.Scorer``. q (WORD, GROUP of heads): its part of the
    query in e4m3."""

    config: ScoresConfig
    q: cute.Tensor
    table: cute.Tensor
    weight: list
    thread: Int32

    tile_keys = WARP_ROWS

    @property
    def groups(self) -> int:
        return self.config.threads // WARP_THREADS

    @property
    def group(self) -> Int32:
        return self.thread // WARP_THREADS


def scorer(config: ScoresConfig, smem, query, weights, thread) -> WarpScorer:
    """Prepare a query, by all threads."""
    lane = thread % WARP_THREADS
    member, column = lane % BLOCKS, lane // BLOCKS
    table = smem.allocate_tensor(Uint32, cute.make_layout((2, SCALE_STEPS + 1)), byte_alignment=8)
    fill_table(table, thread)
    cute.arch.sync_threads()
    groups = config.heads // HEADS_STEP
    q = cute.make_rmem_tensor((WORDS, groups), Uint32)
    weight = []
    for group in range(groups):
        head = group * HEADS_STEP + column
        words = cute.make_rmem_tensor(loaded_words(config), Uint32)
        load_query(config, query, head, member, words)
        out, factor = block_of(config, words, table, member)
        for i in range(WORDS):
            q[i, group] = out[i]
        factor = Float32(weights[head]) * factor
        for i in range(2):  # of the heads in this thread's columns of the products
            weight.append(Float32(cute.arch.shuffle_sync(factor, (2 * member + i) * BLOCKS)))
    return WarpScorer(config, q, table, weight, thread)


@cute.jit
def score(query, entries, first, end, step, sink):
    """Scores of tiles first, first + step, ... below ``end``, by one warp, to ``sink``. query: ``WarpScorer``."""
    config = query.config
    lane = query.thread % WARP_THREADS
    member, column = lane % BLOCKS, lane // BLOCKS
    groups = config.heads // HEADS_STEP
    words = cute.make_rmem_tensor((loaded_words(config), THREAD_ROWS), Uint32)
    here = cute.make_rmem_tensor(THREAD_ROWS, Int32)
    there = cute.make_rmem_tensor(THREAD_ROWS, Int32)
    pages = cute.make_rmem_tensor(pages_of_tile(config), Int32)
    find_pages(config, entries, first * WARP_ROWS + column, pages)
    load_tile(config, entries, first * WARP_ROWS + column, member, pages, words, here)
    find_pages(config, entries, (first + step) * WARP_ROWS + column, pages)
    for tile in cutlass.range(first, end, step, unroll=1):
        rows = [block_of(config, words[None, r], query.table, member) for r in range(THREAD_ROWS)]
        for r in cutlass.range_constexpr(THREAD_ROWS):
            there[r] = here[r]
        load_tile(config, entries, (tile + step) * WARP_ROWS + column, member, pages, words, here)
        find_pages(config, entries, (tile + 2 * step) * WARP_ROWS + column, pages)
        scores = cute.make_rmem_tensor(ACCUMULATORS * groups, Float32)
        for group in cutlass.range_constexpr(groups):
            total = [Float32(0.0)] * ACCUMULATORS
            for k in cutlass.range_constexpr(STEPS):
                a = [rows[r][0][2 * k + half] for half in range(2) for r in range(THREAD_ROWS)]
                total = multiply(total, a, [query.q[2 * k, group], query.q[2 * k + 1, group]])
            for i in cutlass.range_constexpr(ACCUMULATORS):
                scores[group * ACCUMULATORS + i] = total[i]
        factors = tuple(row[1] for row in rows)
        store_tile(config, scores, query.weight, factors, there, sink, tile * WARP_ROWS + column, member)


class WarpScores(ScoresHost):
    """Tensor cores by mma.sync."""

    scorer, score = staticmethod(scorer), staticmethod(score)


def multiply(total: list, a: list, b: list) -> list:
    """total + A B on e4m3, m16n8k32."""
    numbers = [f"{{$r{i}}}" for i in range(10)]
    outputs = ", ".join(f"{{$w{i}}}" for i in range(ACCUMULATORS))
    return list(
        cute.arch.inline_ptx(
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
            f"{{{outputs}}}, {{{', '.join(numbers[:4])}}}, {{{', '.join(numbers[4:6])}}}, "
            f"{{{', '.join(numbers[6:])}}};",
            write_only_types=[Float32] * ACCUMULATORS,
            read_only_args=[*a, *b, *total],
        )
    )


def host_and_arguments(config: ScoresConfig) -> tuple:
    """The host function and its arguments but the stream."""
    return (WarpScores(config), *scores_arguments(config))


WARP_SCORES = Kernel("indexer.scores", host_and_arguments)  # by ScoresConfig
