"""The attention kernel for sm_100a: host side, storage, role dispatch.

ARCHITECTURE.md, "Attention kernel (sm_100a)", has the picture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device import tmem
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.fmha.device.convert import convert
from warpspec.fmha.device.grid import Grid, Where, grid_of, heads_of_kv
from warpspec.fmha.device.host import SMEM_CARVEOUT_PERCENT, AttentionHost
from warpspec.fmha.device.line import chunks_of, place_chunks, write_join
from warpspec.fmha.device.logits import LogitNumbers
from warpspec.fmha.device.record import read_tile, records_of, write_end, write_tile
from warpspec.fmha.device.scales import score_numbers
from warpspec.fmha.device.tiles import each_found, each_tile
from warpspec.fmha.sm100 import bias as biases
from warpspec.fmha.sm100.epilogue import epilogue
from warpspec.fmha.sm100.load import drain_all, load, rings
from warpspec.fmha.sm100.mma import DTYPES, Fragments, fragments, mma
from warpspec.fmha.sm100.softmax_warps import Columns, softmax

NO_USES = (0, 0)  # use counts of M tiles with keys, KV tiles


class Attention(AttentionHost):
    """The kernel of one ``AttentionConfig``."""

    def launch(self, operands, numbers, stream):
        """Host side: TMA descriptors, grid, launch. Every tile has a CTA, whatever ``numbers.ctas``, unless work is cut
        by length."""
        config = self.config
        loads = self.loads(operands)
        if config.bias_stages:
            loads.append(biases.make_load(config, operands.bias))
        tiles, splits = grid_of(config, operands)
        if config.scheduler.cuts_tiles:
            where, ctas = chunks_of(config, operands, numbers), numbers.ctas
        else:
            ctas = tiles.size * splits
            where = Where(
                Grid(tiles.query_tiles, tiles.head_tiles, splits, heads_of_kv(operands)),
                ctas,
                None,
                *numbers.window,
            )
        self.kernel(
            operands,
            tuple(atom for atom, _ in loads),
            tuple(coordinates for _, coordinates in loads),
            where,
            numbers.logits,
        ).launch(
            grid=(ctas, 1, 1),
            block=(config.threads, 1, 1),
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands, atoms, coordinates, where, numbers):
        config = self.config
        dtype = operands.q.element_type
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # 1. Shared memory: barriers, the TMEM address, ends of chunks, records, Q, K and V.
        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())

        # 2. Tensor memory: warp 0 allocates and, after the epilogue, frees.
        tmem.allocate(warp, config.tmem_allocation, storage.tmem_address.data_ptr())
        if warp == config.load_warp:
            for atom in atoms:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        if cutlass.const_expr(config.scheduler.cuts_tiles):
            where = where.at(config, storage.cursors.data_ptr())
            place_chunks(config, operands, where)
        cute.arch.sync_threads()
        columns = tmem.base(storage.tmem_address.data_ptr())
        if cutlass.const_expr(config.output.splits or config.scheduler.cuts_tiles):
            cute.arch.griddepcontrol_launch_dependents()  # the second launch starts meanwhile, and waits

        # 3. Roles.
        found = where
        if cutlass.const_expr(config.scheduler.has_warp):
            found = records_of(config, storage.records.data_ptr(), where, operands)
        q, k, p = storage.q.data_ptr(), storage.k.data_ptr(), storage.p.data_ptr()
        v = k if cutlass.const_expr(config.format.shared_kv) else storage.v.data_ptr()
        cta = Cta(config, channels, storage, operands, where, found, Bases(q, k, v, p), columns, dtype)
        if warp < len(config.softmax_warps):
            if cutlass.const_expr(config.moves_registers):
                cute.arch.setmaxregister_increase(config.softmax_registers)
            play_softmax(cta, thread, numbers)
            tmem.free(warp, columns, config.tmem_allocation)
        else:
            if cutlass.const_expr(config.moves_registers):
                cute.arch.setmaxregister_decrease(config.other_registers)
            if warp == config.load_warp:
                play_load(cta, atoms, coordinates)
            if warp == config.mma_warp:
                play_mma(cta)
            if cutlass.const_expr(config.converts):  # noqa: SIM102
                if warp >= config.convert_warp:
                    play_convert(cta)


class Bases(NamedTuple):
    """Where Q, the rings of 16-bit K and V, and P begin in shared memory."""

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    p: cute.Pointer


@dataclass(frozen=True)
class Cta:
    """What the roles of a CTA share.

    where: how it finds its tiles. found: the same, or the records of the tiles that the load warp finds. columns: its
    tensor memory. dtype: of Q.
    """

    config: object
    channels: dict
    storage: object
    operands: object
    where: Where
    found: object
    bases: Bases
    columns: object
    dtype: type


def play_softmax(cta: Cta, thread, numbers) -> None:
    """Warps 0 to 3: softmax, correction and epilogue of every tile (``finish_rows``). At its end nothing reads tensor
    memory any more."""
    config, storage, columns = cta.config, cta.storage, cta.columns
    places = Columns(
        thread=thread,
        s=columns + config.tmem_s,
        p=cute.recast_ptr(columns + config.tmem_p, dtype=Int32),
        o=columns + config.tmem_o,
        p_smem=cta.bases.p,
        v_smem=cta.bases.v,
        bias=None,
        use=0,
    )
    bias, dtype = storage.bias.data_ptr(), DTYPES[config.p_dtype]
    role = SoftmaxRole(config, cta.channels, cta.operands, cta.found, places, bias, numbers, dtype)
    each_tile(config, cta.operands, cta.found, finish_rows, role, NO_USES, keeps=True)
    cute.arch.barrier(barrier_id=1, number_of_threads=config.softmax_threads)


def play_load(cta: Cta, atoms, coordinates) -> None:
    """The load warp: finds the tiles and issues the loads of each (``load_tile``), then waits until all were read."""
    config, storage = cta.config, cta.storage
    kv_bases = raw_rings(config, storage) if config.converts else cta.bases[1:3]
    bases = (cta.bases.q, *kv_bases, storage.bias.data_ptr())
    scales = block_scales(config, storage)
    role = LoadRole(
        config, cta.channels, cta.operands, cta.found, atoms, coordinates, bases, scales, cta.dtype
    )
    number, uses = each_found(config, cta.operands, cta.where, load_tile, role, (0, NO_USES))
    if config.scheduler.has_warp:
        write_end(role, number)
    drain_all(config, cta.channels, uses)


def play_mma(cta: Cta) -> None:
    """The MMA warp: issues QK and PV of every tile (``multiply_tile``). First it leaves the CTA's record for joins."""
    config = cta.config
    if config.scheduler.cuts_tiles:
        write_join(config, cta.operands, cta.where)
    products = fragments(config, cta.dtype, *cta.bases, cta.columns)
    role = MmaRole(config, cta.channels, products, cta.dtype)
    each_tile(config, cta.operands, cta.found, multiply_tile, role, NO_USES)


def play_convert(cta: Cta) -> None:
    """The converter's warps: turn tiles of codes into 16-bit ones (``device.convert``)."""
    config, storage = cta.config, cta.storage
    raw, scales = raw_rings(config, storage), block_scales(config, storage)
    convert(config, cta.channels, cta.operands, raw, cta.bases[1:3], scales, cta.found)


def raw_rings(config, storage) -> tuple:
    """Where the rings of codes, filled by TMA, begin."""
    return tuple(
        storage.raw.data_ptr() + i * config.codes.ring_bytes for i in range(len(config.format.rings))
    )


def block_scales(config, storage):
    """Where the rings of block scales begin; None without."""
    return storage.scales.data_ptr() if config.format.kv_block > 0 else None


@dataclass(frozen=True)
class SoftmaxRole:
    """A softmax thread's state for all tiles. found: ``where`` of ``each_tile``. columns: those of a first tile. bias:
    its shared memory. numbers: those of the map between S and P."""

    config: object
    channels: dict
    operands: object
    found: object
    columns: Columns
    bias: cute.Pointer
    numbers: LogitNumbers
    dtype: type


@cute.jit
def finish_rows(role, tile, uses):
    """A softmax thread's share of an M tile: all KV tiles, then the results. uses: (M tiles, KV tiles) before it."""
    config, channels, operands = role.config, role.channels, role.operands
    thread = role.columns.thread
    numbers = score_numbers(config, operands, tile, role.numbers)
    row = tile.row(config.row_of(thread), config.column_group_of(thread))
    bias = biases.source(config, operands.bias, tile, row, role.bias)
    columns = replace(role.columns, bias=bias, use=uses[1])
    state = softmax(config, channels, row, tile.span, columns, numbers, role.dtype)
    if cutlass.const_expr(config.scheduler.has_warp):  # read again: there are no registers to keep it in
        tile = read_tile(config, role.found, uses[0])
        row = tile.row(config.row_of(thread), config.column_group_of(thread))
    place = tile.place(row.index)
    epilogue(config, channels, row, place, tile, state, columns, operands, numbers)
    return uses[0] + 1, uses[1] + tile.span.count


@dataclass(frozen=True)
class LoadRole:
    """The load warp's state for all tiles. records: the records it writes, if it computes tiles for the other roles.
    bases: shared memory of Q, K, V and the bias. scales: shared memory of block scales."""

    config: object
    channels: dict
    operands: object
    records: object
    atoms: tuple
    coordinates: tuple
    bases: tuple
    scales: cute.Pointer | None
    dtype: type


@cute.jit
def load_tile(role, tile, uses):
    """``load.load`` for an M tile. uses: M tiles before it, and those of ``load.load``."""
    config, (number, loaded) = role.config, uses
    if cutlass.const_expr(config.scheduler.has_warp):
        write_tile(role, tile, number)
    filled = rings(config, role.atoms, role.coordinates, role.bases[:-1], tile, role.dtype)
    boxes = biases.ring(config, role.atoms[-1], role.coordinates[-1], role.bases[-1], tile)
    load(config, role.channels, filled, tile, role.operands, boxes, role.scales, loaded)
    return number + 1, uses_after(tile, loaded)


@dataclass(frozen=True)
class MmaRole:
    """The MMA warp's state for all tiles."""

    config: object
    channels: dict
    operands: Fragments
    dtype: type


@cute.jit
def multiply_tile(role, tile, uses):
    """``mma.mma`` for an M tile."""
    mma(role.config, role.channels, role.operands, tile.span, role.dtype, uses)
    return uses_after(tile, uses)


def uses_after(tile, uses) -> tuple:
    """(M tiles with keys, KV tiles) that the CTA has finished after ``tile``."""
    tiles, steps = uses
    return tiles + Int32(tile.span.count > 0), steps + tile.span.count
