"""Round rows to NVFP4 for "w4a4" on sm_90a, as activations of the GEMM: codes times block scales, exact in bf16.

One CTA rounds one row. Codes and scales are those of ``nvfp4.quantize``, and so of sm_100a's kernels. The results leave
out the global scale: GEMM 1's epilogue applies the tokens' global scales (one a row), and w2's global scale includes
the scales between the GEMMs (one an expert). Rounding to e2m1 uses arithmetic, because sm_90a has no conversion
instruction for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32

from warpspec.common.compile import fake_rows
from warpspec.common.device.nvfp4 import absolute, divide_any, from_e4m3, largest_magnitude, to_e4m3
from warpspec.common.hardware import QUAD, VECTOR_BYTES, WARP_THREADS
from warpspec.common.launch import Kernel, Target
from warpspec.common.nvfp4 import AMAX_TO_GLOBAL, E2M1_MAX, E4M3_MAX, MIN_GLOBAL_SCALE, NVFP4_BLOCK
from warpspec.moe.streamed import CHUNK, padded_k

THREADS = 128
PAIR = 2
BEYOND_MAX = 8.0  # quotients are clamped to it; any value above E2M1_MAX would do


@dataclass(frozen=True)
class RoundConfig:
    """Configuration of the kernel.

    tokens: rows are bf16 tokens in their own order, and the kernel writes a global scale for each. Otherwise rows are
    GEMM 1's fp32 results in the kernel's order, with one scale for each expert.
    """

    tokens: bool


class RoundRows:
    """``RoundRows(config)(...)`` is the host function of ``round_tokens`` and ``round_middle``."""

    def __init__(self, config: RoundConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        scale: cute.Tensor,
        offsets: cute.Tensor | None,
        out: cute.Tensor,
        stream: CUstream,
    ):
        """Launch the kernel.

        rows: [T, K] or [R, padded K]. scale: fp32 [T], written, or [E]. offsets: [E]. out: [T or R, padded K].
        """
        self.kernel(rows, scale, offsets, out).launch(
            grid=(rows.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, rows, scale, offsets, out):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        largest = smem.allocate_tensor(Uint32, cute.make_layout(THREADS // WARP_THREADS), byte_alignment=4)
        blocks = out.shape[1] // NVFP4_BLOCK
        if cutlass.const_expr(config.tokens):
            amax = Float32(0.0)
            for block in cutlass.range(thread, blocks, THREADS, unroll=1):
                values = load_block(config, rows[row, None], block)
                amax = cute.arch.fmax(amax, largest_magnitude(values), nan=True)
            # Magnitudes order like their bits, with NaN last.
            bits = Uint32(cute.arch.warp_redux_sync(amax.bitcast(Uint32), "max"))
            if thread % WARP_THREADS == 0:
                largest[thread // WARP_THREADS] = bits
            cute.arch.sync_threads()
            for warp in cutlass.range_constexpr(THREADS // WARP_THREADS):
                bits = cutlass.max(bits, largest[warp])
            amax = bits.bitcast(Float32)
            own = cute.arch.fmax(divide_any(amax, Float32(AMAX_TO_GLOBAL)), MIN_GLOBAL_SCALE) + amax * 0.0
            if thread == 0:
                scale[row] = own
            round_row(config, rows[row, None], out[row, None], own, blocks, thread)
        else:
            expert = expert_of(offsets, row, thread)
            if expert < offsets.shape[0]:
                round_row(config, rows[row, None], out[row, None], Float32(scale[expert]), blocks, thread)


@cute.jit
def expert_of(offsets: cute.Tensor, row, thread) -> Int32:
    """The expert of a row: how many experts' rows end before it. Executed by whole warps."""
    before = Int32(0)
    for first in cutlass.range(0, offsets.shape[0], WARP_THREADS, unroll=1):
        expert = first + thread % WARP_THREADS
        if expert < offsets.shape[0]:
            before += Int32(Int32(offsets[expert]) <= row)
    return Int32(cute.arch.warp_redux_sync(before, "add"))


@cute.jit
def round_row(config: cutlass.Constexpr, row, out, global_scale: Float32, blocks, thread):
    """Write the row's codes times block scales to out, in the kernel's order. NaN where a block's scale is NaN."""
    for block in cutlass.range(thread, blocks, THREADS, unroll=1):
        values = load_block(config, row, block)
        amax = largest_magnitude(values)
        quotient = divide_any(divide_any(amax, Float32(E2M1_MAX)), global_scale)
        code = to_e4m3(cute.arch.fmin(quotient, E4M3_MAX, nan=True) + amax * 0.0)  # Inf * 0 is NaN
        block_scale = from_e4m3(code)
        divisor = block_scale * global_scale
        empty = Boolean(divisor == 0.0)
        limit = Float32(BEYOND_MAX) * divisor
        pairs = cute.make_rmem_tensor(NVFP4_BLOCK, BFloat16)
        for i in cutlass.range_constexpr(NVFP4_BLOCK):
            cut = cute.arch.fmax(cute.arch.fmin(values[i], limit), -limit)
            value = to_e2m1_value(divide_any(cut, divisor)) * block_scale
            pairs[i] = Float32(cutlass.select_(empty, Float32(0.0), value)).to(BFloat16)
        for pair in cutlass.range_constexpr(NVFP4_BLOCK // PAIR):
            source = cute.local_tile(pairs, (PAIR,), (pair,))
            cute.autovec_copy(source, cute.local_tile(out, (PAIR,), (place(block, pair),)))


@cute.jit
def load_block(config: cutlass.Constexpr, row: cute.Tensor, block) -> cute.Tensor:
    """(16) fp32 of a block of the row's columns; 0 past the last."""
    values = cute.make_rmem_tensor(NVFP4_BLOCK, Float32)
    if cutlass.const_expr(config.tokens):
        values.fill(0.0)
        if block * NVFP4_BLOCK < row.shape[0]:
            loaded = cute.make_rmem_tensor(NVFP4_BLOCK, BFloat16)
            cute.autovec_copy(cute.local_tile(row, (NVFP4_BLOCK,), (block,)), loaded)
            values.store(loaded.load().to(Float32))
    else:
        for pair in cutlass.range_constexpr(NVFP4_BLOCK // PAIR):
            target = cute.local_tile(values, (PAIR,), (pair,))
            cute.autovec_copy(cute.local_tile(row, (PAIR,), (place(block, pair),)), target)
    return values


def place(block, pair: int):
    """The place of a pair of a block's columns in a row of the kernel's order (``streamed.column_order``), in pairs."""
    of_block = CHUNK // QUAD
    per_sixteen, per_half = of_block // PAIR, QUAD
    chunk, q = block // QUAD, block % QUAD
    return chunk * (CHUNK // PAIR) + pair // PAIR * per_sixteen + pair % PAIR * per_half + q


def to_e2m1_value(x: Float32) -> Float32:
    """The nearest e2m1 number, at most 6 in magnitude; ties go to the even code.

    Steps are 1/2 below 2, 1 below 4, else 2.
    """
    size = absolute(x)
    below_two, below_four = Boolean(size < 2.0), Boolean(size < 4.0)
    steps = Float32(
        cutlass.select_(below_two, Float32(2.0), cutlass.select_(below_four, Float32(1.0), Float32(0.5)))
    )
    step = Float32(
        cutlass.select_(below_two, Float32(0.5), cutlass.select_(below_four, Float32(1.0), Float32(2.0)))
    )
    rounded = cute.arch.inline_ptx(
        "cvt.rni.f32.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x * steps]
    )
    rounded = rounded * step
    return cute.arch.fmax(cute.arch.fmin(rounded, Float32(E2M1_MAX)), Float32(-E2M1_MAX))


def _host_and_arguments(config: RoundConfig) -> tuple:
    """The host function and its arguments without the stream."""
    rows = fake_rows(BFloat16 if config.tokens else Float32, 2, alignment=VECTOR_BYTES)
    offsets = None if config.tokens else fake_rows(Int32, 1)
    return (
        RoundRows(config),
        rows,
        fake_rows(Float32, 1),
        offsets,
        fake_rows(BFloat16, 2, alignment=VECTOR_BYTES),
    )


round_kernel = Kernel("moe.round_rows", _host_and_arguments)  # by RoundConfig


def round_tokens(x: torch.Tensor, target: Target) -> tuple[torch.Tensor, torch.Tensor, object]:
    """Round tokens x, bf16 [T, K], K a multiple of 16, in one launch.

    Returns (activations bf16 [T, padded K] without the rows' global scales, the scales fp32 [T], the simulator's report
    or None).
    """
    out = x.new_empty(len(x), padded_k(x.shape[1]))
    scale = x.new_empty(len(x), dtype=torch.float32)
    return out, scale, round_kernel.run(RoundConfig(True), target, x, scale, None, out)


def round_middle(
    h: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor, target: Target
) -> tuple[torch.Tensor, object]:
    """Round GEMM 1's results h, fp32 [R, padded I] in the kernel's order, in one launch.

    offsets: int32 [E]; rows from the last end on are not touched. scale: fp32 [E]. Returns (activations bf16, shaped
    like h, without the experts' scales; the simulator's report or None).
    """
    out = h.new_empty(h.shape, dtype=torch.bfloat16)
    return out, round_kernel.run(RoundConfig(False), target, h, scale, offsets, out)
