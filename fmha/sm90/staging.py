"""16-bit tiles of 64 rows and 64 columns between a consumer's registers and shared memory, with the 128-byte swizzle.

A warp writes and reads back only its own 16 rows, 2 KiB, so a warp barrier before and after reading is enough.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device import tma
from warpspec.common.hardware import WARP_THREADS, WORD_BYTES
from warpspec.fmha.sm90.fragment import ROW_DISTANCE, THREAD_ROWS, WARP_ROWS
from warpspec.fmha.tiles import ELEMENT_BYTES

CHUNK_BYTES = 16  # unit of the swizzle
CHUNK = CHUNK_BYTES // ELEMENT_BYTES
CHUNK_WORDS = CHUNK_BYTES // WORD_BYTES
CHUNKS = tma.ROW_BYTES // CHUNK_BYTES  # of a row of the tile
SWIZZLE_ROWS = 8  # after which it repeats
TILE_WORDS = CHUNKS * THREAD_ROWS  # of a tile in a thread
LOAD_ROWS = WARP_THREADS // CHUNKS  # rows that a warp reads at a time
LOADS = WARP_ROWS // LOAD_ROWS


def store_words(base: Int32, row, words: list) -> None:
    """Store a thread's words of a tile's first columns, in the order of wgmma's fragments. base: the tile's address;
    row: the thread's first (``tile.Row``)."""
    base += row.index * tma.ROW_BYTES + row.member * WORD_BYTES
    swizzle = row.index % SWIZZLE_ROWS  # for both rows, ROW_DISTANCE apart
    for chunk in range(len(words) // THREAD_ROWS):
        start = base + (swizzle ^ chunk) * CHUNK_BYTES
        for r in range(THREAD_ROWS):
            vector_at(start + r * ROW_DISTANCE * tma.ROW_BYTES, 1)[0] = words[chunk * THREAD_ROWS + r]


def load_words(base: Int32, row, chunks: int = CHUNKS) -> list:
    """Load what ``store_words`` stores of the first chunks of a row."""
    base += row.index * tma.ROW_BYTES + row.member * WORD_BYTES
    swizzle = row.index % SWIZZLE_ROWS
    words = []
    for chunk in range(chunks):
        start = base + (swizzle ^ chunk) * CHUNK_BYTES
        words += [vector_at(start + r * ROW_DISTANCE * tma.ROW_BYTES, 1)[0] for r in range(THREAD_ROWS)]
    return words


def store_rows(base: Int32, thread, words: cute.Tensor, first_chunk: int = 0) -> None:
    """Store the words of ``store_words`` by stmatrix, four matrices at a time. thread: 0..127. first_chunk: where they
    begin in a row, an even number."""
    lane = thread % WARP_THREADS
    row = thread // WARP_THREADS * WARP_ROWS + lane % WARP_ROWS
    start = base + row * tma.ROW_BYTES + ((lane // WARP_ROWS) ^ (row % SWIZZLE_ROWS)) * CHUNK_BYTES
    for number in range(0, cute.size(words) // THREAD_ROWS, 2):
        first, chunk = number * THREAD_ROWS, first_chunk + number
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
            read_only_args=[start ^ (chunk * CHUNK_BYTES), *(words[first + i] for i in range(4))],
        )


def row_read(thread, load: int) -> Int32:
    """Row of the tile from which ``thread`` (0..127) reads a chunk in load number ``load`` of LOADS."""
    warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
    return warp * WARP_ROWS + load * LOAD_ROWS + lane // CHUNKS


def chunk_read(thread) -> Int32:
    """Number of this chunk in its row."""
    return thread % CHUNKS


def load_chunk(base: Int32, thread, load: int) -> cute.Tensor:
    """Load this chunk (CHUNK_WORDS)."""
    row = row_read(thread, load)
    start = base + row * tma.ROW_BYTES + (chunk_read(thread) ^ (row % SWIZZLE_ROWS)) * CHUNK_BYTES
    words = cute.make_rmem_tensor(CHUNK_WORDS, Int32)
    cute.autovec_copy(vector_at(start, CHUNK_WORDS), words)
    return words


@cute.jit
def store_chunk(base: Int32, thread, load: cutlass.Constexpr, row: cute.Tensor, block, inside) -> None:
    """Copy this chunk to its place in block number ``block`` of 64 columns of a row (D) in global memory, if the row is
    ``inside``."""
    chunk = load_chunk(base, thread, load)
    if inside:
        place = cute.local_tile(row, (CHUNK,), (block * CHUNKS + chunk_read(thread),))
        cute.autovec_copy(cute.recast_tensor(chunk, row.element_type), place)


def vector_at(address: Int32, words: int) -> cute.Tensor:
    """(words): 32-bit words in shared memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=words * WORD_BYTES)
    return cute.make_tensor(pointer, cute.make_layout(words))
