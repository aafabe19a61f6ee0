"""Quantise attention's output to FP8: one warp for each head of a token, four scales each.

The kernel is the same for sm_90a and sm_100a. Its bits are those of ``Float8Tensor.quantize``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Uint32

from warpspec.common.compile import fake_rows
from warpspec.common.device.narrow import to_float8
from warpspec.common.device.words import load_words, store_words
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.common.launch import Kernel
from warpspec.latent.cache.device.rows import block_scale, unpack
from warpspec.latent.cache.formats import INDEX_FORMATS
from warpspec.latent.cache.quantize import E4M3_NAN, FP32_BIAS, FP32_EXPONENT_BIT
from warpspec.latent.projection.float8 import FP8_BLOCK

WARPS = 8  # warps of a CTA, each with a row
COLUMNS = 512  # numbers of a row
LANE_NUMBERS = COLUMNS // WARP_THREADS
BLOCK_LANES = FP8_BLOCK // LANE_NUMBERS
FORMAT = INDEX_FORMATS["fp8"]  # e4m3 in blocks of FP8_BLOCK with fp32 scales, like the index keys'
FP32_NAN = 0x7FC00000


class Quantize:
    """``Quantize()(...)`` is the host function."""

    @cute.jit
    def __call__(self, rows: cute.Tensor, data: cute.Tensor, scales: cute.Tensor, stream: CUstream):
        """rows: [N, 256] words of two bf16. data: [N, 128] words of four e4m3. scales: fp32 [N, 4]."""
        self.kernel(rows, data, scales).launch(
            grid=(cute.ceil_div(rows.shape[0], WARPS), 1, 1),
            block=(WARPS * WARP_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, rows, data, scales):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, row = thread % WARP_THREADS, block * WARPS + thread // WARP_THREADS
        if row < rows.shape[0]:
            values = unpack(load_words(rows[row, None], lane * (LANE_NUMBERS // 2), LANE_NUMBERS // 2))
            codes, scale = quantize_block(values, BLOCK_LANES)
            store_words(data[row, None], lane * len(codes), codes)
            if lane % BLOCK_LANES == 0:
                scales[row, lane // BLOCK_LANES] = scale


def quantize_block(values: list, lanes: int) -> tuple[list, Float32]:
    """(words of four e4m3, scale) of a block whose numbers, bf16 held in fp32, ``lanes`` adjacent lanes share."""
    bits, finite = block_scale(FORMAT, values, lanes)
    factor = Uint32((2 * FP32_BIAS << FP32_EXPONENT_BIT) - bits).bitcast(Float32)  # 1 / scale
    scaled = [value * factor for value in values]
    codes = [
        Uint32(cutlass.select_(finite, to_float8(scaled[i : i + 4], "e4m3"), Uint32(E4M3_NAN * 0x01010101)))
        for i in range(0, len(values), 4)
    ]
    return codes, Uint32(cutlass.select_(finite, bits, Uint32(FP32_NAN))).bitcast(Float32)


def host_and_arguments(_: None) -> tuple:
    """The host function and its arguments without the stream."""

    def words():
        return fake_rows(Uint32, 2, alignment=VECTOR_BYTES)

    return (Quantize(), words(), words(), fake_rows(Float32, 2))


QUANTIZE = Kernel("fmha.projection.quantize", host_and_arguments)
