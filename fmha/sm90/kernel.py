"""The attention kernel for sm_90a: host side, storage, role dispatch.

ARCHITECTURE.md, "Attention kernel (sm_90a)", has the picture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.device.wgmma import QUAD, ROW_DISTANCE, THREAD_ROWS
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.device.ahead import prefetch_small, prefetch_table, wait_unless_found
from warpspec.fmha.device.bias import row_of
from warpspec.fmha.device.convert import convert
from warpspec.fmha.device.cut_ahead import cut_ahead
from warpspec.fmha.device.grid import DivisorGrid, Grid, Where, grid_of, heads_of_kv
from warpspec.fmha.device.host import SMEM_CARVEOUT_PERCENT, AttentionHost
from warpspec.fmha.device.line import chunks_of, place_chunks, write_join
from warpspec.fmha.device.logits import LogitNumbers
from warpspec.fmha.device.record import Record, records_of
from warpspec.fmha.device.scales import score_numbers
from warpspec.fmha.device.tiles import each_tile, schedule
from warpspec.fmha.sm90.by_warp import attend_by_warp
from warpspec.fmha.sm90.consumer import (
    ConsumerTile,
    Products,
    attend,
    attend_idle,
    pass_turn,
    products,
)
from warpspec.fmha.sm90.epilogue import epilogue
from warpspec.fmha.sm90.fragment import thread_rows
from warpspec.fmha.sm90.load import load
from warpspec.fmha.sm90.narrow import ROW_THREADS, narrow_queries
from warpspec.fmha.sm90.pair import Pair, attend_either, attend_paired, own_stage, products_of_both
from warpspec.fmha.sm90.rings import Source


class Buffers(NamedTuple):
    """Addresses of the shared-memory regions.

    q, k, v, p: Uint8 pointers; v is k where V is K. statistics, sums: Float32 pointers, for paired consumers. raw:
    Uint8 pointer to the rings of codes that are converted. partial, states: Float32 pointers, for warps that have their
    own KV tiles. scales: Uint8 pointer to the rings of block scales.
    """

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    p: cute.Pointer
    statistics: cute.Pointer
    sums: cute.Pointer
    raw: cute.Pointer
    partial: cute.Pointer | None
    states: cute.Pointer | None
    scales: cute.Pointer | None


class Attention(AttentionHost):
    """The kernel of one ``AttentionConfig``."""

    def launch(self, operands, numbers, stream):
        """Host side: TMA descriptors, grid, launch."""
        config = self.config
        loads = self.loads(operands)
        where = where_of(config, operands, numbers)
        ctas = numbers.ctas if config.scheduler.cuts_tiles else cutlass.min(where.tiles, numbers.ctas)
        self.kernel(
            operands,
            tuple(atom for atom, _ in loads),
            tuple(coordinates for _, coordinates in loads),
            where,
            numbers.logits,
        ).launch(
            grid=(ctas, 1, 1),
            block=(config.threads, 1, 1),
            min_blocks_per_mp=config.shape.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands, atoms, coordinates, where, numbers):
        config = self.config
        dtype = operands.q.element_type
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # 1. Shared memory: barriers, Q of every consumer, K and V, the data that paired consumers exchange.
        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        if warp == config.load_warp:
            for atom in atoms:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        # Until a wait for the launch before, a thread touches shared memory, descriptors and prefetches alone. The next
        # launch starts behind a wait, so that one launch at most is still running when it does.
        if cutlass.const_expr(not config.waits_late):
            if warp == config.join_warp:
                prefetch_small(operands)
                if cutlass.const_expr(operands.page_table is not None):
                    prefetch_table(operands.page_table)
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(config.scheduler.places_chunks or config.scheduler.cuts_ahead):
            where = where.at(config, storage.cursors.data_ptr())
        if cutlass.const_expr(config.scheduler.places_chunks):
            place_chunks(config, operands, where)
        cute.arch.sync_threads()

        # 2. Roles.
        tiles = where
        if cutlass.const_expr(config.scheduler.has_warp):
            order = storage.order.data_ptr()
            tiles = records_of(config, storage.records.data_ptr(), where, operands, order)
        k_base = storage.k.data_ptr()
        shared = Buffers(
            storage.q.data_ptr(),
            k_base,
            k_base if cutlass.const_expr(config.format.shared_kv) else storage.v.data_ptr(),
            k_base + config.kv.v_bytes if cutlass.const_expr(config.p_in_keys) else storage.p.data_ptr(),
            storage.statistics.data_ptr(),
            storage.sums.data_ptr(),
            storage.raw.data_ptr() if cutlass.const_expr(config.converts) else k_base,
            storage.partial.data_ptr() if cutlass.const_expr(config.by_warp) else None,
            storage.states.data_ptr() if cutlass.const_expr(config.by_warp) else None,
            storage.scales.data_ptr() if cutlass.const_expr(config.format.kv_block > 0) else None,
        )
        if cutlass.const_expr(config.converts):
            if warp >= config.convert_warp:
                set_registers(config, config.shape.converter_registers)
                wait_unless_found(config)
                rings = tuple(
                    shared.raw + i * config.codes.ring_bytes for i in range(len(config.format.rings))
                )
                convert(config, channels, operands, rings, (shared.k, shared.v), shared.scales, tiles)
            else:
                play(config, channels, shared, operands, (atoms, coordinates), where, tiles, numbers, dtype)
        else:
            play(config, channels, shared, operands, (atoms, coordinates), where, tiles, numbers, dtype)


@cute.jit
def play(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands,
    maps,
    where,
    tiles,
    numbers,
    dtype: cutlass.Constexpr,
):
    """The roles of the producer's warpgroup and of the consumers. maps: TMA's atoms and coordinates."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp >= config.load_warp:
        if cutlass.const_expr(config.scheduler.leaves_joins):  # noqa: SIM102
            if warp == config.join_warp:
                write_join(config, operands, where)
        if cutlass.const_expr(config.scheduler.cuts_ahead):  # noqa: SIM102  (while it has registers)
            if warp == config.scheduler_warp:
                cut_ahead(config, channels, operands, where, tiles)
        cute.arch.setmaxregister_decrease(config.shape.producer_registers)
        if warp < config.load_warp + config.kv_groups:
            column_group = warp - config.load_warp if cutlass.const_expr(config.kv_groups > 1) else 0
            source = Source(config, operands, *maps, shared, dtype, column_group)
            rings = tuple(range(1 if cutlass.const_expr(config.loads_apart) else len(config.format.rings)))
            load(config, channels, source, tiles, rings)
        else:
            if cutlass.const_expr(config.scheduler.has_warp):  # noqa: SIM102
                if warp == config.scheduler_warp:
                    schedule(config, channels, operands, where, tiles)
            if cutlass.const_expr(config.loads_apart):  # noqa: SIM102
                if warp == config.value_warp:
                    source = Source(config, operands, *maps, shared, dtype, 0)
                    load(config, channels, source, tiles, (1,))
    else:
        cute.arch.setmaxregister_increase(config.shape.consumer_registers)
        consumer = warp // (WARPGROUP_THREADS // WARP_THREADS)
        if cutlass.const_expr(config.paired and not config.shares_end):  # code of its own: ``pair`` says why
            for each in cutlass.range_constexpr(config.consumers):
                if consumer == each:
                    consume(config, channels, shared, operands, tiles, numbers, dtype, thread, each)
        else:
            consume(config, channels, shared, operands, tiles, numbers, dtype, thread, consumer)


def set_registers(config, registers: int) -> None:
    """Give a warpgroup its registers, more or fewer than at launch."""
    more = registers * config.threads >= config.register_pool
    (cute.arch.setmaxregister_increase if more else cute.arch.setmaxregister_decrease)(registers)


def where_of(config, operands, numbers):
    """What persistent CTAs need to find their tiles. Host side."""
    tiles, splits = grid_of(config, operands)
    group = heads_of_kv(operands)
    if config.scheduler.cuts_tiles:
        return chunks_of(config, operands, numbers)
    total = Int32(tiles.size * splits)
    section = numbers.section
    if config.paired and not config.scheduler.has_warp:
        grid = DivisorGrid.of(tiles, splits, group, total, cutlass.min(total, numbers.ctas))
        section = cute.FastDivmodDivisorV2(section)
    else:
        grid = Grid(tiles.query_tiles, tiles.head_tiles, splits, group)
    return Where(grid, total, section, *numbers.window)


@dataclass(frozen=True)
class Consumer:
    """A consumer's state for all of its tiles.

    number: the consumer's number, a compile-time constant if paired. row_group: the number of its 64 rows.
    column_group: its columns of O. thread: 0..127 within the consumer; if warps have their own KV tiles, the number
    among all consumers' threads. numbers: the numbers of the map between S and P. If consumers share the code of a
    tile's end (``config.shares_end``), mma has the products of both, and number, column_group and thread are carried
    from tile to tile.
    """

    config: object
    channels: dict
    shared: Buffers
    operands: object
    where: object
    numbers: LogitNumbers
    mma: Products | tuple
    number: Int32 | int
    row_group: Int32 | int
    column_group: Int32 | int
    thread: Int32


@cute.jit
def consume(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands,
    where,
    numbers,
    dtype: cutlass.Constexpr,
    thread,
    consumer,
):
    """The role of one consumer: it loops over the CTA's tiles. consumer: its number, a compile-time constant if paired.

    Consumes: q_full, and what ``consumer.attend`` or ``pair.attend_paired`` does. Produces: what they do.
    """
    wait_unless_found(config)
    row_group, column_group = consumer // config.column_groups, consumer % config.column_groups
    if cutlass.const_expr(config.by_warp):
        row_group = 0
    else:
        thread = thread % WARPGROUP_THREADS
    q_base = shared.q + row_group * config.q_bytes
    if cutlass.const_expr(config.by_warp):
        mma = Products.of_rows(config)
    elif cutlass.const_expr(config.shares_end):
        mma = products_of_both(config, q_base.align(tma.TILE_ALIGNMENT), shared.k, shared.v)
    else:
        mma = products(config, q_base.align(tma.TILE_ALIGNMENT), shared.k, shared.v, column_group)
    if consumer == config.consumers - 1:
        pass_turn(config, consumer)  # the first consumer begins
    role = Consumer(
        config, channels, shared, operands, where, numbers, mma, consumer, row_group, column_group, thread
    )
    uses = (Int32(0), Int32(0), Int32(0))
    if cutlass.const_expr(config.shares_end):
        uses = (*uses, Int32(column_group), Int32(thread))
    each_tile(config, operands, where, consume_tile, role, uses, keeps=config.rereads)


@cute.jit
def consume_tile(role, tile, uses):
    """One tile of a consumer. uses: (tiles with keys, KV tiles, tiles) that the CTA has finished before; returns the
    counts after. If consumers share the code of a tile's end, the column group and the thread follow."""
    config, channels, operands = role.config, role.channels, role.operands
    tile_use, use, number, *carried = uses
    if cutlass.const_expr(config.shares_end):
        role = replace(role, number=carried[0], column_group=carried[0], thread=carried[1])
    mine = thread_rows(config, tile, role.row_group, role.thread)
    numbers = score_numbers(config, operands, tile, role.numbers)  # k_scale arrives while Q does
    q_use = tile_use * config.rows.groups + role.row_group
    if tile.span.count > 0:
        channels["q_full"].wait(q_use)
    row_factors = None
    if cutlass.const_expr(config.narrows_q and not config.by_warp):
        row_factors = narrow_rows(role, tile)
    biases = None
    if cutlass.const_expr(config.logits.bias is not None):
        places = (tile.place(row.index, role.row_group) for row in mine)
        biases = tuple(row_of(config, operands.bias, place) for place in places)
    work = ConsumerTile(
        config,
        channels,
        role.mma,
        tile,
        mine,
        biases,
        role.number,
        role.row_group,
        role.column_group,
        role.thread,
        use,
        q_use,
        numbers,
        role.shared,
        row_factors,
        Record(role.where, number) if cutlass.const_expr(config.rereads) else None,
    )
    if cutlass.const_expr(config.skips_idle):
        if work.idle:
            attend_idle(work)
        else:
            epilogue(work, attend(work), operands, None)
    elif cutlass.const_expr(config.shares_end):
        state, work = attend_either(work, role.mma, tile_use)
        epilogue(work.again(), state, operands, None)
        carried = (work.column_group, work.thread)
    elif cutlass.const_expr(config.paired):
        state = attend_paired(Pair(work, role.shared, tile_use))
        stage = None
        # Adding up pieces leaves no registers for it.
        if cutlass.const_expr(config.output.normalize and not (config.p_in_keys or config.scheduler.adds_up)):
            stage = own_stage(config, role.shared, role.number)  # every P has been read
        epilogue(work.again(), state, operands, stage)
    elif cutlass.const_expr(config.by_warp):
        merger = number % config.consumer_warps
        state = attend_by_warp(work, merger)
        if role.thread // WARP_THREADS == merger:
            epilogue(work.again(), state, operands, None)
    else:
        epilogue(work, attend(work), operands, None)
    if tile.span.count > 0:
        tile_use += 1
    return tile_use, use + tile.span.count, number + 1, *carried


@cute.jit
def narrow_rows(role, tile) -> tuple:
    """``narrow_queries`` for a consumer's rows; returns the factors of the scores of the thread's two rows."""
    config, factor = role.config, Float32(1.0)
    if tile.span.count > 0:
        base = role.shared.q.toint() + role.row_group * config.q_bytes
        factor = narrow_queries(config, base, role.number, role.thread)
    first = role.thread % WARP_THREADS // QUAD
    lanes = (ROW_THREADS * (first + r * ROW_DISTANCE) for r in range(THREAD_ROWS))
    return tuple(cute.arch.shuffle_sync(factor, lane) for lane in lanes)
