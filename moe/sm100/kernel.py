"""The grouped GEMM for sm_100a: host side, storage, role dispatch.

ARCHITECTURE.md, "Grouped GEMM (sm_100a)", has the picture.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from warpspec.common.device import tmem
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.moe.sm100.config import GemmConfig
from warpspec.moe.sm100.epilogue import EpilogueOperands, epilogue
from warpspec.moe.sm100.load import load, make_sources, make_stages
from warpspec.moe.sm100.mma import fragments, mma
from warpspec.moe.sm100.schedule import Records, schedule
from warpspec.moe.sm100.store import make_result


class GroupedGemm:
    """``cute.compile(GroupedGemm(config), ...)`` makes one kernel; the arguments are those of ``__call__``."""

    def __init__(self, config: GemmConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        tokens: cute.Tensor,
        token_scales: cute.Tensor,
        row_scale: cute.Tensor | None,
        weights: cute.Tensor,
        weight_scales: cute.Tensor,
        global_scale: cute.Tensor,
        bias: cute.Tensor | None,
        offsets: cute.Tensor,
        out: cute.Tensor,
        out_scales: cute.Tensor | None,
        out_scale: cute.Tensor | None,
        k: Int32,
        columns: Int32,
        limit: Float32,
        groups: Int32,
        stream: CUstream,
    ):
        """Host side: TMA descriptors, grid, launch.

        tokens: uint8 [R, pitch]; token_scales: uint8 [atoms, K atoms, 512]; row_scale: fp32 [R]. weights: uint8
        [E, N, pitch]; weight_scales: uint8 [E, N atoms, K atoms, 512]; global_scale: fp32 [E, 1 or 2]; bias: fp32
        [E, N]. offsets: int32 [E]. out: bf16 [R, columns], or uint8 [R, pitch] together with out_scales, shaped like
        token_scales, and out_scale fp32 [E]. k: values along K. columns: outputs of a row. limit: the clamp's. groups:
        CTAs, or pairs.
        """
        config = self.config
        sources = make_sources(config, tokens, token_scales, weights, weight_scales, k)
        self.kernel(
            sources,
            EpilogueOperands(row_scale, global_scale, bias, out_scale),
            make_result(config, out, out_scales, columns),
            offsets,
            (k, weights.shape[1], tokens.shape[0]),
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
        rank = block % config.ctas  # in the pair

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
