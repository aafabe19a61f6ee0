"""The load warp: activations and weights of the product phases, a K tile a stage, through TMA.

CTAs of a cluster share tiles: each loads its part of one and multicasts it to those that need it too. Weights are
constant, so those of a tile's first stages are fetched before the load warp waits for the activations.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common import tma
from warpspec.swap.device.flow import groups_of, reached, wait_for
from warpspec.swap.device.work import Work


class Source(NamedTuple):
    """A matrix in global memory: the atom that carries its descriptor, TMA coordinates (K, ROW)."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


class Sources(NamedTuple):
    """Activations and weights of a product."""

    a: Source
    b: Source


def make_sources(config, ops) -> tuple[Sources, ...]:
    """Host side: descriptors of the kernel's products, in order."""
    found = []
    for phase in config.products:
        a, b = (ops.vectors, ops.w13) if phase == "up" else (ops.hidden, ops.w2)
        a_load = tma.make_load(columns_first(a), config.a_box(), multicast=config.tiles.cluster_n > 1)
        b_load = tma.make_load(columns_first(b), config.b_box(phase), multicast=config.tiles.cluster_m > 1)
        found.append(Sources(Source(*a_load), Source(*b_load)))
    return tuple(found)


def columns_first(matrix: cute.Tensor) -> cute.Tensor:
    """(COLUMN, ROW) of a matrix [ROW, COLUMN]."""
    rows, columns = matrix.shape
    return cute.make_tensor(matrix.iterator, cute.make_layout((columns, rows), stride=(1, matrix.stride[0])))


class Loads(NamedTuple):
    """How a CTA fills stages in one phase. a, b: rings of its parts; a_parts, b_parts: boxes that a stage has room for;
    a_share, b_share: parts of a tile; a_mask, b_mask: the CTAs that a part goes to, None where there is only this one.
    rank_m, rank_n: of this CTA in its cluster."""

    a: tma.TileRing
    b: tma.TileRing
    a_parts: int
    b_parts: int
    a_share: int
    b_share: int
    a_mask: Int32 | None
    b_mask: Int32 | None
    rank_m: Int32
    rank_n: Int32

    @classmethod
    def make(cls, config, phase, sources: Sources, a_base, b_base, dtype, work: Work) -> Loads:
        tiles = config.tiles
        a_box, b_box = config.a_box(), config.b_box(phase)
        shared = (
            (sources.a, a_box, a_base, config.a_bytes),
            (sources.b, b_box, b_base, config.b_bytes),
        )
        rings = []
        for source, box, base, stage_bytes in shared:
            parts = cute.group_modes(cute.local_tile(source.coordinates, box, (None, None)), 2, 4)
            boxes = config.stages * stage_bytes // tma.tile_bytes(box)
            rings.append(tma.TileRing.make(source.atom, parts, tma.shared_tiles(base, dtype, box, boxes)))
        row_mask = sum(1 << n * tiles.cluster_m for n in range(tiles.cluster_n))
        column_mask = (1 << tiles.cluster_m) - 1
        return cls(
            *rings,
            config.a_bytes // tma.tile_bytes(a_box),
            config.b_bytes // tma.tile_bytes(b_box),
            tiles.cluster_n,
            tiles.cluster_m,
            Int32(row_mask) << work.rank_m if tiles.cluster_n > 1 else None,
            Int32(column_mask) << (work.rank_n * tiles.cluster_m) if tiles.cluster_m > 1 else None,
            work.rank_m,
            work.rank_n,
        )

    def load_a(self, piece, k_tile, stage, mbarrier) -> None:
        """This CTA's part of the activations: rows rank_n of cluster_n."""
        box_row = piece.row_tile * self.a_share + self.rank_n
        self.a.load(
            (piece.first + k_tile, box_row), stage * self.a_parts + self.rank_n, mbarrier, self.a_mask
        )

    def load_b(self, piece, k_tile, stage, mbarrier) -> None:
        """This CTA's part of the weights: rows rank_m of cluster_m."""
        box_row = piece.column_tile * self.b_share + self.rank_m
        self.b.load(
            (piece.first + k_tile, box_row), stage * self.b_parts + self.rank_m, mbarrier, self.b_mask
        )


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
    """Fill the ring for all tiles of a product phase. Returns the stages filled so far, ``use`` before.

    step: FFN steps done. Produces full, consumes empty. Activations wait for the row tile's counts of the phase
    before in the fused kernel, else for the end of the kernel before.
    """
    full, empty = channels["full"], channels["empty"]
    stage_bytes = config.stage_bytes(phase)
    for index in cutlass.range(work.cluster, work.pieces, work.clusters, unroll=1):
        piece = work.piece(config, index)
        ahead = Int32(0)
        counter, target = flow.counters, Int32(0)
        if cutlass.const_expr(config.fused):
            counter, target = awaited(config, phase, ops, flow, piece, step)
            if reached(counter, target) == 0:
                ahead = cutlass.min(piece.count, config.stages)
        elif index == work.cluster:
            ahead = cutlass.min(piece.count, config.stages)
        for k_tile in cutlass.range(ahead, unroll=1):
            empty.wait_previous(use + k_tile)
            full.expect_bytes(use + k_tile, stage_bytes)
            loads.load_b(piece, k_tile, full.stage(use + k_tile), full.barrier(use + k_tile))
        if cutlass.const_expr(config.fused):
            wait_for(counter, target)
            cute.arch.fence_proxy("async.global")
        elif index == work.cluster:
            cute.arch.griddepcontrol_wait()
        for k_tile in cutlass.range(ahead, unroll=1):
            loads.load_a(piece, k_tile, full.stage(use + k_tile), full.barrier(use + k_tile))
        for k_tile in cutlass.range(ahead, piece.count, unroll=1):
            empty.wait_previous(use + k_tile)
            full.expect_bytes(use + k_tile, stage_bytes)
            loads.load_b(piece, k_tile, full.stage(use + k_tile), full.barrier(use + k_tile))
            loads.load_a(piece, k_tile, full.stage(use + k_tile), full.barrier(use + k_tile))
        use += piece.count
    return use


def awaited(config, phase, ops, flow, piece, step) -> tuple:
    """(counter, target) of what a tile's activations wait for. A row tile past the last has none: the last one's."""
    row_tile = cutlass.min(piece.row_tile, flow.row_tiles - 1)
    if phase == "up":
        return flow.tile("rows", row_tile), groups_of(ops.vectors.shape[0], row_tile) * (step + 1)
    column_tiles = ops.w13.shape[0] // config.tiles.up_n
    return flow.tile("up", row_tile), Int32(column_tiles * (step + 1))


@cute.jit
def drain(config: cutlass.Constexpr, channels: cutlass.Constexpr, use):
    """Wait until every stage has been released: no arrival is on its way to a barrier of a CTA that has ended."""
    for last in cutlass.range(cutlass.max(use - config.stages, 0), use, unroll=1):
        channels["empty"].wait(last)
