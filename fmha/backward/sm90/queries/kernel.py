"""The kernel for sm_90a that makes dQ by query tiles: host side, storage, role dispatch. CTAs are persistent."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from warpspec.common.device import tma
from warpspec.common.device.host import host_function
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.backward.device.host import batched, row_view
from warpspec.fmha.backward.operands import QueryOperands
from warpspec.fmha.backward.sm90.queries.consumer import consume
from warpspec.fmha.backward.sm90.queries.load import NAMES, QueryLoads, load
from warpspec.fmha.backward.sm90.queries.tile import launch_of
from warpspec.fmha.device.host import SMEM_CARVEOUT_PERCENT
from warpspec.fmha.heads import BLOCK


class Queries:
    """The kernel of one ``QueryConfig``."""

    def __init__(self, config):
        self.config = config

    @host_function(QueryOperands)
    def __call__(self, operands: QueryOperands, stream: CUstream):
        config, operands = self.config, batched(self.config, operands)
        blocks = config.room // BLOCK if config.rows is None else 1
        keys, queries = (BLOCK, config.tile_n, blocks), (BLOCK, config.tile_m, blocks)
        boxes = ((operands.k, keys), (operands.v, keys), (operands.q, queries), (operands.do, queries))
        copies = [tma.make_load(row_view(config, tensor), box) for tensor, box in boxes]
        atoms, views = (tuple(copy[i] for copy in copies) for i in range(2))
        launch = launch_of(config, operands, operands)
        self.kernel(operands, atoms, views, launch).launch(
            grid=(cutlass.min(launch.tiles * launch.rows, operands.ctas), 1, 1),
            block=(config.threads, 1, 1),
            min_blocks_per_mp=1,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands, atoms, coordinates, launch):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # 1. Shared memory.
        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        if warp == config.load_warp:
            for atom in atoms:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        # 2. Roles.
        shared = {name: getattr(storage, name).data_ptr() for name in (*NAMES, "results")}
        if warp >= config.load_warp:
            cute.arch.setmaxregister_decrease(config.registers[-1])
            if warp == config.load_warp:
                load(QueryLoads(config, channels, shared, operands, atoms, coordinates), launch)
        else:
            cute.arch.setmaxregister_increase(config.registers[0])
            consumer = warp // (WARPGROUP_THREADS // WARP_THREADS)
            consume(config, channels, shared, operands, operands, launch, consumer)
