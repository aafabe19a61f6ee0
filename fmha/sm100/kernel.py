"""The attention kernel for sm_100a: host side, storage, role dispatch.

ARCHITECTURE.md, "Attention kernel (sm_100a)", has the picture.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common import tma
from warpspec.common.pipeline import init_barriers
from warpspec.fmha.device.grid import Grid, grid_of
from warpspec.fmha.device.host import SMEM_CARVEOUT_PERCENT, AttentionHost
from warpspec.fmha.device.tile import tile_at
from warpspec.fmha.sm100 import bias as biases
from warpspec.fmha.sm100.epilogue import epilogue
from warpspec.fmha.sm100.load import load, rings
from warpspec.fmha.sm100.mma import fragments, mma
from warpspec.fmha.sm100.softmax_warps import Columns, softmax


class Attention(AttentionHost):
    """The kernel of one ``AttentionConfig``."""

    def launch(self, operands, numbers, stream):
        """Host side: TMA descriptors, grid, launch. Every tile has a CTA, whatever ``numbers.ctas``."""
        config = self.config
        loads = self.loads(operands)
        if config.bias_stages:
            loads.append(biases.make_load(config, operands.bias))
        tiles, splits = grid_of(config, operands)
        self.kernel(
            operands,
            tuple(atom for atom, _ in loads),
            tuple(coordinates for _, coordinates in loads),
            Grid(tiles.query_tiles, tiles.head_tiles, splits),
            numbers.scale_log2,
            *numbers.window,
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
        where = (grid, (window_left, window_right))
        q_base, k_base, p_base = storage.q.data_ptr(), storage.k.data_ptr(), storage.p.data_ptr()
        v_base = k_base if cutlass.const_expr(config.shared_kv) else storage.v.data_ptr()
        if warp < len(config.softmax_warps):
            if cutlass.const_expr(config.ctas_per_sm > 1):
                cute.arch.setmaxregister_increase(config.softmax_registers)
            tile = tile_at(config, operands, *where, index=cute.arch.block_idx()[0])
            row = tile.row(config.row_of(thread), config.column_part_of(thread))
            places = Columns(
                thread=thread,
                s=columns + config.tmem_s,
                p=cute.recast_ptr(columns + config.tmem_p, dtype=Int32),
                o=columns + config.tmem_o,
                p_smem=p_base,
                v_smem=v_base,
                bias=biases.source(config, operands.bias, tile, row, storage.bias.data_ptr()),
            )
            state = softmax(config, channels, row, tile.span, places, scale_log2, dtype)
            epilogue(config, channels, row, tile.place(row.index), tile, state, places, operands, scale_log2)
            cute.arch.barrier(barrier_id=1, number_of_threads=config.softmax_threads)
            if warp == 0:
                cute.arch.dealloc_tmem(columns, config.tmem_allocation)
        else:
            if cutlass.const_expr(config.ctas_per_sm > 1):
                cute.arch.setmaxregister_decrease(config.other_registers)
            tile = tile_at(config, operands, *where, index=cute.arch.block_idx()[0])
            if warp == config.load_warp:
                bases = (q_base, k_base, v_base)
                filled = rings(config, atoms, coordinates, bases, tile, dtype)
                boxes = biases.ring(config, atoms[-1], coordinates[-1], storage.bias.data_ptr(), tile)
                load(config, channels, filled, tile, operands, boxes)
            if warp == config.mma_warp:
                operands_mma = fragments(config, dtype, q_base, k_base, v_base, p_base, columns)
                mma(config, channels, operands_mma, tile.span, dtype)
