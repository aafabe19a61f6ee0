"""Dequantises keys and values into dense 16-bit tensors (``fmha.expand``), without k_scale and v_scale.

A thread takes VECTOR numbers of a row. Neighbouring threads take neighbouring vectors, through a key's heads one after
another, so that their writes are contiguous. In CTA (x, y), y chooses between K and V, and x chooses the batch row and
the vectors, because only a grid's first dimension holds any number of batch rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint8, Uint32

from warpspec.common.device.host import host_function
from warpspec.common.device.words import scaled_pair
from warpspec.fmha.device.codes import codes_of
from warpspec.fmha.device.pages import address_of
from warpspec.fmha.device.scales import is_nvfp4, kv_row
from warpspec.fmha.expand import VECTOR, ExpandConfig, ExpandOperands

THREADS = 256
VECTORS = 2  # vectors of a thread
# By dtype: float4.UNIT in 16 bits, and the kind of a pair.
UNITS = {"bfloat16": ((127 + 14) << 7, "bf16x2"), "float16": ((15 + 14) << 10, "f16x2")}


class Expand:
    """``Expand(config)(...)`` launches the kernel."""

    def __init__(self, config: ExpandConfig):
        self.config = config

    @host_function(ExpandOperands)
    def __call__(self, operands: ExpandOperands, stream: CUstream):
        """Host side."""
        batch, keys, heads, _ = operands.wide_k.shape
        ctas = cute.ceil_div(keys * heads * self.config.vectors, THREADS * VECTORS)  # of a batch row
        self.kernel(operands, ctas).launch(
            grid=(ctas * batch, 2, 1), block=(THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(self, operands, ctas):
        cute.arch.griddepcontrol_wait()  # the launch before may read the memory that this one writes
        cute.arch.griddepcontrol_launch_dependents()  # attention's start, until its own wait, takes no time then
        thread, _, _ = cute.arch.thread_idx()
        cta, side, _ = cute.arch.block_idx()
        batch, first = cta // ctas, cta % ctas * VECTORS * THREADS + thread
        if side == 0:
            expand_vectors(self.config, operands, "k", batch, first)
        else:
            expand_vectors(self.config, operands, "v", batch, first)


@cute.jit
def expand_vectors(config: cutlass.Constexpr, operands, ring: cutlass.Constexpr, batch, first):
    """Dequantise VECTORS vectors of a batch row's K or V, THREADS apart. All are read before any is written, so that
    their latencies pass together. first: number of the first one."""
    wide = operands.wide_k if ring == "k" else operands.wide_v
    _, keys, heads, _ = wide.shape
    end = Int32(keys)
    if cutlass.const_expr(config.requests.has_kv_lengths):
        end = cutlass.min(end, operands.kv_lengths[batch])
    size = config.format.kv_row(VECTOR)
    codes = [cute.make_rmem_tensor(size, Uint8) for _ in range(VECTORS)]
    scales = [cute.make_rmem_tensor(1, Uint8) for _ in range(VECTORS)]
    for i in cutlass.range_constexpr(VECTORS):
        codes[i].fill(0)
        scales[i].fill(0)
        row, number = (first + i * THREADS) // config.vectors, (first + i * THREADS) % config.vectors
        if row // heads < end:
            where, exists = address_of(config, operands, batch, row // heads)
            source = kv_row(config, operands, ring, where, row % heads)
            if exists:
                cute.autovec_copy(cute.local_tile(source.codes, (size,), (number,)), codes[i])
                if cutlass.const_expr(is_nvfp4(config)):
                    scales[i][0] = source.scale(number)
    for i in cutlass.range_constexpr(VECTORS):
        row, number = (first + i * THREADS) // config.vectors, (first + i * THREADS) % config.vectors
        if row // heads < end:
            out = cute.make_rmem_tensor(VECTOR, wide.element_type)
            halves = cute.recast_tensor(out, Uint32)
            words = wide_vector(config, cute.recast_tensor(codes[i], Uint32), scales[i][0])
            for n in cutlass.range_constexpr(VECTOR // 2):
                halves[n] = words[n]
            target = wide[batch, row // heads, row % heads, None]
            cute.autovec_copy(out, cute.local_tile(target, (VECTOR,), (number,)))


def wide_vector(config, codes, scale) -> list:
    """VECTOR numbers in 16 bits, two neighbours in a word. codes: words of their codes. scale: their e4m3 scale, if
    they are NVFP4."""
    kind = codes_of(config, config.format.dtype)
    pair = kind.scale_pair(Uint32(scale)) if is_nvfp4(config) else None
    wide = kind.in_order([codes[i] for i in range(cute.size(codes))], pair)
    if is_nvfp4(config):  # exact: seven bits, and fp16 represents the largest and the smallest of them
        wide = [scaled_pair(word, *UNITS[config.format.dtype]) for word in wide]
    return wide
