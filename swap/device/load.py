"""The load warp: activations and weights of the product phases, a slot of the ring at a time, through TMA.

CTAs of a cluster share tiles: each loads its part of one and multicasts it to those that need it too. Weights are
constant, so those of a tile's first K tiles are fetched before the load warp waits for the activations.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common import tma
from warpspec.swap.config import K_TILE, ROUTER_WIDTH, SLOT_BYTES, SLOT_ROWS
from warpspec.swap.device.flow import groups_of, reached, wait_for
from warpspec.swap.device.work import Work

ROUTER_BOX = (K_TILE, ROUTER_WIDTH)


class Source(NamedTuple):
    """A matrix in global memory: the atom that carries its descriptor, TMA coordinates (K, ROW)."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


class Sources(NamedTuple):
    """Activations and weights of a product."""

    a: Source
    b: Source


def make_sources(config, ops) -> tuple[Sources, ...]:
    """Host side: descriptors of the kernel's products, in order; fused, then of the router, twice."""
    found = []
    for phase in config.products:
        a, b = (ops.vectors, ops.w13) if phase == "up" else (ops.hidden, ops.w2)
        a_load = tma.make_load(columns_first(a), config.a_box, multicast=config.tiles.cluster_n > 1)
        b_load = tma.make_load(columns_first(b), config.b_box, multicast=config.tiles.cluster_m > 1)
        found.append(Sources(Source(*a_load), Source(*b_load)))
    if config.fused:
        router = Source(*tma.make_load(columns_first(ops.router_w), ROUTER_BOX))
        found.append(Sources(router, router))
    return tuple(found)


def columns_first(matrix: cute.Tensor) -> cute.Tensor:
    """(COLUMN, ROW) of a matrix [ROW, COLUMN]."""
    rows, columns = matrix.shape
    return cute.make_tensor(matrix.iterator, cute.make_layout((columns, rows), stride=(1, matrix.stride[0])))


class Loads(NamedTuple):
    """How a CTA fills slots in one phase. a, b: rings of its parts of activations and weights; a_parts, b_parts: parts
    of a slot; a_mask, b_mask: the CTAs that a part goes to, None where there is only this one. a_rank, b_rank: which
    parts are this CTA's."""

    a: tma.TileRing
    b: tma.TileRing
    a_parts: int
    b_parts: int
    a_mask: Int32 | None
    b_mask: Int32 | None
    a_rank: Int32
    b_rank: Int32

    @classmethod
    def make(cls, config, sources: Sources, base, dtype, work: Work) -> Loads:
        """base: of the ring."""
        tiles, rings = config.tiles, []
        for source, box in ((sources.a, config.a_box), (sources.b, config.b_box)):
            parts = cute.group_modes(cute.local_tile(source.coordinates, box, (None, None)), 2, 4)
            boxes = config.slots * SLOT_ROWS // box[1]
            rings.append(tma.TileRing.make(source.atom, parts, tma.shared_tiles(base, dtype, box, boxes)))
        row_mask = sum(1 << n * tiles.cluster_m for n in range(tiles.cluster_n))
        column_mask = (1 << tiles.cluster_m) - 1
        return cls(
            *rings,
            tiles.cluster_n,
            tiles.cluster_m,
            Int32(row_mask) << work.rank_m if tiles.cluster_n > 1 else None,
            Int32(column_mask) << (work.rank_n * tiles.cluster_m) if tiles.cluster_m > 1 else None,
            work.rank_n,
            work.rank_m,
        )

    def load_a(self, channels, use, k_tile, row_tile) -> None:
        """Fill a slot with activations, once it is free."""
        stage, mbarrier = expect(channels, use)
        place = (k_tile, row_tile * self.a_parts + self.a_rank)
        self.a.load(place, stage * self.a_parts + self.a_rank, mbarrier, self.a_mask)

    def load_b(self, channels, use, k_tile, column_slot) -> None:
        """Fill a slot with weights of 128 columns, once it is free."""
        stage, mbarrier = expect(channels, use)
        place = (k_tile, column_slot * self.b_parts + self.b_rank)
        self.b.load(place, stage * self.b_parts + self.b_rank, mbarrier, self.b_mask)


def expect(channels, use) -> tuple:
    """(slot, its mbarrier) of the use-th fill, once the slot is free."""
    full = channels["full"]
    channels["empty"].wait_previous(use)
    full.expect_bytes(use, SLOT_BYTES)
    return full.stage(use), full.barrier(use)


@cute.jit
def load_phase(
    config: cutlass.Constexpr,
    phase: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    loads,
    work,
    ops,
    flow,
    step,
    use,
) -> Int32:
    """Fill the ring for all tiles of a product phase. Returns the slots filled so far, ``use`` before.

    step: FFN steps done. Produces full, consumes empty. Activations wait for the row tile's counts of the phase
    before in the fused kernel, else for the end of the kernel before.
    """
    weight_slots, k_slots = config.weight_slots(phase), config.k_slots(phase)
    for index in cutlass.range(work.cluster, work.pieces, work.clusters, unroll=1):
        piece = work.piece(config, index)
        padding = config.padding(phase, use)
        for i in cutlass.range(padding, unroll=1):
            channels["empty"].wait_previous(use + i)
            channels["full"].arrive_warp(use + i)
        use += padding
        column_slot = piece.column_tile * weight_slots
        ahead = Int32(0)
        counter, target = flow.counters, Int32(0)
        if cutlass.const_expr(config.fused):
            counter, target = awaited(config, phase, ops, flow, piece, step)
            if reached(counter, target) == 0:
                ahead = cutlass.min(piece.count, config.ahead(phase))
        elif index == work.cluster:
            ahead = cutlass.min(piece.count, config.ahead(phase))
        for k_tile in cutlass.range(ahead, unroll=1):
            for i in cutlass.range_constexpr(weight_slots):
                loads.load_b(channels, use + k_tile * k_slots + 1 + i, piece.first + k_tile, column_slot + i)
        if cutlass.const_expr(config.fused):
            wait_for(counter, target)
            cute.arch.fence_proxy("async.global")
        elif index == work.cluster:
            cute.arch.griddepcontrol_wait()
        for k_tile in cutlass.range(ahead, unroll=1):
            loads.load_a(channels, use + k_tile * k_slots, piece.first + k_tile, piece.row_tile)
        for k_tile in cutlass.range(ahead, piece.count, unroll=1):
            first = use + k_tile * k_slots
            loads.load_a(channels, first, piece.first + k_tile, piece.row_tile)
            for i in cutlass.range_constexpr(weight_slots):
                loads.load_b(channels, first + 1 + i, piece.first + k_tile, column_slot + i)
        use += piece.count * k_slots
    return use


def router_ring(config, source: Source, base, dtype) -> tma.TileRing:
    """tiles (K TILE, 0); two of them to a slot."""
    tiles = cute.group_modes(cute.local_tile(source.coordinates, ROUTER_BOX, (None, None)), 2, 4)
    return tma.TileRing.make(source.atom, tiles, tma.shared_tiles(base, dtype, ROUTER_BOX, 2 * config.slots))


@cute.jit
def load_router(config: cutlass.Constexpr, channels: cutlass.Constexpr, ring, use) -> Int32:
    """Fill slots with the router's weights, which are constant. Returns the slots filled so far, ``use`` before."""
    for i in cutlass.range(config.router_slots, unroll=1):
        slot, mbarrier = expect(channels, use + i)
        for half in cutlass.range_constexpr(2):
            ring.load((2 * i + half, 0), 2 * slot + half, mbarrier)
    return use + config.router_slots


def awaited(config, phase, ops, flow, piece, step) -> tuple:
    """(counter, target) of what a tile's activations wait for. A row tile past the last has none: the last one's."""
    row_tile = cutlass.min(piece.row_tile, flow.row_tiles - 1)
    if phase == "up":
        return flow.tile("rows", row_tile), groups_of(ops.vectors.shape[0], row_tile) * (step + 1)
    column_tiles = ops.w13.shape[0] // config.tiles.up_n
    return flow.tile("up", row_tile), Int32(column_tiles * (step + 1))


@cute.jit
def drain(config: cutlass.Constexpr, channels: cutlass.Constexpr, use):
    """Wait until every slot has been released: no arrival is on its way to a barrier of a CTA that has ended."""
    for last in cutlass.range(cutlass.max(use - config.slots, 0), use, unroll=1):
        channels["empty"].wait(last)
