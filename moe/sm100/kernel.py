"""The grouped GEMM for sm_100a: host side, storage, role dispatch.

ARCHITECTURE.md, "Grouped GEMM (sm_100a)", has the picture.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from warpspec.common.device import tmem
from warpspec.common.device.host import host_function
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.moe.sm100.config import GemmConfig
from warpspec.moe.sm100.epilogue import EpilogueOperands, epilogue
from warpspec.moe.sm100.load import load, make_sources, make_stages
from warpspec.moe.sm100.mma import fragments, mma
from warpspec.moe.sm100.operands import GemmNumbers, GemmOperands
from warpspec.moe.sm100.schedule import Records, schedule
from warpspec.moe.sm100.store import make_result


class GroupedGemm:
    """``cute.compile(GroupedGemm(config), ...)`` makes one kernel; whose arguments ``GemmOperands``
    and ``GemmNumbers`` declare."""

    def __init__(self, config: GemmConfig):
        self.config = config

    @host_function(GemmOperands, GemmNumbers)
    def __call__(self, operands: GemmOperands, numbers: GemmNumbers, stream: CUstream):
        """Host side: TMA descriptors, grid, launch."""
        config, ops = self.config, operands
        k, columns, limit, groups = numbers
        rest = ops.token_scales, ops.weights, ops.weight_scales
        self.kernel(
            make_sources(config, ops.tokens, *rest, k),
            EpilogueOperands(ops.row_scale, ops.global_scale, ops.bias, ops.out_scale),
            make_result(config, ops.out, ops.out_scales, columns),
            ops.offsets,
            (k, ops.weights.shape[1], ops.tokens.shape[0]),
            limit,
        ).launch(
            grid=(groups * config.ctas, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.ctas, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, sources, operands, result, offsets, sizes, limit):
        config = self.config
        k, features, rows = sizes
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        rank = block % config.ctas  # this CTA's rank in its pair

        # 1. Shared memory: barriers, tile records, the TMEM address, stages, staging of the result.
        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        records = Records.make(channels, storage.records.data_ptr())

        # 2. Tensor memory: warp 0 allocates and, after the epilogue, frees.
        tmem.allocate(warp, config.tmem_allocation, storage.tmem_address.data_ptr(), config.pair)
        if warp == config.load_warp:
            for source in sources:
                cute.nvgpu.cpasync.prefetch_descriptor(source.atom)
        synchronize(config)  # also waits until the pair's other CTA has initialised its barriers
        columns = tmem.base(storage.tmem_address.data_ptr())

        # 3. Roles.
        regions = (
            storage.tokens.data_ptr(),
            storage.weights.data_ptr(),
            storage.scales.data_ptr(),
            storage.scales.data_ptr() + config.token_scale_bytes,
        )
        staging = storage.staging.data_ptr()
        group, groups = block // config.ctas, blocks // config.ctas
        k_tiles = cute.ceil_div(k, config.mma_tiler[2])
        stages = make_stages(config, *regions)
        operands_mma = fragments(config, *regions, columns)
        if warp < len(config.epilogue_warps):
            epilogue(config, channels, records, operands, result, columns, staging, features, limit, rank)
        if warp == config.mma_warp:
            mma(config, channels, records, operands_mma, k, rank)
        if warp == config.load_warp:
            load(config, channels, records, sources, stages, k_tiles, rank)
        if warp == config.schedule_warp:
            schedule(config, records, offsets, features, rows, group, groups)

        # 4. All accumulators have been read; no CTA of a pair may leave while the other may arrive at its barriers.
        synchronize(config)
        tmem.free(warp, columns, config.tmem_allocation, config.pair)


@cute.jit
def synchronize(config: cutlass.Constexpr):
    """Synchronize all threads of the CTA, or of both CTAs of a pair."""
    if cutlass.const_expr(config.pair):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
