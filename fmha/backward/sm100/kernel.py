"""The backward kernel for sm_100a: host side, storage, role dispatch."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from warpspec.common.device import handover, tmem
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.hardware import TMEM_COLUMNS
from warpspec.fmha.backward.device.host import BackwardHost
from warpspec.fmha.backward.device.load import GradientBuffers, TileLoads, load, wait_before, wait_first
from warpspec.fmha.backward.device.place import own_tile
from warpspec.fmha.backward.device.tile import own_group
from warpspec.fmha.backward.sm100.keys import work_on_keys
from warpspec.fmha.backward.sm100.mma import mma


class Backward(BackwardHost):
    """The kernel of one ``BackwardConfig``."""

    @cute.kernel
    def kernel(self, operands, atoms, coordinates, scales, window, order):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # 1. Shared memory.
        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())

        # 2. Tensor memory: warp 0 allocates and, after the results are written, frees.
        tmem.allocate(warp, TMEM_COLUMNS, storage.tmem_address.data_ptr())
        if warp == config.load_warp:
            for atom in atoms:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        if cutlass.const_expr(config.clustered):
            handover.meet()
        columns = tmem.base(storage.tmem_address.data_ptr())
        wait_first(config)

        # 3. Roles.
        shared = GradientBuffers.of(config, storage)
        column_group = own_group(config)
        tile = own_tile(config, operands, window, order)
        if warp < config.mma_warp:
            wait_before(config)
            work_on_keys(config, channels, shared, operands, scales, tile, column_group, columns, thread)
            cute.arch.barrier(barrier_id=1, number_of_threads=config.mma_warp * 32)
            tmem.free(warp, columns, TMEM_COLUMNS)
        elif warp == config.mma_warp:
            mma(config, channels, shared, operands.q.element_type, tile, column_group, columns)
        else:
            load(TileLoads(config, channels, shared, operands, atoms, coordinates, tile))
        if cutlass.const_expr(config.clustered):
            handover.meet()
