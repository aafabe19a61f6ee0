"""The attention kernel for sm_100a: host side, storage, role dispatch.

ARCHITECTURE.md, "Attention kernel (sm_100a)", has the picture.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from warpspec.common import tma
from warpspec.common.pipeline import init_barriers
from warpspec.fmha.operands import Operands, kv_view, q_view
from warpspec.fmha.sm100 import bias as biases
from warpspec.fmha.sm100.config import AttentionConfig
from warpspec.fmha.sm100.epilogue import epilogue
from warpspec.fmha.sm100.load import load, rings
from warpspec.fmha.sm100.mma import fragments, mma
from warpspec.fmha.sm100.softmax_warps import Columns, softmax
from warpspec.fmha.tile import Grid, launch_of, locate

# Of an SM's L1 and shared memory, all it can have as shared memory: two CTAs fill it.
SMEM_CARVEOUT_PERCENT = 100


class Attention:
    """``cute.compile(Attention(config), ...)`` makes one kernel; the arguments are those of ``__call__``."""

    def __init__(self, config: AttentionConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        sink: cute.Tensor | None,
        kv_lengths: cute.Tensor | None,
        q_start: cute.Tensor | None,
        lse: cute.Tensor | None,
        row_max: cute.Tensor | None,
        row_sum: cute.Tensor | None,
        page_table: cute.Tensor | None,
        bias: cute.Tensor | None,
        scale_log2: Float32,
        window_left: Int32,
        window_right: Int32,
        stream: CUstream,
    ):
        """Host side: TMA descriptors, grid, launch.

        scale_log2: |scale| * log2(e). window_left, window_right: not read where unbounded.
        """
        config = self.config
        loads = [tma.make_load(q_view(config, q), config.q_box)]
        for t in (k,) if config.shared_kv else (k, v):
            loads.append(tma.make_load(kv_view(config, t), config.kv_box))
        if cutlass.const_expr(config.bias_stages > 0):
            loads.append(biases.make_load(config, bias))
        tiles, splits = launch_of(config, q, k, o)
        self.kernel(
            Operands(q, k, v, o, sink, kv_lengths, q_start, lse, row_max, row_sum, page_table, bias),
            tuple(atom for atom, _ in loads),
            tuple(coordinates for _, coordinates in loads),
            Grid(tiles.query_tiles, tiles.head_tiles, splits),
            scale_log2,
            window_left,
            window_right,
        ).launch(
            grid=(tiles.size * splits, 1, 1),
            block=(config.threads, 1, 1),
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands, atoms, coordinates, grid, scale_log2, window_left, window_right):
        config = self.config
        dtype = operands.q.element_type
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # 1. Shared memory: barriers, the TMEM address, Q, K and V.
        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, config.barrier_slots]
            tmem_address: Int32
            q: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, config.q_bytes], tma.TILE_ALIGNMENT]
            k: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, config.kv_stages * config.kv_tile_bytes],
                tma.TILE_ALIGNMENT,
            ]
            v: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, config.v_bytes], tma.TILE_ALIGNMENT]
            p: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, config.p_bytes], tma.TILE_ALIGNMENT]
            bias: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, config.bias_ring_bytes], tma.TILE_ALIGNMENT
            ]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())

        # 2. Tensor memory: warp 0 allocates and, after the epilogue, frees.
        if warp == 0:
            cute.arch.alloc_tmem(config.tmem_allocation, storage.tmem_address)
            cute.arch.relinquish_tmem_alloc_permit()
        if warp == config.load_warp:
            for atom in atoms:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        columns = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address)
        if cutlass.const_expr(config.splits):
            cute.arch.griddepcontrol_launch_dependents()  # the combine kernel comes up meanwhile, and waits

        # 3. Roles.
        where = (grid, window_left, window_right)
        q_base, k_base, p_base = storage.q.data_ptr(), storage.k.data_ptr(), storage.p.data_ptr()
        v_base = k_base if cutlass.const_expr(config.shared_kv) else storage.v.data_ptr()
        if warp < len(config.softmax_warps):
            if cutlass.const_expr(config.ctas_per_sm > 1):
                cute.arch.setmaxregister_increase(config.softmax_registers)
            tile = locate(config, operands, *where)
            row = tile.row(thread)
            places = Columns(
                s=columns + config.tmem_s,
                p=cute.recast_ptr(columns + config.tmem_p, dtype=Int32),
                o=columns + config.tmem_o,
                p_smem=p_base,
                v_smem=v_base,
                bias=biases.source(config, operands.bias, tile, row, storage.bias.data_ptr()),
            )
            state = softmax(config, channels, row, tile.span, places, scale_log2, dtype)
            epilogue(config, channels, row, tile.place(row), tile, state, places.o, operands, scale_log2)
            cute.arch.barrier(barrier_id=1, number_of_threads=config.softmax_threads)
            if warp == 0:
                cute.arch.dealloc_tmem(columns, config.tmem_allocation)
        else:
            if cutlass.const_expr(config.ctas_per_sm > 1):
                cute.arch.setmaxregister_decrease(config.other_registers)
            tile = locate(config, operands, *where)
            if warp == config.load_warp:
                bases = (q_base, k_base, v_base)
                filled = rings(config, atoms, coordinates, bases, tile, dtype)
                boxes = biases.ring(config, atoms[-1], coordinates[-1], storage.bias.data_ptr(), tile)
                load(config, channels, filled, tile, operands, boxes)
            if warp == config.mma_warp:
                operands_mma = fragments(config, dtype, q_base, k_base, v_base, p_base, columns)
                mma(config, channels, operands_mma, tile.span, dtype)
