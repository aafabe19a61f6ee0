"""The tiles that a cluster computes in a product phase, in order.

A work item is a tile for each of the cluster's CTAs: cluster_m adjacent row tiles, cluster_n adjacent column tiles,
one split of K. The items of a row tile are adjacent in the numbering, so that clusters running at the same time share
rows.
"""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, cute

from warpspec.swap.config import K_TILE, TILE_M


class WorkItem(NamedTuple):
    """A CTA's tile. row_tile may lie past the last row tile. first, count: the first of its K tiles, and how many."""

    row_tile: Int32
    column_tile: Int32
    split: Int32
    first: Int32
    count: Int32


class SwapWork(NamedTuple):
    """The work items of a product.

    items: how many there are. cluster, clusters: this cluster's number, and how many clusters there are; the cluster
    takes items cluster, cluster + clusters, ... rank_m, rank_n: this CTA's place in the cluster.
    """

    items: Int32
    column_groups: Int32
    splits: Int32
    k_tiles: Int32
    cluster: Int32
    clusters: Int32
    rank_m: Int32
    rank_n: Int32

    @classmethod
    def of(cls, config, ops, phase: str) -> SwapWork:
        tiles = config.tiles
        rows, k = (ops.vectors if phase == "up" else ops.hidden).shape
        columns = ops.w13.shape[0] if phase == "up" else ops.w2.shape[0]
        splits = 1 if phase == "up" else ops.partial.shape[0]
        row_groups = cute.ceil_div(rows, TILE_M * tiles.cluster_m)
        column_groups = columns // (config.columns(phase) * tiles.cluster_n)
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        rank = block % tiles.cluster
        return cls(
            Int32(row_groups * column_groups * splits),
            Int32(column_groups),
            Int32(splits),
            Int32(k // K_TILE),
            block // tiles.cluster,
            blocks // tiles.cluster,
            rank % tiles.cluster_m,
            rank // tiles.cluster_m,
        )

    def item(self, config, index) -> WorkItem:
        tiles = config.tiles
        row_group, inner = (
            index // (self.column_groups * self.splits),
            index % (self.column_groups * self.splits),
        )
        split = inner // self.column_groups
        first, end = (split * self.k_tiles // self.splits, (split + 1) * self.k_tiles // self.splits)
        return WorkItem(
            row_group * tiles.cluster_m + self.rank_m,
            inner % self.column_groups * tiles.cluster_n + self.rank_n,
            split,
            first,
            end - first,
        )
