"""The kernel of one product phase for sm_100a: host side, storage, role dispatch."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from warpspec.common.device import tma, tmem
from warpspec.common.device.pipeline import drain, init_barriers
from warpspec.swap.config import BARRIER_BYTES
from warpspec.swap.device.flow import Flow
from warpspec.swap.device.host import SwapHost
from warpspec.swap.device.load import ProductLoads, load_phase, make_sources
from warpspec.swap.device.work import SwapWork
from warpspec.swap.sm100.epilogue import epilogue
from warpspec.swap.sm100.mma import fragments, mma

SMEM_CARVEOUT_PERCENT = 100
EPILOGUE_WARPS = 4


class ProductPhase(SwapHost):
    """The kernel of a product phase."""

    def launch(self, ops, ctas, event, steps, k_ffn, stream):
        """Host side. A programmatic dependent launch: the kernel waits for the end of the previous one."""
        config = self.config
        self.kernel(ops, make_sources(config, ops)).launch(
            grid=(ctas, 1, 1),
            block=(config.threads, 1, 1),
            use_pdl=True,
            min_blocks_per_mp=1,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, ops, sources):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # 1. Shared memory: barriers, the TMEM address, the ring.
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, BARRIER_BYTES // 8)
        tmem_address = smem.allocate_array(Int32, 1)
        base = smem.allocate(config.ring_bytes, byte_alignment=tma.TILE_ALIGNMENT)
        channels = init_barriers(config.barriers, barriers)

        # 2. Tensor memory: warp 0 allocates and, after the epilogue, frees.
        tmem.allocate(warp, config.accumulator_columns, tmem_address)
        if warp == config.load_warp:
            for source in sources[0]:
                cute.nvgpu.cpasync.prefetch_descriptor(source.atom)
        cute.arch.sync_threads()
        columns = tmem.base(tmem_address)
        cute.arch.griddepcontrol_launch_dependents()

        # 3. Roles.
        work = SwapWork.of(config, ops, config.phase)
        # After products of what the load warp has waited for the kernel before with.
        if warp < EPILOGUE_WARPS:
            epilogue(config, channels, columns, work, ops, thread)
        if warp == config.mma_warp:
            mma(config, channels, fragments(config, base, columns), work)
        if warp == config.load_warp:
            loads = ProductLoads.make(config, config.phase, sources[0], base, BFloat16, work)
            flow = Flow.of(config, ops)
            use = load_phase(config, config.phase, channels, loads, work, ops, flow, Int32(0), Int32(0))
            drain((channels[f"{config.phase}_empty"],), use)

        # 4. The accumulator has been read.
        cute.arch.sync_threads()
        tmem.free(warp, columns, config.accumulator_columns)
