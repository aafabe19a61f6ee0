"""Epilogues that write O in FP8, with the bits that ``quantize_output`` makes of the bf16 result.

Each block of 128 columns has a scale. On sm_90a four lanes share a row of a block; on sm_100a a thread has a whole row
of it; the kernel that combines splits gives it to a warp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Uint32

from warpspec.common.device.host import host_function
from warpspec.common.device.wgmma import PAIR, elements, flat, transpose
from warpspec.common.device.words import store_words
from warpspec.common.hardware import QUAD, TMA_ALIGNMENT, WARP_THREADS
from warpspec.common.launch import Kernel
from warpspec.common.operands import FLOAT32, UINT32, Operand, fakes
from warpspec.fmha.combine import CombineConfig
from warpspec.fmha.device.combine import combine_row, divided, launch_on_rows, log_sum
from warpspec.fmha.sm90 import epilogue as sm90
from warpspec.fmha.sm100 import epilogue as sm100
from warpspec.latent.cache.device.rows import to_bf16
from warpspec.latent.projection.float8 import FP8_BLOCK
from warpspec.latent.projection.quantize import quantize_block

CODES = 4  # codes in a word
LOW_HALF = 0xFFFF


# sm_90a.


@dataclass(frozen=True)
class PairFloat8(sm90.Results):
    """Codes and scales of the consumer's columns of a thread's rows."""

    @cute.jit
    def store(self, work, r: cutlass.Constexpr, row, place, factor, empty, operands):
        config, o = work.config, flat(work.mma.o)
        blocks = config.o_columns // FP8_BLOCK
        index = (place.batch, place.query, place.head, None)
        own = elements(o, r)
        count = len(own) // blocks  # columns of a block that the thread has
        for block in cutlass.range_constexpr(blocks):
            values = [
                Float32(cutlass.select_(empty, Float32(0.0), o[i] * factor))
                for i in own[block * count : (block + 1) * count]
            ]
            codes, scale = quantize_block(to_bf16(values), QUAD)
            vectors = gather_columns(codes, row.member)
            if place.in_range:
                number = work.column_group * blocks + block
                for i in cutlass.range_constexpr(len(vectors)):
                    at = number * (FP8_BLOCK // CODES) + (i * QUAD + row.member) * QUAD
                    store_words(operands.o[index], at, vectors[i])
                if row.member == 0:
                    operands.scales[(*index[:-1], number)] = scale


PAIR_FLOAT8 = PairFloat8()


def gather_columns(words: list, member) -> list:
    """Turn a lane's words into vectors of 16 adjacent columns.

    Word w holds columns 8 w + 2 member and the one after it.
    """
    vectors = []
    for first in range(0, len(words), QUAD):
        moved = [Uint32(word) for word in transpose([Int32(w) for w in words[first : first + QUAD]], member)]
        low = [(a & LOW_HALF) | (b << 16) for a, b in zip(moved[::PAIR], moved[1::PAIR], strict=True)]
        high = [
            (a >> 16) | (b & Uint32(LOW_HALF << 16))
            for a, b in zip(moved[::PAIR], moved[1::PAIR], strict=True)
        ]
        vectors.append(low + high)
    return vectors


# sm_100a.


@dataclass(frozen=True)
class RowFloat8(sm100.Results):
    """Codes and scales of a thread's columns of a row."""

    block: ClassVar[int] = FP8_BLOCK

    def store(self, config, operands, tile, row, place, values, number, count) -> None:
        index = (place.batch, place.query, place.head)
        codes, scale = quantize_block(to_bf16([values[i] for i in range(count)]), 1)
        store_words(operands.o[(*index, None)], number * len(codes), codes)
        operands.scales[(*index, number)] = scale


ROW_FLOAT8 = RowFloat8()


# Combining splits.


class CombineFloat8Operands(NamedTuple):
    """Arguments of ``CombineOperands`` (fmha.combine), except o: words of four e4m3 [B, Sq, Hq, 128], and scales: fp32
    [B, Sq, Hq, 4]."""

    partial_o: Annotated[Any, Operand(FLOAT32, 5, lambda c: c.head_dim, TMA_ALIGNMENT)]
    partial_max: Annotated[Any, Operand(FLOAT32, 4)]
    partial_sum: Annotated[Any, Operand(FLOAT32, 4)]
    sink: Annotated[Any, Operand(FLOAT32, 1, when="has_sink")]
    o: Annotated[Any, Operand(UINT32, 4, lambda c: c.head_dim // CODES, TMA_ALIGNMENT)]
    scales: Annotated[Any, Operand(FLOAT32, 4)]
    lse: Annotated[Any, Operand(FLOAT32, 3, when="has_lse")]


class CombineFloat8:
    """``device.combine.Combine`` with results in FP8."""

    def __init__(self, config: CombineConfig):
        self.config = config
        assert config.lanes == WARP_THREADS and config.segment == FP8_BLOCK and config.normalize

    @host_function(CombineFloat8Operands)
    def __call__(self, operands: CombineFloat8Operands, stream: CUstream):
        """Launch the kernel."""
        launch_on_rows(self, operands, stream)

    @cute.kernel
    def kernel(self, operands, row_segments: Int32):
        config, o, scales = self.config, operands.o, operands.scales
        partial = operands.partial_o, operands.partial_max, operands.partial_sum
        found = combine_row(config, *partial, operands.sink, None, row_segments)
        writes, (batch, query, head), column, maximum, total, values, sink = found
        scaled = divided(config, sink, maximum, total, values)
        codes, scale = quantize_block(to_bf16(scaled), WARP_THREADS)
        if writes:
            store_words(o[batch, query, head, None], column, codes)
            if column % WARP_THREADS == 0:
                scales[batch, query, head, column // WARP_THREADS] = scale
            if cutlass.const_expr(config.has_lse):  # noqa: SIM102  (a run-time condition in a compile-time one)
                if column == 0:
                    operands.lse[batch, head, query] = log_sum(maximum, total)


def combine_arguments(config: CombineConfig) -> tuple:
    """The host function of a configuration and its arguments without the stream."""
    return (CombineFloat8(config), *fakes(CombineFloat8Operands, config))


COMBINE_FLOAT8 = Kernel("fmha.gathered.combine", combine_arguments)
