"""A launch's extents as divisors, prepared on the host: dividing by one is a multiplication.

Of kernels whose consumers exchange P: their loops have fewer instructions for it. A build without took 2 to 4% more
time at B128 L1152, 4% at L4096 and in prefill (H200). D 128 causal prefill took 5 to 8% more with it.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from warpspec.fmha.tile import extent


class DivisorGrid(NamedTuple):
    """Does what ``fmha.tile.Grid`` does. query_tiles, head_tiles, heads_kv, splits: divisors. group: query heads of a
    KV head. whole_rounds, last_tiles: as ``rounds`` says."""

    query_tiles: cute.FastDivmodDivisorV2
    head_tiles: cute.FastDivmodDivisorV2
    heads_kv: cute.FastDivmodDivisorV2
    splits: cute.FastDivmodDivisorV2
    batch: Int32
    group: Int32
    whole_rounds: Int32
    last_tiles: Int32

    @classmethod
    def of(cls, tiles, splits, group, total, ctas):
        """tiles: ``scheduler.TileGrid``. total: tiles in all, with splits. Host side."""
        divisors = (tiles.query_tiles, tiles.head_tiles, tiles.heads_kv, splits)
        divisors = (cute.FastDivmodDivisorV2(Int32(divisor)) for divisor in divisors)
        return cls(*divisors, tiles.batch, group, total // ctas, total % ctas)

    def rounds(self, tiles, ctas) -> tuple:
        """(rounds in which every CTA has a tile, tiles of the last one)."""
        return self.whole_rounds, self.last_tiles

    def heads_of_kv(self, operands) -> Int32:
        """Query heads of a KV head."""
        return self.group

    def decode(self, operands, index, *, longest_first: bool, section, minimum):
        """As ``scheduler.TileGrid.decode``. section: a divisor."""
        if longest_first:
            rows = extent(self.head_tiles) * extent(self.heads_kv) * self.batch
            first = index // self.query_tiles // section * extent(section)
            size = minimum(extent(section), rows - first)  # the last section may be short
            index = index - first * extent(self.query_tiles)
            query_tile = extent(self.query_tiles) - 1 - index // size
            rest = first + index % size
        else:
            rest, query_tile = index // self.query_tiles, index % self.query_tiles
        rest, head_tile = rest // self.head_tiles, rest % self.head_tiles
        return query_tile, head_tile, rest % self.heads_kv, rest // self.heads_kv
