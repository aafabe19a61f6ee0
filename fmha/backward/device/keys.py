"""dK and dV where key tiles were cut: what pieces left is added up in their order, scaled, rounded. Of no architecture.

A CTA has a key tile of one KV head, of dK or of dV; its threads have rows and columns as in ``queries``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32

from warpspec.common.device.host import host_function
from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward.device.queries import write_tile
from warpspec.fmha.backward.device.rows import place_of
from warpspec.fmha.backward.features import WARPS
from warpspec.fmha.backward.operands import KeyOperands


class Keys:
    """The kernel of one ``rows.KeyConfig``."""

    def __init__(self, config):
        self.config = config

    @host_function(KeyOperands)
    def __call__(self, operands: KeyOperands, stream: CUstream):
        ops = operands
        gradients = [
            (sums, target, factor)
            for sums, target, factor in (
                (ops.dk_sums, ops.dk, ops.scale),
                (ops.dv_sums, ops.dv, Float32(1.0)),
            )
            if target is not None
        ]
        sums, target, _ = gradients[0]
        slots, heads = sums.shape[1], target.shape[2]
        threads = self.config.parts * WARPS * WARP_THREADS
        self.kernel(gradients, ops.cu_seqlens_k).launch(
            grid=(slots, heads, len(gradients)), block=(threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, gradients, cu_seqlens_k):
        config = self.config
        slot, head, which = cute.arch.block_idx()
        place = place_of(config, cu_seqlens_k, gradients[0][1], slot)
        for number in cutlass.range_constexpr(len(gradients)):
            sums, target, factor = gradients[number]
            if which == number:
                write_tile(config, sums[head, slot, None, None], place, target, head, factor)
