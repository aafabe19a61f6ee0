"""Scores of index keys by mma.sync on e4m3, for any architecture: each warp with the whole query in registers.

A warp takes 16 keys at a time as rows of A, straight from memory; the query's heads are columns of B, loaded and
converted once. Neither goes through shared memory. On sm_90a wgmma does the same faster (``sm90.scores``).
"""

from __future__ import annotations

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
    load_query,
    load_tile,
    loaded_words,
    scores_arguments,
    store_tile,
)
from warpspec.indexer.device.scores_host import ScoresHost
from warpspec.indexer.scores_config import BLOCKS, HEADS_STEP, SCALE_STEPS, ScoresConfig

STEPS = 4  # of 32 numbers, of a product
ACCUMULATORS = 4  # of a thread, of 8 heads


class WarpScores(ScoresHost):
    """Tensor cores by mma.sync."""

    @cute.kernel
    def kernel(self, queries, weights, pool, page_table, requests, lengths, logits, parts):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        part, token, _ = cute.arch.block_idx()
        lane = thread % WARP_THREADS
        member, column = lane % BLOCKS, lane // BLOCKS
        smem = cutlass.memory.SmemAllocator()
        table = smem.allocate_tensor(Uint32, cute.make_layout((2, SCALE_STEPS + 1)), byte_alignment=8)
        fill_table(table, thread)
        cute.arch.sync_threads()

        groups = config.heads // HEADS_STEP
        q = cute.make_rmem_tensor((WORDS, groups), Uint32)
        weight = []
        for group in cutlass.range_constexpr(groups):
            head = group * HEADS_STEP + column
            words = cute.make_rmem_tensor(loaded_words(config), Uint32)
            load_query(config, queries[token, None], head, member, words)
            out, factor = block_of(config, words, table, member)
            for i in cutlass.range_constexpr(WORDS):
                q[i, group] = out[i]
            factor = Float32(weights[token, head]) * factor
            for i in cutlass.range_constexpr(2):  # of the heads in this thread's columns of the products
                weight.append(Float32(cute.arch.shuffle_sync(factor, (2 * member + i) * BLOCKS)))

        request = cutlass.max(cutlass.min(Int32(requests[token]), page_table.shape[0] - 1), 0)
        pages = page_table[request, None]
        length = cutlass.max(cutlass.min(Int32(lengths[token]), page_table.shape[1] * config.page_size), 0)
        warps = config.threads // WARP_THREADS
        step, first = parts * warps, part * warps + thread // WARP_THREADS
        words = cute.make_rmem_tensor((loaded_words(config), THREAD_ROWS), Uint32)
        here = cute.make_rmem_tensor(THREAD_ROWS, Int32)
        there = cute.make_rmem_tensor(THREAD_ROWS, Int32)
        load_tile(config, pool, pages, length, first * WARP_ROWS + column, member, words, here)
        for tile in cutlass.range(first, cute.ceil_div(logits.shape[1], WARP_ROWS), step, unroll=1):
            rows = [block_of(config, words[None, r], table, member) for r in range(THREAD_ROWS)]
            for r in cutlass.range_constexpr(THREAD_ROWS):
                there[r] = here[r]
            load_tile(config, pool, pages, length, (tile + step) * WARP_ROWS + column, member, words, here)
            scores = cute.make_rmem_tensor(ACCUMULATORS * groups, Float32)
            for group in cutlass.range_constexpr(groups):
                total = [Float32(0.0)] * ACCUMULATORS
                for k in cutlass.range_constexpr(STEPS):
                    a = [rows[r][0][2 * k + half] for half in range(2) for r in range(THREAD_ROWS)]
                    total = multiply(total, a, [q[2 * k, group], q[2 * k + 1, group]])
                for i in cutlass.range_constexpr(ACCUMULATORS):
                    scores[group * ACCUMULATORS + i] = total[i]
            factors = tuple(row[1] for row in rows)
            at = tile * WARP_ROWS + column
            store_tile(config, scores, weight, factors, there, logits[token, None], at, member)


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
