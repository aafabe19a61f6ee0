"""Scales of FP8 and NVFP4 keys and values in a kernel: read for each tile, and their rows in global memory as fp32."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint8, Uint32

from warpspec.common.device import float4
from warpspec.common.device.nvfp4 import CODES_PER_WORD
from warpspec.common.hardware import WORD_BYTES
from warpspec.common.kv_formats import swizzled_place
from warpspec.common.nvfp4 import NVFP4_BLOCK
from warpspec.fmha.device.codes import codes_of
from warpspec.fmha.device.logits import LogitNumbers, with_factor

BF16_BITS, HIGH_HALF = 16, 0xFFFF0000


def is_nvfp4(config) -> bool:
    """Whether K and V have block scales."""
    return config.format.kv_block > 0


def unit_of(config) -> float:
    """Factor from the numbers that codes are converted to, to their values."""
    return float4.UNIT if is_nvfp4(config) else 1.0


def score_numbers(config, operands, tile, numbers: LogitNumbers) -> LogitNumbers:
    """A tile's map numbers for Q times codes of K. numbers: those for Q times keys."""
    if not (config.format.has_k_scale or is_nvfp4(config)):
        return numbers
    factor = numbers.factor * unit_of(config)
    if config.format.has_k_scale:
        factor = factor * operands.k_scale[tile.request, tile.kv_head, 0]
    return with_factor(config.logits, numbers, factor)


def value_scale(config, operands, tile) -> Float32 | None:
    """A tile's v_scale, or None if there is none."""
    return operands.v_scale[tile.request, tile.kv_head, 0] if config.format.has_v_scale else None


def value_factor(config, factor: Float32, scale: Float32 | None) -> Float32:
    """A tile's factor of O computed from codes of V. factor: the factor of O computed from values. scale:
    ``value_scale``."""
    if is_nvfp4(config):
        factor = factor * unit_of(config)
    return factor if scale is None else factor * scale


@dataclass(frozen=True)
class KvRow:
    """A row of codes of K or V in global memory. codes: (D), for NVFP4 (D/2). For NVFP4, blocks: the block scales of
    all rows of its page or batch row, (KEY, BLOCK); row: its number there."""

    config: object
    codes: cute.Tensor
    blocks: cute.Tensor | None = None
    row: Int32 | int = 0
    swizzled: bool = False

    def vector(self, size: int, number) -> cute.Tensor:
        """Registers (size) fp32 with vector ``number`` of the row; times ``unit_of`` they are the values."""
        if self.blocks is None:
            return codes_as_fp32(self.config, self.codes, size, number)
        return nvfp4_as_fp32(self, size, number)

    def scale(self, block) -> Uint8:
        """The e4m3 scale of a block."""
        row = self.row
        if self.swizzled:
            row, block = swizzled_place(row, block, self.blocks.shape[1])
        return self.blocks[row, block]


def kv_row(config, operands, ring: str, where, kv_head) -> KvRow:
    """The row of K or V ("k" or "v") at a place. where: from ``pages.address_of``."""
    place, row = where
    codes = (operands.v if ring == "v" else operands.k)[place, row, kv_head, None]
    if not is_nvfp4(config):
        return KvRow(config, codes)
    if ring == "k" or config.format.shared_kv:
        return KvRow(config, codes, operands.k_block_scales[place, None, kv_head, None], row)
    return KvRow(
        config, codes, operands.v_block_scales[place, None, kv_head, None], row, config.format.swizzled
    )


@cute.jit
def nvfp4_as_fp32(row: cutlass.Constexpr, size: cutlass.Constexpr, number) -> cute.Tensor:
    """``KvRow.vector`` for NVFP4. size: 2, 4 or 8 numbers, or whole blocks."""
    values = cute.make_rmem_tensor(size, Float32)
    count = min(size, CODES_PER_WORD)  # of a word
    scale = None
    for first in cutlass.range_constexpr(0, size, count):
        if cutlass.const_expr(first % NVFP4_BLOCK == 0):
            block = (number * size + first) // NVFP4_BLOCK
            (scale,) = float4.scales_twice(Uint32(row.scale(block)), 1)
        codes = cute.make_rmem_tensor(WORD_BYTES, Uint8)
        codes.fill(0)
        source = cute.local_tile(row.codes, (count // 2,), ((number * size + first) // count,))
        cute.autovec_copy(source, cute.local_tile(codes, (count // 2,), (0,)))
        word = cute.recast_tensor(codes, Uint32)[0]
        pairs = cute.make_rmem_tensor(CODES_PER_WORD // 2, Uint32)
        for i, pair in enumerate(float4.fp16_of_codes(word)):
            pairs[i] = float4.multiply_fp16x2(pair, scale)
        halves = cute.recast_tensor(pairs, Float16)
        order = [n for pair in float4.PAIRS for n in pair]
        for n in cutlass.range_constexpr(count):
            values[first + n] = halves[order.index(n)].to(Float32)
    return values


@cute.jit
def codes_as_fp32(
    config: cutlass.Constexpr, row: cute.Tensor, size: cutlass.Constexpr, number
) -> cute.Tensor:
    """Registers (size) fp32 with vector ``number`` of a row (D) of codes in global memory."""
    codes = cute.make_rmem_tensor(max(size, WORD_BYTES), Uint8)
    values = cute.make_rmem_tensor(size, Float32)
    if cutlass.const_expr(size < WORD_BYTES):
        codes.fill(0)
        for i in cutlass.range_constexpr(size):
            codes[i] = row[number * size + i]
    else:
        cute.autovec_copy(cute.local_tile(row, (size,), (number,)), codes)
    words = cute.recast_tensor(codes, Uint32)
    wide = codes_of(config, "bfloat16").in_order([words[i] for i in range(cute.size(words))], None)
    for i in cutlass.range_constexpr(size):
        word = wide[i // 2]
        bits = word & Uint32(HIGH_HALF) if i % 2 else word << BF16_BITS
        values[i] = bits.bitcast(Float32)
    return values
