"""dK and dV where key tiles were cut: what pieces left is added up in their order, scaled, rounded. Of no architecture.

A CTA has a key tile of one KV head, of dK or of dV; its threads have rows and columns as in ``queries``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward.device.queries import write_tile
from warpspec.fmha.backward.device.rows import place_of
from warpspec.fmha.backward.features import WARPS


class Keys:
    """The kernel of one ``rows.KeyConfig``."""

    def __init__(self, config):
        self.config = config

    @cute.jit
    def __call__(
        self,
        dk_sums: cute.Tensor | None,
        dv_sums: cute.Tensor | None,
        dk: cute.Tensor | None,
        dv: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        scale: Float32,
        stream: CUstream,
    ):
        """dk_sums, dv_sums: [Hkv, slots of keys, pieces, tile_n * D] fp32 (``features``). dk, dv: [B, Sk, Hkv, D], are
        written. scale: of dk."""
        gradients = [
            (sums, target, factor)
            for sums, target, factor in ((dk_sums, dk, scale), (dv_sums, dv, Float32(1.0)))
            if target is not None
        ]
        sums, target, _ = gradients[0]
        slots, heads = sums.shape[1], target.shape[2]
        threads = self.config.parts * WARPS * WARP_THREADS
        self.kernel(gradients, cu_seqlens_k).launch(
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
