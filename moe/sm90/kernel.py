"""The grouped GEMM for sm_90a: host side, storage, role dispatch.

ARCHITECTURE.md, "Grouped GEMM (sm_90a)", has the picture.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.hardware import WARPGROUP_THREADS
from warpspec.moe.sm90.config import WARPS, StreamConfig
from warpspec.moe.sm90.consumer import consume
from warpspec.moe.sm90.load import load
from warpspec.moe.sm90.tiles import StreamOperands

# Per cent of L1 and shared memory that are used as shared memory: all, because the rings fill it.
SMEM_CARVEOUT_PERCENT = 100


class StreamStorage(NamedTuple):
    """Addresses of the regions of shared memory, in bytes."""

    weights: cute.Pointer
    tokens: cute.Pointer
    sums: cute.Pointer | None


class StreamedGemm:
    """``StreamedGemm(config)(...)`` is the host function."""

    def __init__(self, config: StreamConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        tokens: cute.Tensor,
        source: cute.Tensor | None,
        row_scale: cute.Tensor | None,
        data: cute.Tensor,
        global_scale: cute.Tensor,
        bias: cute.Tensor | None,
        work: cute.Tensor | None,
        ids: cute.Tensor | None,
        out: cute.Tensor,
        chunks: Int32,
        limit: Float32,
        ctas: Int32,
        stream: CUstream,
    ):
        """Launch the kernel. Tensors: see ``tiles.StreamOperands``. chunks: along K. ctas: of the persistent launch."""
        read = tokens, source, row_scale, data, global_scale, bias, work, ids
        ops = StreamOperands(*read, out, chunks, limit)
        self.kernel(ops).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=self.config.shape.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, ops):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # 1. Shared memory: barriers and the ring.
        storage = allocate(config.smem_regions)
        sums = None
        if cutlass.const_expr(config.sums_bytes > 0):
            sums = storage.sums.data_ptr()
        shared = StreamStorage(storage.weights.data_ptr(), storage.tokens.data_ptr(), sums)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        cute.arch.sync_threads()
        if cutlass.const_expr(not config.early):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # 2. Roles.
        registers = config.role_registers
        if warp >= config.load_warp:
            if cutlass.const_expr(registers is not None):
                cute.arch.setmaxregister_decrease(registers[1])
            load(config, channels, shared, ops, warp - config.load_warp)
        else:
            consumer = cute.arch.make_warp_uniform(warp // WARPS)
            group, split = consumer // config.shape.splits * config.shape.tall, consumer % config.shape.splits
            if cutlass.const_expr(registers is not None):
                cute.arch.setmaxregister_increase(registers[0])
            consume(config, channels, shared, ops, group, split, thread % WARPGROUP_THREADS)
