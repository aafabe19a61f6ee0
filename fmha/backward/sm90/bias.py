"""A bf16 bias through shared memory: TMA loads each step's bias, and stores its gradient, dS.

Each consumer has its own box, (query, 64 keys), one query per row, with the 128-byte swizzle. The fragments of S^T have
one key per row, so both directions transpose (ldmatrix, stmatrix).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device import tma
from warpspec.common.device.wgmma import WARP_ROWS
from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward.sm90.config import BIAS_STAGES, CONSUMERS
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.sm90.staging import CHUNK_BYTES, SWIZZLE_ROWS

LOAD, STORE = 4, 5  # index of the descriptor
MATRICES = 4  # of one ldmatrix


def boxes_of(work, tensor, place):
    """A TMA coordinate tensor, (KEY, QUERY), from the consumers' first key and the tile's first query on."""
    config, tile = work.config, work.tile
    head, query_tile = place
    batch = tile.request if config.logits.bias.batches else 0
    plane = tensor[None, None, head if config.logits.bias.heads else 0, batch]
    return cute.domain_offset((tile.first_key, query_tile * config.tile_m), plane)


def fetch(work, step, head, query_tile) -> None:
    """Load the bias of a step, a box for each consumer. Produces bias_full."""
    config, full = work.config, work.channels["bias_full"]
    atoms, coordinates = work.loads.atoms, work.loads.coordinates
    box = (BLOCK, config.tile_m)
    boxes = cute.local_tile(boxes_of(work, coordinates[LOAD], (head, query_tile)), box, (None, 0))
    shared = tma.shared_tiles(work.shared.bias, cutlass.BFloat16, box, BIAS_STAGES * CONSUMERS)
    ring = tma.TileRing.make(atoms[LOAD], boxes, shared)
    full.expect_bytes(step, config.bias_bytes)
    for consumer in range(CONSUMERS):
        ring.load(consumer, full.stage(step) * CONSUMERS + consumer, full.barrier(step))


def matrix_address(base, thread) -> Int32:
    """Address of the row that a thread supplies for the first four matrices, each 8 queries by 8 keys of its warp."""
    lane = thread % WARP_THREADS
    row = lane // (2 * SWIZZLE_ROWS) * SWIZZLE_ROWS + lane % SWIZZLE_ROWS
    chunk = thread // WARP_THREADS * (WARP_ROWS // SWIZZLE_ROWS) + lane // SWIZZLE_ROWS % 2
    return base + row * tma.ROW_BYTES + (chunk ^ (row % SWIZZLE_ROWS)) * CHUNK_BYTES


def reader(work, step):
    """A function of i that reads words 4 i to 4 i + 3 of a thread's bias, in the order of S^T's registers."""
    config = work.config
    stage = (step % BIAS_STAGES * CONSUMERS + work.consumer) * (config.bias_bytes // CONSUMERS)
    start = matrix_address(work.shared.bias.toint() + stage, work.thread)

    def words(i: int) -> tuple:
        return cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Int32] * MATRICES,
            read_only_args=[start + i * 2 * SWIZZLE_ROWS * tma.ROW_BYTES],
        )

    return words


def store_columns(base, thread, words: cute.Tensor) -> None:
    """Store words of a block of S^T to a box at ``base``, by stmatrix."""
    start = matrix_address(base, thread)
    for i in range(cute.size(words) // MATRICES):
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
            read_only_args=[
                start + i * 2 * SWIZZLE_ROWS * tma.ROW_BYTES,
                *(words[MATRICES * i + j] for j in range(MATRICES)),
            ],
        )


@cute.jit
def store(work, step, place):
    """Store dS of a step to dbias, by one thread of the consumer, after the barrier that guards dS."""
    config = work.config
    atoms, coordinates = work.loads.atoms, work.loads.coordinates
    if work.thread < WARP_THREADS:
        view = boxes_of(work, coordinates[STORE], place)
        boxes = cute.local_tile(view, (BLOCK, BLOCK), (None, 0))
        base = (work.shared.ds + step % config.ds_stages * config.ds_bytes).align(tma.TILE_ALIGNMENT)
        shared = tma.shared_tiles(base, cutlass.BFloat16, (BLOCK, BLOCK), CONSUMERS)
        tma.TileRing.make(atoms[STORE], boxes, shared).store(work.consumer, work.consumer)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def wait_stored(work):
    """Wait until stores have read their shared memory."""
    if work.thread < WARP_THREADS:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
