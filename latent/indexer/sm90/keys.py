"""Convert index keys and queries to e4m3 in registers, as the tensor cores take them, and write scores to logits.

A row is four blocks of 32 numbers, one a lane. A product assigns a row's numbers to lanes by fours, but a sum does not
depend on the order of its terms, so queries and keys are both assigned by blocks. FP4 is converted by a table of eight
bytes, in which a byte permutation looks numbers up. The table includes one power of two for each block, relative to the
row's largest scale. The remaining factor, one power of two a row, is multiplied in at the end; a query head's is
multiplied into its weight, because ReLU commutes with it. This is exact while the scales of a row's blocks are at most
2**11 apart, and nearly so beyond.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WORD_BYTES
from warpspec.latent.indexer.device.entries import divided, find_page, load_global
from warpspec.latent.indexer.scores_config import (
    BLOCKS,
    E4M3_SHIFT,
    SCALE_STEPS,
    WARP_ROWS,
    ScoresConfig,
    e4m3_table,
)

WORDS = 8  # words of e4m3 in a block
VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES
THREAD_ROWS, ROW_DISTANCE = 2, 8  # keys of a thread, and their distance
SCALE_NAN = 255
FP32_EXPONENT_BIT = 23
CODES, ONES = 0x77777777, 0x01010101
SIGN = 0x80  # sign bit of an e4m3 code
ZEROS_ABOVE = 0x4440  # byte permutation selector: zero bytes above the chosen byte
FP32_NAN = 0x7FC00000
TABLE_ENTRIES = SCALE_STEPS + 2


def loaded_words(config) -> int:
    """Words that a lane loads of a row: its block and the row's scales."""
    return (4 if config.format == "mxfp4" else WORDS) + 1


@cute.jit
def fill_table(table: cute.Tensor, thread):
    """Fill table (2, TABLE_ENTRIES) with ``e4m3_table``, sign bits set, followed by ONES; one thread an entry.

    The caller synchronises. Entries are chosen by selections: ptxas would turn a branch for each entry into a jump
    table, which the threads of a warp take one by one.
    """
    signs = SIGN * ONES
    entries = (*((low | signs, high | signs) for low, high in e4m3_table()), (ONES, ONES))
    if thread < TABLE_ENTRIES:
        for half in cutlass.range_constexpr(2):
            word = Uint32(0)
            for number in cutlass.range_constexpr(TABLE_ENTRIES):
                word = Uint32(cutlass.select_(Boolean(thread == number), Uint32(entries[number][half]), word))
            table[half, thread] = word


@cute.jit
def load_query(config: cutlass.Constexpr, query, head, block, words: cute.Tensor):
    """Load words (WORD): a block of a head of the query, and the head's scales."""
    fmt = config.fmt
    block_words = loaded_words(config) - 1
    for i in cutlass.range_constexpr(block_words):
        words[i] = query[head * (fmt.data_bytes // WORD_BYTES) + block * block_words + i]
    words[block_words] = query[config.heads * (fmt.data_bytes // WORD_BYTES) + head]


@cute.jit
def load_asked(config: cutlass.Constexpr, query, weights, thread) -> tuple:
    """Start loading (words, weight) of the thread's block, from which ``query.prepare`` makes its part of the query."""
    words, weight = cute.make_rmem_tensor(loaded_words(config), Uint32), cute.make_rmem_tensor(1, Float32)
    words.fill(0), weight.fill(0)
    head, block = thread // BLOCKS, thread % BLOCKS
    if head < config.heads:
        load_query(config, query, head, block, words)
        weight[0] = Float32(weights[head])
    return words, weight


def pages_of_tile(config) -> int:
    """Number of pages that a thread's two keys of a tile may lie in, 1 or 2."""
    return THREAD_ROWS if config.page_size % WARP_ROWS else 1


@cute.jit
def find_pages(config: cutlass.Constexpr, entries, key, found: cute.Tensor):
    """Look up found (PAGE), the pages of the thread's keys of a tile; called one tile ahead.

    key: as in ``load_tile``.
    """
    for r in cutlass.range_constexpr(pages_of_tile(config)):
        found[r] = find_page(config, entries, key + r * ROW_DISTANCE)


@dataclass(frozen=True)
class LanePages:
    """Pages of a warp's tiles, where the warp's 16 keys of a tile lie in one page.

    Each lane looks up one tile's page, once for 32 tiles and 32 tiles ahead. If pages were looked up tile by tile, the
    warp would wait for these loads as it waits for keys.

    tile, step: the first tile and the step to the next. tile_keys: keys of a tile. row: the warp's first row of a tile.
    """

    config: ScoresConfig
    entries: tuple
    tile: Int32
    step: Int32
    tile_keys: int
    row: Int32
    lane: Int32

    def look_up(self, number) -> Int32:
        """Page of the lane's tile among the 32 from the number-th on; -1 if there is none."""
        index = (self.tile + (number + self.lane) * self.step) * self.tile_keys + self.row
        return find_page(self.config, self.entries, index)

    def begin(self) -> tuple:
        """The initial state of ``of``."""
        return self.look_up(Int32(0)), self.look_up(Int32(WARP_THREADS))

    @cute.jit
    def of(self, number, kept: tuple) -> tuple:
        """(the page of the number-th tile, new state). All lanes call it, for consecutive numbers."""
        current, ahead = kept
        if (number % WARP_THREADS == 0) & (number > 0):
            current = ahead
            ahead = self.look_up(number + WARP_THREADS)
        return Int32(cute.arch.shuffle_sync(current, number % WARP_THREADS)), (current, ahead)


@cute.jit
def load_tile(
    config: cutlass.Constexpr, entries, key, member, found: cute.Tensor, words: cute.Tensor, here: cute.Tensor
):
    """Issue the loads of the thread's two keys, ``key`` and the one ROW_DISTANCE further on.

    The warp's WARP_ROWS keys begin at a multiple of WARP_ROWS. Fills words (WORD, ROW) and here (ROW), which is 1 for a
    key that exists. found: from ``find_pages``.
    """
    fmt = config.fmt
    pool, _, length = entries
    block_words = loaded_words(config) - 1
    row_of_page, at, scale_at = Int32(0), Int64(0), Int64(0)
    there = Boolean(False)
    for r in cutlass.range_constexpr(THREAD_ROWS):
        index = key + r * ROW_DISTANCE
        if cutlass.const_expr(r < pages_of_tile(config)):  # otherwise both keys lie in one page
            page, row_of_page = found[r], divided(index, config.page_size)[1]
            there = Boolean(page >= 0) & Boolean(page < pool.shape[0])
            at = pool.iterator.toint() + Int64(page) * Int64(pool.stride[0] * WORD_BYTES)
            scale_at = at + Int64(config.page_size * fmt.data_bytes + row_of_page * fmt.scale_bytes)
            at = at + Int64(row_of_page * fmt.data_bytes + member * (block_words * WORD_BYTES))
        else:
            at = at + Int64(ROW_DISTANCE * fmt.data_bytes)
            scale_at = scale_at + Int64(ROW_DISTANCE * fmt.scale_bytes)
        present = Int32(there & Boolean(index < length))
        for first in cutlass.range_constexpr(0, block_words, VECTOR_WORDS):
            loaded = load_global(at + Int64(first * WORD_BYTES), present, VECTOR_WORDS)
            for i in cutlass.range_constexpr(VECTOR_WORDS):
                words[first + i, r] = loaded[i]
        words[block_words, r] = load_global(scale_at, present, 1)[0]
        here[r] = present


@cute.jit
def block_of(config: cutlass.Constexpr, words: cute.Tensor, table, ones, block) -> tuple:
    """(WORDS words of e4m3 of the lane's block, factor of the row's numbers).

    words: (WORD), the block and then the row's scales. ones: ONES, loaded from the table, because a constant would be
    moved to a register at every use. block: which of the row's, 0 to 3; four adjacent lanes have a row's four blocks.
    """
    last = loaded_words(config) - 1
    if cutlass.const_expr(config.format == "fp8"):
        return [words[i] for i in range(WORDS)], words[last].bitcast(Float32)
    own = Int32(permute(words[last], Uint32(0), Uint32(block) | Uint32(ZEROS_ABOVE)))
    largest = own
    for distance in cutlass.range_constexpr(1, BLOCKS):
        if cutlass.const_expr(distance & (distance - 1) == 0):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, distance))
    entry = cutlass.min(largest - own, Int32(SCALE_STEPS))
    low, high = table[0, entry], table[1, entry]
    out = []
    for word in cutlass.range_constexpr(4):
        masked = words[word] & Uint32(CODES)
        for half in cutlass.range_constexpr(2):
            codes = words[word] >> (16 * half) if half else words[word]
            # Magnitudes, with the sign bits set.
            negative = permute(low, high, masked >> (16 * half) if half else masked)
            positive = permute(ones, ones, codes)  # 1, or 0 where the code's sign is set
            out.append(negative - positive * Uint32(SIGN))
    # 2**(largest - 127 - 6), as fp32: exponents from -126 on, 0 below.
    bits = Uint32(cutlass.max(largest - E4M3_SHIFT, 0)) << FP32_EXPONENT_BIT
    return out, Uint32(cutlass.select_(Boolean(largest == SCALE_NAN), Uint32(FP32_NAN), bits)).bitcast(
        Float32
    )


def permute(low: Uint32, high: Uint32, order: Uint32) -> Uint32:
    """Select four of eight bytes by the low four nibbles of ``order``; a nibble's top bit replicates the byte's
    sign."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[low, high, order]
    )


def weighted_sum(scores: cute.Tensor, weight: list, r: int) -> Float32:
    """Weighted sum of the ReLUs of key r in the thread's columns.

    weight * ReLU(x) is computed as half of weight * x + weight * |x|: two instructions for the pipe with less load.
    """
    flat = cute.make_tensor(scores.iterator, cute.make_layout(cute.size(scores)))
    plain, magnitudes = Float32(0.0), Float32(0.0)
    for i in range(len(weight)):
        value = flat[i // 2 * 4 + r * 2 + i % 2]
        plain = plain + weight[i] * value
        magnitudes = magnitudes + weight[i] * cute.math.absf(value)
    return 0.5 * (plain + magnitudes)


@cute.jit
def store_tile(scores, weight: cutlass.Constexpr, factors, here, sink, key, member):
    """Reduce the weighted sums of the thread's two keys over the four lanes that share them, and write them to
    ``sink``."""
    for r in cutlass.range_constexpr(THREAD_ROWS):
        total = weighted_sum(scores, weight, r)
        for distance in (1, 2):
            total += cute.arch.shuffle_sync_bfly(total, distance)
        total = Float32(cutlass.select_(Boolean(here[r] != 0), total * factors[r], -Float32.inf))
        index = key + r * ROW_DISTANCE
        if (member == r) & (index < sink.limit):
            sink.put(index, total)


@cute.jit
def store_row(scores, weight: cutlass.Constexpr, factors, there, sink, index, member):
    """Write the score of one of the thread's two keys, the index-th; a bit of ``member`` says which.

    The four lanes exchange sums in pairs, and two lanes end with the same key. there: whether that key exists.
    """
    totals = [weighted_sum(scores, weight, r) for r in range(THREAD_ROWS)]
    second = Boolean(member & 1 != 0)
    total = Float32(cutlass.select_(second, totals[1], totals[0]))
    total += cute.arch.shuffle_sync_bfly(Float32(cutlass.select_(second, totals[0], totals[1])), 1)
    total += cute.arch.shuffle_sync_bfly(total, 2)
    total = total * Float32(cutlass.select_(second, factors[1], factors[0]))
    total = Float32(cutlass.select_(there, total, -Float32.inf))
    if (member < THREAD_ROWS) & (index < sink.limit):
        sink.put(index, total)
