"""Q of a task in shared memory: in fp16, in the order in which lanes have the keys' codes, and the rows' factors.

A lane has 16 neighbouring codes of a block of 64 columns: member m of the four lanes of a key has columns 16 m to
16 m + 15. Step s of the block's four products takes codes 4 s to 4 s + 3 of every lane, which stand for columns 2 m,
2 m + 1, 2 m + 8 and 2 m + 9 of the step. The sum does not depend on the order, so Q's columns are stored in this one.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from warpspec.common.device.words import shared_vector
from warpspec.common.hardware import QUAD, VECTOR_BYTES, WARP_THREADS, WORD_BYTES
from warpspec.common.memory import ROW_BYTES
from warpspec.fmha.device.logits import with_factor
from warpspec.fmha.sm90.narrow import SWIZZLE_ROWS, factors, largest, maximum_of_halves, narrowed
from warpspec.latent.gathered.transposed.config import FLAGS, QUERIES_BARRIER
from warpspec.latent.gathered.transposed.maxima import NO_REFERENCE, NO_SCORE

BLOCK_WORDS = ROW_BYTES // WORD_BYTES  # words of a row in a block of 64 columns: one a lane
STEP_WORDS = 8  # words of a row in a step's 16 columns


def load_queries(role, task) -> list:
    """Begin to load a task's Q: words of the lane, (BLOCK), of each of the warp's rows. Rows without a query repeat
    another's."""
    config, operands, found = role.config, role.operands, []
    offset = Int64(cute.arch.lane_idx() * WORD_BYTES)
    for row in rows_of_warp(role):
        place = task.place(row)
        head, token = cutlass.min(place.head, task.heads - 1), cutlass.min(place.query, task.last_token)
        address = operands.q[0, token, head, None].iterator.toint() + offset
        pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=WORD_BYTES)
        words = cute.make_rmem_tensor(config.heads.qk_blocks, Uint32)
        for block in range(config.heads.qk_blocks):
            words[block] = cute.make_tensor(pointer + block * BLOCK_WORDS, cute.make_layout(1))[0]
        found.append(words)
    return found


def rows_of_warp(role) -> list:
    """The task's rows that a warp prepares."""
    warps = role.config.consumer_warps
    return [role.number // WARP_THREADS + i * warps for i in range(role.config.count // warps)]


@cute.jit
def prepare_queries(role, found: cutlass.Constexpr):
    """Bring a task's Q to shared memory, by all consumers, and begin its maxima and references. Ends with their
    barrier. found: from ``load_queries``."""
    config, shared, lane = role.config, role.shared, cute.arch.lane_idx()
    row_factors, maxima, references, flags = shared.factors, shared.maxima, shared.references, shared.flags
    # The lane has word l of a block: columns 16 m + 4 s + 2 half and the next, which go to word m of a chunk.
    m, s, half = lane // STEP_WORDS, lane % STEP_WORDS // 2, lane % 2
    chunk = 2 * s + half
    rows = rows_of_warp(role)
    factor = role.numbers.factor * role.key_scale
    pairs = [largest([words[block] for block in range(config.heads.qk_blocks)]) for words in found]
    distance = 1
    while distance < WARP_THREADS:  # of all rows in step, to hide how long a shuffle takes
        others = [Uint32(cute.arch.shuffle_sync_bfly(pair, distance)) for pair in pairs]
        pairs = [maximum_of_halves(pair, other) for pair, other in zip(pairs, others, strict=True)]
        distance *= 2
    for i in cutlass.range_constexpr(len(rows)):
        row, words, pair = rows[i], found[i], pairs[i]
        up, down = factors(pair)
        base = shared.q.toint() + row * ROW_BYTES + (chunk ^ (row % SWIZZLE_ROWS)) * VECTOR_BYTES
        for block in cutlass.range_constexpr(config.heads.qk_blocks):
            target = shared_vector(base + m * WORD_BYTES + block * (config.count * ROW_BYTES), 1)
            target[0] = narrowed(words[block], up)
        if lane == 0:
            row_factors[row] = with_factor(config.logits, role.numbers, factor * down).factor
            maxima[row] = Int32(NO_SCORE)
            references[row, 0] = Float32(NO_REFERENCE)
    if role.number < FLAGS:
        flags[0, role.number] = Int32(-1)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=QUERIES_BARRIER, number_of_threads=config.consumer_threads)


assert BLOCK_WORDS == WARP_THREADS and STEP_WORDS * QUAD == WARP_THREADS
