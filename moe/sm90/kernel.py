"""The grouped GEMM for sm_90a: host side, storage, role dispatch.

ARCHITECTURE.md, "Grouped GEMM (sm_90a)", has the picture.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from warpspec.common.device.host import host_function
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.hardware import WARPGROUP_THREADS
from warpspec.moe.sm90.config import WARPS, StreamConfig
from warpspec.moe.sm90.consumer import consume
from warpspec.moe.sm90.load import load
from warpspec.moe.sm90.tiles import StreamGrid, StreamOperands

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

    @host_function(StreamOperands, StreamGrid)
    def __call__(self, ops: StreamOperands, grid: StreamGrid, stream: CUstream):
        """Launch the kernel."""
        self.kernel(ops).launch(
            grid=(grid.ctas, 1, 1),
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
