"""Rows of latent pools by slot, brought together in bf16: keys for the attention kernels that read dense ones.

A warp a row. What is not there becomes zeros, and its bias -inf, which hides it. The same for sm_90a and sm_100a.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from warpspec.common.compile import fake_rows
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.fmha.gathered.config import MAX_KEY_SETS, RowsConfig
from warpspec.fmha.gathered.convert import to_bf16
from warpspec.fmha.gathered.gather import load_vector, load_word
from warpspec.fmha.gathered.task import WORD_BYTES, DeviceKeySet, place_of

WARPS = 8  # of a CTA, a row each
VECTOR_WORDS = 4


class GatherRows:
    """``GatherRows(config)(...)`` is the host function."""

    def __init__(self, config: RowsConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        bias: cute.Tensor,
        pool0: cute.Tensor,
        slots0: cute.Tensor,
        lengths0: cute.Tensor | None,
        page_size0: Int32,
        pool1: cute.Tensor | None,
        slots1: cute.Tensor | None,
        lengths1: cute.Tensor | None,
        page_size1: Int32,
        pool2: cute.Tensor | None,
        slots2: cute.Tensor | None,
        lengths2: cute.Tensor | None,
        page_size2: Int32,
        stream: CUstream,
    ):
        """rows: [T, K, 256] words of two bf16, K that of all key sets together. bias: fp32 [T, K]. Sets as in
        ``task.DeviceKeySet``."""
        sets = (
            DeviceKeySet(pool0, slots0, lengths0, page_size0),
            DeviceKeySet(pool1, slots1, lengths1, page_size1),
            DeviceKeySet(pool2, slots2, lengths2, page_size2),
        )[: self.config.sets]
        tokens, keys, _ = rows.shape
        self.kernel(rows, bias, sets).launch(
            grid=(cute.ceil_div(keys, WARPS), tokens, 1), block=(WARPS * WARP_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, rows, bias, sets):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, token, _ = cute.arch.block_idx()
        lane, key = thread % WARP_THREADS, block * WARPS + thread // WARP_THREADS
        if key < rows.shape[1]:
            address, scale_at, here = Int64(0), Int32(0), Boolean(False)
            begin = Int32(0)
            for number in cutlass.range_constexpr(config.sets):
                each = sets[number]
                at = key - begin
                if (at >= 0) & (at < each.length(token)):
                    address, scale_at, here = place_of(config.fmt, each, Int32(each.slots[token, at]))
                begin = begin + each.slots.shape[1]
            out = read_row(config, address, scale_at, Int32(here), lane)
            target = rows[token, key, None]
            for half in cutlass.range_constexpr(2):
                vector = cute.make_rmem_tensor(VECTOR_WORDS, Uint32)
                for i in cutlass.range_constexpr(VECTOR_WORDS):
                    vector[i] = out[half * VECTOR_WORDS + i]
                cute.autovec_copy(vector, cute.local_tile(target, (VECTOR_WORDS,), (2 * lane + half,)))
            if lane == 0:
                bias[token, key] = Float32(cutlass.select_(here, Float32(0.0), -Float32.inf))


@cute.jit
def read_row(config: cutlass.Constexpr, address, scale_at, present, lane) -> list:
    """The lane's 16 numbers, 8 words of two bf16."""
    fmt = config.fmt
    words = cute.make_rmem_tensor((VECTOR_WORDS, 2), Uint32)
    count = fmt.dim // WARP_THREADS
    first = lane * count  # number
    quantised = Int32(fmt.values if cutlass.const_expr(fmt.block > 0) else 0)
    in_tail = Boolean(first >= quantised)
    offset = Int32(
        cutlass.select_(in_tail, fmt.tail_offset * int(fmt.block > 0) + (first - quantised) * 2, first)
    )
    load_vector(words, 0, address + Int64(offset), 0, present)
    second = Int32(cutlass.select_(in_tail, present, Int32(0)))
    load_vector(words, 1, address + Int64(offset), VECTOR_BYTES, second)
    plain = [words[i, half] for half in range(2) for i in range(VECTOR_WORDS)]
    if cutlass.const_expr(fmt.block == 0):
        return plain
    scales_at = scale_at + first // fmt.block // WORD_BYTES * WORD_BYTES
    scales = load_word(address + Int64(scales_at), present)
    scale = (scales >> Uint32(8 * (first // fmt.block % WORD_BYTES))) & Uint32(0xFF)
    converted = to_bf16(plain[:VECTOR_WORDS], scale)
    return [Uint32(cutlass.select_(in_tail, a, b)) for a, b in zip(plain, converted, strict=True)]


def rows_arguments(config: RowsConfig) -> tuple:
    """The host function of a configuration and its arguments but the stream."""
    sets = []
    for number in range(MAX_KEY_SETS):
        there = number < config.sets
        sets += [
            fake_rows(Uint32, 2, alignment=VECTOR_BYTES) if there else None,
            fake_rows(Int32, 2) if there else None,
            fake_rows(Int32, 1) if there and config.lengths[number] else None,
            Int32(1),
        ]
    return (GatherRows(config), fake_rows(Uint32, 3, alignment=VECTOR_BYTES), fake_rows(Float32, 2), *sets)
