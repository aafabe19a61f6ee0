"""Rows of 16-bit numbers in a group of lanes: norm and rotation. Lanes hold words of two numbers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint32

from warpspec.common.device.words import load_words
from warpspec.common.hardware import WARP_THREADS

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32, "int32": Int32, "int64": Int64}
HALF_BITS, HIGH_HALF = 16, 0xFFFF0000


def unpack(words: cute.Tensor, dtype: str) -> list:
    """fp32 numbers of words that hold two 16-bit ones each."""
    if dtype == "float16":
        numbers = cute.recast_tensor(words, Float16)
        return [numbers[i].to(Float32) for i in range(cute.size(numbers))]
    values = []
    for i in range(cute.size(words)):
        values.append((words[i] << HALF_BITS).bitcast(Float32))
        values.append((words[i] & Uint32(HIGH_HALF)).bitcast(Float32))
    return values


def pack(values: list, dtype: str) -> cute.Tensor:
    """Words of two 16-bit numbers, rounded to nearest, ties to even."""
    numbers = cute.make_rmem_tensor(len(values), DTYPES[dtype])
    for i, value in enumerate(values):
        numbers[i] = value.to(DTYPES[dtype])
    return cute.recast_tensor(numbers, Uint32)


def multiply(x: Float32, y: Float32) -> Float32:
    """fl(x y); never becomes part of a fused multiply-add."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


@cute.jit
def load_row(row: cute.Tensor, layout: cutlass.Constexpr, lane: Int32, live: Boolean) -> cute.Tensor:
    """The lane's words of a row (WORD); zeros if it is not live."""
    words = cute.make_rmem_tensor(layout.words, Uint32)
    words.fill(0)
    if live:
        loaded = load_words(row, lane * layout.words, layout.words)
        for i in cutlass.range_constexpr(layout.words):
            words[i] = loaded[i]
    return words


@cute.jit
def load_numbers(row: cute.Tensor, count: cutlass.Constexpr, tile: Int32) -> cute.Tensor:
    """fp32 of ``count`` neighbouring numbers of row, the tile-th such."""
    loaded = cute.make_rmem_tensor(count, row.element_type)
    cute.autovec_copy(cute.local_tile(row, (count,), (tile,)), loaded)
    numbers = cute.make_rmem_tensor(count, Float32)
    for i in cutlass.range_constexpr(count):
        numbers[i] = loaded[i].to(Float32)
    return numbers


@cute.jit
def load_weights(weight: cute.Tensor, layout: cutlass.Constexpr, lane: Int32) -> cute.Tensor:
    """The norm's weights, fp32, of the lane's numbers; zeros beyond the row."""
    weights = cute.make_rmem_tensor(layout.numbers, Float32)
    weights.fill(0.0)
    if lane < layout.used_lanes:
        loaded = load_numbers(weight, layout.numbers, lane)
        for i in cutlass.range_constexpr(layout.numbers):
            weights[i] = loaded[i]
    return weights


def normalize(words, weights, layout, dtype: str, eps) -> cute.Tensor:
    """``reference.rms_norm`` of the group's row."""
    values = unpack(words, dtype)
    squares = values[0] * values[0]
    for value in values[1:]:
        squares += value * value
    distance = 1
    while distance < layout.lanes:
        squares += cute.arch.shuffle_sync_bfly(squares, distance)
        distance *= 2
    factor = cute.math.rsqrt(squares * (1.0 / layout.dim) + eps, approx=True)
    return pack([value * factor * weights[i] for i, value in enumerate(values)], dtype)


class Angles:
    """Cosines and sines for the numbers of a lane, and where their partners are.

    cos, sin: (n) fp32, or (n/2) where neighbours are pairs. Otherwise a number's partner is in another lane: ``source``
    is that lane, and sines have the sign with which the partner enters. turned: whether the lane's numbers are rotated.
    """

    def __init__(self, cos, sin, source, turned, interleaved: bool):
        self.cos, self.sin, self.source, self.turned = cos, sin, source, turned
        self.interleaved = interleaved

    def rotate(self, words, dtype: str) -> cute.Tensor:
        """``reference.rotate`` of the group's row; lanes that are not rotated keep their bits."""
        values, out = unpack(words, dtype), []
        if self.interleaved:
            for i in range(len(values) // 2):
                first, second, cos, sin = values[2 * i], values[2 * i + 1], self.cos[i], self.sin[i]
                out.append(multiply(first, cos) - multiply(second, sin))
                out.append(multiply(second, cos) + multiply(first, sin))
        else:
            across = cute.make_rmem_tensor(cute.size(words), Uint32)
            for i in range(cute.size(words)):
                across[i] = Uint32(cute.arch.shuffle_sync(words[i], self.source))
            for i, (value, partner) in enumerate(zip(values, unpack(across, dtype), strict=True)):
                out.append(multiply(value, self.cos[i]) + multiply(partner, self.sin[i]))
        packed = pack(out, dtype)
        kept = cute.make_rmem_tensor(cute.size(words), Uint32)
        for i in range(cute.size(words)):
            kept[i] = Uint32(cutlass.select_(self.turned, packed[i], words[i]))
        return kept


@cute.jit
def load_angles(
    cos_sin: cute.Tensor,
    position,
    rotated: cutlass.Constexpr,
    interleaved: cutlass.Constexpr,
    layout: cutlass.Constexpr,
    lane: Int32,
) -> Angles:
    """The angles of a position; NaN if the table lacks it. lane: within the group."""
    count = layout.numbers // 2 if interleaved else layout.numbers
    turned = Boolean(lane < rotated // layout.numbers)
    half = rotated // 2 // count  # tiles of cosines, then as many of sines
    tile, source, sign = lane, lane, Float32(1.0)
    if cutlass.const_expr(not interleaved):
        low = Boolean(lane < half)
        tile = Int32(cutlass.select_(low, lane, lane - half))
        source = Int32(cutlass.select_(low, lane + half, lane - half))
        sign = Float32(cutlass.select_(low, Float32(-1.0), Float32(1.0)))
        source = Int32(cutlass.select_(turned, source, lane))
    cos, sin = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
    cos.fill(Float32.nan)
    sin.fill(Float32.nan)
    if turned & Boolean(position >= 0) & Boolean(position < cos_sin.shape[0]):
        row = cos_sin[Int32(position), None]
        cosines, sines = load_numbers(row, count, tile), load_numbers(row, count, half + tile)
        for i in cutlass.range_constexpr(count):
            cos[i], sin[i] = cosines[i], sines[i] * sign
    thread, _, _ = cute.arch.thread_idx()
    first = thread % WARP_THREADS // layout.lanes * layout.lanes  # the group's first lane of the warp
    return Angles(cos, sin, first + source, turned, interleaved)
