"""A row of a pool in the registers of one warp: norm, rotation, Hadamard transform, quantisation and store.

Lane l of a row of 32 n numbers holds numbers l n to (l + 1) n - 1 in fp32. The stored bits are those of
``quantize.quantize_rows``.
"""

from __future__ import annotations

import struct

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32

from warpspec.common.device.narrow import MAGNITUDE, e2m1_codes, to_float8
from warpspec.common.device.words import store_words
from warpspec.common.hardware import WARP_THREADS, WORD_BYTES
from warpspec.latent.cache.quantize import (
    E2M1_NAN_CODE,
    E4M3_NAN,
    FP32_MANTISSA,
    LARGEST,
    UE8M0_NAN,
)

HALF_BITS, HIGH_HALF = 16, 0xFFFF0000
INFINITY_BITS = 0x7F800000
FP32_EXPONENT_BIT, FP32_BIAS = 23, 127


def unpack(words: cute.Tensor) -> list:
    """fp32 numbers of words that hold two bf16 each."""
    values = []
    for i in range(cute.size(words)):
        values.append((words[i] << HALF_BITS).bitcast(Float32))
        values.append((words[i] & Uint32(HIGH_HALF)).bitcast(Float32))
    return values


def pack(values: list) -> list:
    """Words of two bf16, rounded to nearest, ties to even."""
    words = []
    for i in range(0, len(values), 2):
        pair = cute.make_rmem_tensor(2, BFloat16)
        pair[0], pair[1] = values[i].to(BFloat16), values[i + 1].to(BFloat16)
        words.append(cute.recast_tensor(pair, Uint32)[0])
    return words


def join(values: list) -> list:
    """Words of two bf16 numbers that are held in fp32; keeps their bits, also those of NaN."""
    return [
        (values[i].bitcast(Uint32) >> HALF_BITS) | (values[i + 1].bitcast(Uint32) & Uint32(HIGH_HALF))
        for i in range(0, len(values), 2)
    ]


def to_bf16(values: list) -> list:
    """fp32 values rounded to bf16."""
    return [value.to(BFloat16).to(Float32) for value in values]


def normalize(values: list, eps, weights: list | None) -> list:
    """``reference.rms_norm`` of the warp's row, in fp32. weights: fp32, for the lane's numbers."""
    squares = values[0] * values[0]
    for value in values[1:]:
        squares += value * value
    for distance in (1, 2, 4, 8, 16):
        squares += cute.arch.shuffle_sync_bfly(squares, distance)
    factor = cute.math.rsqrt(squares * (1.0 / (WARP_THREADS * len(values))) + eps, approx=True)
    scaled = [value * factor for value in values]
    if weights is None:
        return scaled
    return [value * weight for value, weight in zip(scaled, weights, strict=True)]


@cute.jit
def load_angles(
    cos_sin: cute.Tensor, position: Int32, lane: Int32, numbers: cutlass.Constexpr
) -> cute.Tensor:
    """(PAIR, 2): cosines and sines of the lane's pairs of ``numbers``.

    Pairs that are not rotated get (1, 0). All pairs get NaN at a position beyond the table.
    """
    pairs = numbers // 2
    rotated = cos_sin.shape[1]  # numbers of a row, known when the kernel is compiled
    first = lane * pairs - (WARP_THREADS * numbers - rotated) // 2  # index among the rotated pairs
    angles = cute.make_rmem_tensor((pairs, 2), Float32)
    for i in cutlass.range_constexpr(pairs):
        angles[i, 0], angles[i, 1] = Float32(1.0), Float32(0.0)
    if first >= 0:
        inside = Boolean(position >= 0) & Boolean(position < cos_sin.shape[0])
        if inside:
            for part in cutlass.range_constexpr(2):
                source = cute.local_tile(
                    cos_sin[position, None], (pairs,), (first // pairs + part * (rotated // 2 // pairs),)
                )
                cute.autovec_copy(source, angles[None, part])
        else:
            angles.fill(Float32.nan)
    return angles


def rotate(values: list, angles: cute.Tensor, back: bool = False) -> list:
    """Rotate neighbouring numbers by their angles, in fp32; numbers that are not rotated keep their value."""
    out = []
    for i in range(len(values) // 2):
        cos, sin = angles[i, 0], angles[i, 1]
        if back:
            sin = -sin
        first, second = values[2 * i], values[2 * i + 1]
        out.append(first * cos - second * sin)
        out.append(second * cos + first * sin)
    return out


def hadamard_transform(values: list, lane: Int32) -> list:
    """``reference.hadamard_transform`` of the warp's row; adds in the reference's order."""
    count, apart = len(values), 1
    while apart < count:
        out = list(values)
        for i in range(count):
            if not i & apart:
                out[i], out[i | apart] = values[i] + values[i | apart], values[i] - values[i | apart]
        values, apart = out, 2 * apart
    for distance in (1, 2, 4, 8, 16):
        upper = Boolean((lane & distance) != 0)
        others = [Float32(cute.arch.shuffle_sync_bfly(value, distance)) for value in values]
        values = [
            Float32(cutlass.select_(upper, other - value, value + other))
            for value, other in zip(values, others, strict=True)
        ]
    return [value * (count * WARP_THREADS) ** -0.5 for value in values]


@cute.jit
def store_row(
    fmt: cutlass.Constexpr,
    pool: cute.Tensor,
    page_size: Int32,
    slot: Int32,
    values: cutlass.Constexpr,
    lane: Int32,
):
    """Quantise the warp's row and store it at ``slot`` of a pool [pages, words]; store nothing if the slot is not
    there.

    values: list of the lane's numbers, bf16 numbers held in fp32.
    """
    if (slot >= 0) & (slot < pool.shape[0] * page_size):
        page, row = pool[slot // page_size, None], slot % page_size
        data = row * (fmt.row_stride // WORD_BYTES)
        if cutlass.const_expr(fmt.value == "bf16"):
            words = join(values)
            store_words(page, data + lane * len(words), words)
        else:
            store_quantized(fmt, page, page_size, row, data, values, lane)


@cute.jit
def store_quantized(
    fmt: cutlass.Constexpr, page: cute.Tensor, page_size, row, data, values: cutlass.Constexpr, lane
):
    """``store_row`` for a format that quantises a row's first numbers.

    page: (WORD); data: index of the row's first word.
    """
    count = len(values)
    lanes = fmt.block // count  # lanes of a block
    bits, finite = block_scale(fmt, values, lanes)
    factor = Uint32((2 * FP32_BIAS << FP32_EXPONENT_BIT) - bits).bitcast(Float32)  # 1 / scale
    scaled = [value * factor for value in values]
    if cutlass.const_expr(fmt.value == "e4m3"):
        codes = [
            Uint32(
                cutlass.select_(finite, to_float8(scaled[i : i + 4], "e4m3"), Uint32(E4M3_NAN * 0x01010101))
            )
            for i in range(0, count, 4)
        ]
        if lane * count < fmt.values:
            store_words(page, data + lane * len(codes), codes)
    else:
        half = e2m1_codes(scaled)
        half = Uint32(cutlass.select_(finite, half, Uint32(E2M1_NAN_CODE * 0x1111)))
        word = half | (Uint32(cute.arch.shuffle_sync_down(half, 1)) << HALF_BITS)
        if lane % 2 == 0:
            store_words(page, data + lane // 2, [word])
    if cutlass.const_expr(fmt.tail > 0):
        tail = join(values)
        first = fmt.values // count  # the first lane of the bf16 tail
        if lane >= first:
            at = data + fmt.tail_offset // WORD_BYTES + (lane - first) * len(tail)
            store_words(page, at, tail)
    store_scales(fmt, page, page_size, row, bits, finite, lanes, lane)


def block_scale(fmt, values: list, lanes: int):
    """(fp32 bits of the scale, whether the block is finite), known to all ``lanes`` lanes of a block."""
    amax = values[0].bitcast(Uint32) & Uint32(MAGNITUDE)  # magnitudes order like their bits, NaN last
    for value in values[1:]:
        amax = cutlass.max(amax, value.bitcast(Uint32) & Uint32(MAGNITUDE))
    distance = 1
    while distance < lanes:
        amax = cutlass.max(amax, Uint32(cute.arch.shuffle_sync_bfly(amax, distance)))
        distance *= 2
    finite = Boolean(amax < Uint32(INFINITY_BITS))
    least = struct.unpack("<I", struct.pack("<f", fmt.min_amax))[0]
    amax = Uint32(
        cutlass.select_(finite, cutlass.max(amax, Uint32(least)), Uint32(FP32_BIAS << FP32_EXPONENT_BIT))
    )
    exponent, mantissa = LARGEST[fmt.value]
    biased = ((amax + Uint32(FP32_MANTISSA - mantissa)) >> FP32_EXPONENT_BIT) - Uint32(exponent)
    return biased << FP32_EXPONENT_BIT, finite


@cute.jit
def store_scales(fmt: cutlass.Constexpr, page, page_size, row, bits, finite, lanes: cutlass.Constexpr, lane):
    """Store a row's scales and their padding. bits: the scale of the lane's block."""
    base = page_size * (fmt.data_bytes // WORD_BYTES) if cutlass.const_expr(fmt.apart) else Int32(0)
    at = base + row * (fmt.scale_stride // WORD_BYTES)
    if cutlass.const_expr(fmt.scale == "fp32"):
        word = Uint32(cutlass.select_(finite, bits, Uint32(0x7FC00000)))
        if lane == 0:
            store_words(page, at, [word])
    else:
        byte = Uint32(cutlass.select_(finite, bits >> FP32_EXPONENT_BIT, Uint32(UE8M0_NAN)))
        byte = Uint32(cutlass.select_(Boolean(lane < fmt.blocks * lanes), byte, Uint32(0)))  # padding
        words = fmt.scale_bytes // WORD_BYTES
        word = Uint32(0)
        for i in cutlass.range_constexpr(WORD_BYTES):
            source = (lane % words * WORD_BYTES + i) * lanes
            word = word | (Uint32(cute.arch.shuffle_sync(byte, source)) << (8 * i))
        if lane < words:
            page[at + lane] = word
