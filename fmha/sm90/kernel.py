"""The attention kernel for sm_90a: host side, storage, role dispatch.

ARCHITECTURE.md, "Attention kernel (sm_90a)", has the picture.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from warpspec.common import tma
from warpspec.common.pipeline import init_barriers
from warpspec.fmha.features import FP32_BYTES, WARP_THREADS
from warpspec.fmha.operands import Operands, kv_view, q_view
from warpspec.fmha.row_bias import row_of
from warpspec.fmha.sm90.config import BARRIER_BYTES, WARPGROUP_THREADS, WEIGHT_STAGES, AttentionConfig
from warpspec.fmha.sm90.consumer import Work, attend, pass_turn, products
from warpspec.fmha.sm90.epilogue import epilogue
from warpspec.fmha.sm90.exchange import Exchange, attend_in_turn, own_stage
from warpspec.fmha.sm90.load import load
from warpspec.fmha.sm90.rings import Source
from warpspec.fmha.sm90.rows import place, rows
from warpspec.fmha.sm90.tile import index_of, locate, rounds, where_of

SMEM_CARVEOUT_PERCENT = 100


class Shared(NamedTuple):
    """Where the regions of shared memory begin. q, k, v, p: Uint8 pointers; v is k where V is K. statistics, sums:
    Float32 pointers, of consumers that exchange P."""

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    p: cute.Pointer
    statistics: cute.Pointer
    sums: cute.Pointer


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
        ctas: Int32,
        section: Int32,
        stream: CUstream,
    ):
        """Host side: TMA descriptors, grid, launch.

        scale_log2: |scale| * log2(e). window_left, window_right: not read where unbounded. ctas: most CTAs to launch.
        section: of ``TileGrid.decode``. At least one tile, ctas and section at least 1.
        """
        config = self.config
        loads = [tma.make_load(q_view(config, q), config.q_box)]
        for t in (k,) if config.shared_kv else (k, v):
            loads.append(tma.make_load(kv_view(config, t), config.kv_box))
        where = where_of(config, q, k, o, ctas, section, window_left, window_right)
        self.kernel(
            Operands(q, k, v, o, sink, kv_lengths, q_start, lse, row_max, row_sum, page_table, bias),
            tuple(atom for atom, _ in loads),
            tuple(coordinates for _, coordinates in loads),
            where,
            scale_log2,
        ).launch(
            grid=(cutlass.min(where.tiles, ctas), 1, 1),
            block=(config.threads, 1, 1),
            min_blocks_per_mp=config.shape.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands, atoms, coordinates, where, scale_log2):
        config = self.config
        dtype = operands.q.element_type
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # 1. Shared memory: barriers, Q of every consumer, K and V, what consumers exchange.
        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, BARRIER_BYTES // 8]
            q: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, config.row_groups * config.q_bytes], tma.TILE_ALIGNMENT
            ]
            k: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, config.kv_stages * config.kv_tile_bytes],
                tma.TILE_ALIGNMENT,
            ]
            v: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, config.v_bytes], tma.TILE_ALIGNMENT]
            p: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, WEIGHT_STAGES * config.p_bytes], tma.TILE_ALIGNMENT
            ]
            statistics: cute.struct.MemRange[Float32, config.statistics_bytes // FP32_BYTES]
            sums: cute.struct.MemRange[Float32, config.sums_bytes // FP32_BYTES]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        if warp == config.load_warp:
            for atom in atoms:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        if cutlass.const_expr(config.splits):
            cute.arch.griddepcontrol_launch_dependents()  # the combine kernel comes up meanwhile, and waits

        # 2. Roles.
        k_base = storage.k.data_ptr()
        shared = Shared(
            storage.q.data_ptr(),
            k_base,
            k_base if cutlass.const_expr(config.shared_kv) else storage.v.data_ptr(),
            storage.p.data_ptr(),
            storage.statistics.data_ptr(),
            storage.sums.data_ptr(),
        )
        if warp >= config.load_warp:
            cute.arch.setmaxregister_decrease(config.shape.producer_registers)
            if warp < config.load_warp + config.parts:
                part = warp - config.load_warp if cutlass.const_expr(config.parts > 1) else 0
                source = Source(config, operands, atoms, coordinates, shared, dtype, part)
                load(config, channels, source, where)
        else:
            cute.arch.setmaxregister_increase(config.shape.consumer_registers)
            group = warp // (WARPGROUP_THREADS // WARP_THREADS)
            if cutlass.const_expr(config.exchanges):  # each has code of its own: ``exchange`` says why
                for each in cutlass.range_constexpr(config.consumers):
                    if group == each:
                        consume(config, channels, shared, operands, where, scale_log2, dtype, thread, each)
            else:
                consume(config, channels, shared, operands, where, scale_log2, dtype, thread, group)


@cute.jit
def consume(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands,
    where,
    scale_log2,
    dtype: cutlass.Constexpr,
    thread,
    group,
):
    """One consumer: the CTA's tiles, one after another. group: which; known at compile time where P is exchanged.

    Consumes: q_full, and what ``consumer.attend`` or ``exchange.attend_in_turn`` does. Produces: what they do.
    """
    thread = thread % WARPGROUP_THREADS
    row_group, part = group // config.column_parts, group % config.column_parts
    q_base = shared.q + row_group * config.q_bytes
    mma = products(config, dtype, q_base.align(tma.TILE_ALIGNMENT), shared.k, shared.v, part)
    if group == config.consumers - 1:
        pass_turn(config, group)  # the first consumer begins
    tile_use, use = Int32(0), Int32(0)
    for round_ in cutlass.range(rounds(where), unroll=1):
        tile = locate(config, operands, where, index_of(round_))
        mine = rows(config, tile, row_group, thread)
        q_use = tile_use * config.row_groups + row_group
        if tile.span.count > 0:
            channels["q_full"].wait(q_use)
        biases = None
        if cutlass.const_expr(config.bias is not None):
            places = (place(config, tile, row_group, row.index) for row in mine)
            biases = tuple(row_of(config, operands.bias, where_) for where_ in places)
        work = Work(
            config,
            channels,
            mma,
            tile,
            mine,
            biases,
            group,
            row_group,
            part,
            thread,
            use,
            q_use,
            scale_log2,
            shared.v,
        )
        if cutlass.const_expr(config.exchanges):
            state = attend_in_turn(Exchange(work, shared, tile_use))
        else:
            state = attend(work)
        if tile.span.count > 0:
            tile_use += 1
        use += tile.span.count
        stage = None
        if cutlass.const_expr(config.exchanges and config.normalize):
            stage = own_stage(config, shared, group)  # every P has been read
        epilogue(work, state, operands, stage)
