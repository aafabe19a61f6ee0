"""Make P and dS of a block of queries from S and dP in tensor memory, one key per thread, and store them where products
read them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common.device import tma, tmem
from warpspec.common.device.wgmma import PAIR
from warpspec.common.hardware import WORD_BYTES
from warpspec.fmha.backward.device.arithmetic import derive, weigh
from warpspec.fmha.heads import BLOCK

CHUNK_BYTES = 16  # unit of the swizzle
CHUNK_WORDS = CHUNK_BYTES // WORD_BYTES
SWIZZLE_ROWS = 8  # after which it repeats
BLOCK_WORDS = BLOCK // PAIR  # of a row of P or dS


@cute.jit
def make_block(work, step, number, head, query_tile):
    """Make P and dS of 64 queries: to tensor memory, in place of S and dP; dS to shared memory, too."""
    config, columns, thread = work.config, work.columns, work.thread
    block = work.block(step, number * BLOCK, head, query_tile)
    masked = work.tile.needs_mask(head, query_tile, number)
    scores, ds = cute.make_rmem_tensor(BLOCK, Float32), cute.make_rmem_tensor(BLOCK, Float32)
    tmem.load_row(columns + config.tmem_s + number * BLOCK, scores, thread)
    tmem.wait_loads()
    weigh(block, scores, masked)
    if cutlass.const_expr(config.wanted.v):
        store_p(work, number * BLOCK_WORDS, as_words(scores, work.operands.q.element_type))
    # Not earlier: S, dP and the statistics do not fit a thread's registers.
    if cutlass.const_expr(config.wanted.ds):
        tmem.load_row(columns + config.tmem_dp + number * BLOCK, ds, thread)
        tmem.wait_loads()
        derive(block, scores, ds, masked)
        store_ds(work, number * BLOCK_WORDS, as_words(ds, work.operands.q.element_type))


def as_words(values: cute.Tensor, dtype) -> cute.Tensor:
    """fp32 values in 16 bits, two to a word."""
    narrow = cute.make_rmem_tensor(cute.size(values), dtype)
    narrow.store(values.load().to(dtype))
    return cute.recast_tensor(narrow, Int32)


def store_p(work, first, words: cute.Tensor) -> None:
    """Store P of some queries, two to a word, to tensor memory. first: number of the tile's words before them."""
    target = cute.recast_ptr(work.columns + work.config.tmem_s + first, dtype=Int32)
    tmem.store_row(words, target, work.thread)


def store_ds(work, first, words: cute.Tensor) -> None:
    """Store dS likewise, and to shared memory."""
    config = work.config
    if config.wanted.k:
        target = cute.recast_ptr(work.columns + config.tmem_dp + first, dtype=Int32)
        tmem.store_row(words, target, work.thread)
    if config.wanted.q:
        store_row(work, first, words)


def store_row(work, first, words: cute.Tensor) -> None:
    """Store the thread's key in dS's tile in shared memory: a row of 128 bytes in each block of queries, swizzled."""
    row = work.shared.ds.toint() + (first // BLOCK_WORDS * work.config.tile_n + work.thread) * tma.ROW_BYTES
    first_chunk = first % BLOCK_WORDS // CHUNK_WORDS
    for chunk in range(cute.size(words) // CHUNK_WORDS):
        at = row + ((first_chunk + chunk) ^ (work.thread % SWIZZLE_ROWS)) * CHUNK_BYTES
        pointer = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
        target = cute.make_tensor(pointer, cute.make_layout(CHUNK_WORDS))
        cute.autovec_copy(cute.local_tile(words, (CHUNK_WORDS,), (chunk,)), target)
