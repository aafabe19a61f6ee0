"""Queries in fp16 instead of bf16, for products with FP8 keys, which are fp16 numbers.

A row is multiplied by a power of two that brings its largest number to the top of fp16's range, and its scores are
divided by it. A number keeps all its bits unless it is smaller than the row's largest by 2**29 or more; the error is
then below 2**-40 of the largest, less than the rounding of a sum in fp32.
"""

from __future__ import annotations

from functools import reduce

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Uint32

from warpspec.common.device import tma
from warpspec.common.device.words import VECTOR_WORDS, load_shared, store_shared
from warpspec.common.hardware import VECTOR_BYTES, WARPGROUP_THREADS

FP32_MANTISSA_BITS, FP32_EXPONENT_BIAS = 23, 127
TOP = 14  # exponent of a row's largest number in fp16, whose own largest is 15
ABSOLUTE = 0x7FFF7FFF  # two 16-bit numbers without their signs
LARGEST_EXPONENT = 0xFE  # field of finite fp32 numbers
NARROW_BARRIER = 10  # named barriers of a consumer each, from here on
ROW_THREADS = 2  # threads of a consumer that share a row
SWIZZLE_ROWS = 8
KEPT_BLOCKS = 4  # most of a row that threads keep in registers
UNROLLED = 3  # blocks of a longer row


def largest(words: list) -> Uint32:
    """Bits of the largest magnitude among some pairs of bf16, for each half separately; NaN counts as largest."""
    return reduce(maximum_of_halves, (word & Uint32(ABSOLUTE) for word in words))


def maximum_of_halves(a: Uint32, b: Uint32) -> Uint32:
    """The larger of each half, as unsigned numbers."""
    return cute.arch.inline_ptx(
        "max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def factors(pair: Uint32) -> tuple[Float32, Float32]:
    """(factor of a row, factor of its scores) for the ``largest`` of all its numbers: powers of two. 1 if the row is
    all zeros, or has NaN or Inf."""
    high = cutlass.max(Int32(pair >> 16), Int32(pair & Uint32(0xFFFF)))
    field = high >> 7
    plain = Boolean(high == 0) | Boolean(field > LARGEST_EXPONENT)
    # For rows of tiny numbers, the largest factor whose inverse is a normal number.
    field = cutlass.max(field, Int32(TOP + 1))
    up = Int32(2 * FP32_EXPONENT_BIAS + TOP) - field
    up = Int32(cutlass.select_(plain, Int32(FP32_EXPONENT_BIAS), up))
    down = Int32(2 * FP32_EXPONENT_BIAS) - up
    return tuple((field << FP32_MANTISSA_BITS).bitcast(Float32) for field in (up, down))


def narrowed(word: Uint32, factor: Float32) -> Uint32:
    """Two bf16 numbers times a factor, as fp16."""
    pair = cute.make_rmem_tensor(2, Float16)
    pair[0] = ((word << 16).bitcast(Float32) * factor).to(Float16)
    pair[1] = ((word & Uint32(0xFFFF0000)).bitcast(Float32) * factor).to(Float16)
    return cute.recast_tensor(pair, Uint32)[0]


@cute.jit
def narrow_queries(config: cutlass.Constexpr, base, consumer, thread) -> Float32:
    """Convert Q of a row group, at an address in shared memory, to fp16 in place, with two of the consumer's threads
    per row. Returns the factor of the scores of a thread's row, number thread / 2."""
    down = narrow_row(config, base, thread // ROW_THREADS, thread % ROW_THREADS, ROW_THREADS)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=NARROW_BARRIER + consumer, number_of_threads=WARPGROUP_THREADS)
    return down


@cute.jit
def narrow_row(config: cutlass.Constexpr, base, row, member, members: cutlass.Constexpr) -> Float32:
    """Convert a row of Q to fp16 in place, together with the neighbouring lanes that share it. Returns the factor of
    the row's scores.

    base: address of the row group. member: the thread's number among ``members``, a power of two. Rows of many blocks
    are read twice, in loops: unrolled, they would be a large part of the kernel's code.
    """
    block_bytes, blocks = config.q_bytes // config.heads.qk_blocks, config.heads.qk_blocks
    count = SWIZZLE_ROWS // members  # vectors of a block that are this thread's
    chunks = [(member * count + i) ^ (row % SWIZZLE_ROWS) for i in range(count)]
    places = [base + row * tma.ROW_BYTES + chunk * VECTOR_BYTES for chunk in chunks]
    pair, kept = Uint32(0), []
    if cutlass.const_expr(blocks <= KEPT_BLOCKS):
        kept = [words_at(places, block * block_bytes) for block in range(blocks)]
        pair = largest([word for words in kept for word in words])
    else:
        for block in cutlass.range(blocks, unroll=UNROLLED):
            pair = maximum_of_halves(pair, largest(words_at(places, block * block_bytes)))
    distance = 1
    while distance < members:
        pair = maximum_of_halves(pair, Uint32(cute.arch.shuffle_sync_bfly(pair, distance)))
        distance *= 2
    up, down = factors(pair)
    if cutlass.const_expr(blocks <= KEPT_BLOCKS):
        for block, words in enumerate(kept):
            store_narrowed(places, block * block_bytes, words, up)
    else:
        for block in cutlass.range(blocks, unroll=UNROLLED):
            store_narrowed(places, block * block_bytes, words_at(places, block * block_bytes), up)
    return down


def store_narrowed(places: list, offset, words: list, factor: Float32) -> None:
    """Store the vectors that these words are, ``narrowed``, at addresses in shared memory."""
    found = [narrowed(word, factor) for word in words]
    for i, place in enumerate(places):
        store_shared(place + offset, found[i * VECTOR_WORDS : (i + 1) * VECTOR_WORDS])


def words_at(places: list, offset) -> list:
    """The words of vectors at addresses in shared memory."""
    vectors = [load_shared(place + offset) for place in places]
    return [words[i] for words in vectors for i in range(VECTOR_WORDS)]
