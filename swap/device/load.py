"""The load warp: loads activations and weights of the product phases through TMA, one stage of the ring at a time.

The CTAs of a cluster share tiles: each loads a part of a tile and multicasts it to the others that need it. Weights are
constant, so the load warp fetches those of a tile's first K tiles before it waits for activations.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device import tma
from warpspec.swap.config import A_BYTES, GROUP_TILES, K_TILE, ROUTER_WIDTH
from warpspec.swap.device.flow import groups_of, reached, wait_for
from warpspec.swap.device.work import SwapWork

ROUTER_BOX = (K_TILE, ROUTER_WIDTH)


class Source(NamedTuple):
    """A matrix in global memory: the copy atom with its descriptor, and TMA coordinates (K, ROW)."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


class Sources(NamedTuple):
    """Activations and weights of a product."""

    a: Source
    b: Source


def make_sources(config, ops) -> tuple[Sources, ...]:
    """Make the descriptors of the kernel's products, in order; in the fused kernel also the router's, twice.

    Host side.
    """
    found = []
    for phase in config.products:
        a, b = (ops.vectors, ops.w13) if phase == "up" else (ops.hidden, ops.w2)
        a_load = tma.make_load(columns_first(a), config.a_box, multicast=config.tiles.cluster_n > 1)
        b_load = tma.make_load(columns_first(b), config.b_box(phase), multicast=config.tiles.cluster_m > 1)
        found.append(Sources(Source(*a_load), Source(*b_load)))
    if config.fused:
        router = Source(*tma.make_load(columns_first(ops.router_w), ROUTER_BOX))
        found.append(Sources(router, router))
    return tuple(found)


def columns_first(matrix: cute.Tensor) -> cute.Tensor:
    """View a matrix [ROW, COLUMN] as (COLUMN, ROW)."""
    rows, columns = matrix.shape
    return cute.make_tensor(matrix.iterator, cute.make_layout((columns, rows), stride=(1, matrix.stride[0])))


class ProductLoads(NamedTuple):
    """The loads by which a CTA fills stages in one phase.

    a, b: rings of this CTA's parts of activations and weights. a_parts, b_parts: number of parts of a stage. a_rank,
    b_rank: which part this CTA loads. a_mask, b_mask: CTAs that receive the part; None if only this CTA does.
    """

    a: tma.TileRing
    b: tma.TileRing
    a_parts: int
    b_parts: int
    a_mask: Int32 | None
    b_mask: Int32 | None
    a_rank: Int32
    b_rank: Int32

    @classmethod
    def make(cls, config, phase: str, sources: Sources, base, dtype, work: SwapWork) -> ProductLoads:
        """base: the ring's address."""
        tiles, stages, rings = config.tiles, config.stages(phase), []
        for source, box, at, parts in (
            (sources.a, config.a_box, base, tiles.cluster_n),
            (sources.b, config.b_box(phase), base + stages * A_BYTES, tiles.cluster_m),
        ):
            at = at.align(tma.TILE_ALIGNMENT)
            boxes = cute.group_modes(cute.local_tile(source.coordinates, box, (None, None)), 2, 4)
            rings.append(
                tma.TileRing.make(source.atom, boxes, tma.shared_tiles(at, dtype, box, stages * parts))
            )
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

    def load_a(self, full, use, item, k_tile) -> None:
        """Load this CTA's part of a stage's activations."""
        place = (item.first + k_tile, item.row_tile * self.a_parts + self.a_rank)
        self.a.load(place, full.stage(use) * self.a_parts + self.a_rank, full.barrier(use), self.a_mask)

    def load_b(self, full, use, item, k_tile) -> None:
        """Load this CTA's part of a stage's weights."""
        place = (item.first + k_tile, item.column_tile * self.b_parts + self.b_rank)
        self.b.load(place, full.stage(use) * self.b_parts + self.b_rank, full.barrier(use), self.b_mask)


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
    """Fill the phase's stages for all of its tiles. use: stages filled before; returns the new count.

    step: FFN steps done. Produces full, consumes empty. Before it loads activations, it waits in the fused kernel for
    the previous phase's counts of the row tile, otherwise for the end of the previous kernel.
    """
    full, empty = channels[f"{phase}_full"], channels[f"{phase}_empty"]
    stages, stage_bytes = config.stages(phase), config.stage_bytes(phase)
    for index in cutlass.range(work.cluster, work.items, work.clusters, unroll=1):
        item = work.item(config, index)
        ahead = Int32(0)
        if cutlass.const_expr(config.fused):
            counter, target = awaited(config, phase, ops, flow, item, step, Int32(0))
            if reached(counter, target) == 0:
                ahead = cutlass.min(item.count, stages)
        elif index == work.cluster:
            ahead = cutlass.min(item.count, stages)
        for k_tile in cutlass.range(ahead, unroll=1):
            empty.wait_previous(use + k_tile)
            full.expect_bytes(use + k_tile, stage_bytes)
            loads.load_b(full, use + k_tile, item, k_tile)
        if cutlass.const_expr(not config.fused):  # noqa: SIM102
            if index == work.cluster:
                cute.arch.griddepcontrol_wait()
        for k_tile in cutlass.range(item.count, unroll=1):
            if cutlass.const_expr(config.fused):
                begins = k_tile == 0
                if cutlass.const_expr(phase == "down"):
                    begins = begins | ((item.first + k_tile) % config.group_k == 0)
                if begins:
                    wait_for(*awaited(config, phase, ops, flow, item, step, k_tile))
                    cute.arch.fence_proxy("async.global")
            if k_tile >= ahead:
                empty.wait_previous(use + k_tile)
                full.expect_bytes(use + k_tile, stage_bytes)
                loads.load_b(full, use + k_tile, item, k_tile)
            loads.load_a(full, use + k_tile, item, k_tile)
        use += item.count
    return use


def router_ring(config, source: Source, base, dtype) -> tma.TileRing:
    """The router's weights as tiles (K TILE, 0), one after another from the start of the ring."""
    tiles = cute.group_modes(cute.local_tile(source.coordinates, ROUTER_BOX, (None, None)), 2, 4)
    return tma.TileRing.make(
        source.atom, tiles, tma.shared_tiles(base, dtype, ROUTER_BOX, config.d_model // K_TILE)
    )


@cute.jit
def load_router(config: cutlass.Constexpr, channels: cutlass.Constexpr, ring, use) -> Int32:
    """Load the router's weights, which are constant. use: how often before; returns the new count."""
    full = channels["router_full"]
    full.expect_bytes(use, config.router_bytes)
    for k_tile in cutlass.range(config.d_model // K_TILE, unroll=1):
        ring.load((k_tile, 0), k_tile, full.barrier(use))
    return use + 1


def awaited(config, phase, ops, flow, item, step, k_tile) -> tuple:
    """(counter, target) that a K tile of a tile's activations waits for.

    Row tiles past the last have no counter; they use the last one's.
    """
    row_tile = cutlass.min(item.row_tile, flow.row_tiles - 1)
    if phase == "up":
        return flow.tile("rows", row_tile), groups_of(ops.vectors.shape[0], row_tile) * (step + 1)
    column_tiles = ops.w13.shape[0] // config.tiles.up_n
    group = (item.first + k_tile) // config.group_k
    tiles = cutlass.min(column_tiles - group * GROUP_TILES, GROUP_TILES)
    return flow.tile("up", row_tile, group), Int32(tiles * (step + 1))
