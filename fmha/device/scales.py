"""Scales of FP8 keys and values in a kernel: read for each tile, and FP8 rows in global memory as fp32."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint8, Uint32

from warpspec.common.device.float8 import widened
from warpspec.common.hardware import WORD_BYTES
from warpspec.fmha.device.logits import LogitNumbers
from warpspec.fmha.logits import SMALLEST_SCALE

BF16_BITS, HIGH_HALF = 16, 0xFFFF0000


def score_numbers(config, operands, tile, numbers: LogitNumbers) -> LogitNumbers:
    """The map's numbers for Q times codes of K, for a tile. numbers: for Q times keys."""
    if not config.format.has_k_scale:
        return numbers
    factor = numbers.factor * operands.k_scale[tile.request, tile.kv_head, 0]
    if not config.logits.softcap:
        factor = cute.arch.fmax(factor, SMALLEST_SCALE, nan=True)
    return numbers._replace(factor=factor)


def value_factor(config, operands, tile, factor: Float32) -> Float32:
    """What O of codes of V is multiplied with, for a tile. factor: what O of values is."""
    if not config.format.has_v_scale:
        return factor
    return factor * operands.v_scale[tile.request, tile.kv_head, 0]


@cute.jit
def codes_as_fp32(
    config: cutlass.Constexpr, row: cute.Tensor, size: cutlass.Constexpr, number
) -> cute.Tensor:
    """Registers (size) fp32 with the number-th vector of a row (D) of codes in global memory."""
    codes = cute.make_rmem_tensor(max(size, WORD_BYTES), Uint8)
    values = cute.make_rmem_tensor(size, Float32)
    if cutlass.const_expr(size < WORD_BYTES):
        codes.fill(0)
        for i in cutlass.range_constexpr(size):
            codes[i] = row[number * size + i]
    else:
        cute.autovec_copy(cute.local_tile(row, (size,), (number,)), codes)
    words = cute.recast_tensor(codes, Uint32)
    wide = widened([words[i] for i in range(cute.size(words))], config.format.kv_format, "bfloat16")
    for i in cutlass.range_constexpr(size):
        word = wide[i // 2]
        bits = word & Uint32(HIGH_HALF) if i % 2 else word << BF16_BITS
        values[i] = bits.bitcast(Float32)
    return values
