"""Dequantises keys and values into dense 16-bit tensors (``fmha.expand``), without k_scale and v_scale.

A thread takes VECTOR numbers of a row. Neighbouring threads take neighbouring vectors, through a key's heads one after
another, so that their writes are contiguous. In CTA (x, y), y chooses between K and V, and x chooses the batch row and
the vectors, because only a grid's first dimension holds any number of batch rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Int32, Uint8, Uint32

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
        thread, _, _ = cute.arch.thread_idx()
        cta, side, _ = cute.arch.block_idx()
        batch, cta = cta // ctas, cta % ctas
        for i in cutlass.range_constexpr(VECTORS):
            vector = (cta * VECTORS + i) * THREADS + thread
            if side == 0:
                expand_vector(self.config, operands, "k", batch, vector)
            else:
                expand_vector(self.config, operands, "v", batch, vector)


@cute.jit
def expand_vector(config: cutlass.Constexpr, operands, ring: cutlass.Constexpr, batch, vector):
    """Dequantise the ``vector``-th VECTOR numbers of a batch row's K or V."""
    wide = operands.wide_k if ring == "k" else operands.wide_v
    _, keys, heads, _ = wide.shape
    row, number = vector // config.vectors, vector % config.vectors
    key, head = row // heads, row % heads
    end = Int32(keys)
    if cutlass.const_expr(config.requests.has_kv_lengths):
        end = cutlass.min(end, operands.kv_lengths[batch])
    if key < end:
        where, exists = address_of(config, operands, batch, key)
        words = wide_vector(config, kv_row(config, operands, ring, where, head), number)
        out = cute.make_rmem_tensor(VECTOR, wide.element_type)
        halves = cute.recast_tensor(out, Uint32)
        for i in cutlass.range_constexpr(VECTOR // 2):
            halves[i] = Uint32(cutlass.select_(Boolean(exists), words[i], Uint32(0)))
        target = wide[batch, key, head, None]
        cute.autovec_copy(out, cute.local_tile(target, (VECTOR,), (number,)))


def wide_vector(config, row, number) -> list:
    """The ``number``-th VECTOR numbers of a row (``scales.KvRow``) in 16 bits, two neighbours in a word."""
    kind, size = codes_of(config, config.format.dtype), config.format.kv_row(VECTOR)
    codes = cute.make_rmem_tensor(size, Uint8)
    cute.autovec_copy(cute.local_tile(row.codes, (size,), (number,)), codes)
    words = cute.recast_tensor(codes, Uint32)
    scale = kind.scale_pair(Uint32(row.scale(number))) if is_nvfp4(config) else None
    wide = kind.in_order([words[i] for i in range(cute.size(words))], scale)
    if is_nvfp4(config):  # exact: seven bits, and fp16 represents the largest and the smallest of them
        wide = [scaled_pair(word, *UNITS[config.format.dtype]) for word in wide]
    return wide
