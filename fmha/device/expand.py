"""Dequantises keys and values into dense 16-bit tensors (``fmha.expand``), without k_scale and v_scale.

A thread takes VECTOR numbers of a row. Neighbouring threads take neighbouring vectors, through a key's heads one after
another, so that their writes are contiguous. In CTA (x, y), y chooses between K and V, and x chooses the batch row and
the vectors, because only a grid's first dimension holds any number of batch rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32

from warpspec.common.device.host import host_function
from warpspec.fmha.device.pages import address_of
from warpspec.fmha.device.scales import kv_row, unit_of
from warpspec.fmha.expand import VECTOR, ExpandConfig, ExpandOperands

THREADS = 256
VECTORS = 2  # vectors of a thread


class Expand:
    """``Expand(config)(...)`` launches the kernel."""

    def __init__(self, config: ExpandConfig):
        self.config = config

    @host_function(ExpandOperands)
    def __call__(self, operands: ExpandOperands, stream: CUstream):
        """Host side."""
        batch, keys, heads, _ = operands.wide_k.shape
        ctas = cute.ceil_div(keys * heads * self.config.vectors, THREADS * VECTORS)  # of a batch row
        self.kernel(operands, ctas).launch(grid=(ctas * batch, 2, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, operands, ctas):
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
        values = kv_row(config, operands, ring, where, head).vector(VECTOR, number)
        out = cute.make_rmem_tensor(VECTOR, wide.element_type)
        for i in cutlass.range_constexpr(VECTOR):
            value = values[i] * Float32(unit_of(config))
            out[i] = Float32(cutlass.select_(Boolean(exists), value, Float32(0.0))).to(wide.element_type)
        target = wide[batch, key, head, None]
        cute.autovec_copy(out, cute.local_tile(target, (VECTOR,), (number,)))
