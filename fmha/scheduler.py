"""Which CTA does which tile, in what order, and which KV tiles it visits.

The grid is one-dimensional and holds every (query tile, head tile, KV head, batch) once: one launch for
everything, one tile a CTA. Not persistent: two CTAs share an SM, so one's prologue and epilogue lie under the
other's main loop, and the hardware hands out CTAs in order as slots come free, which balances uneven tiles
without a queue in memory.

Order: where a row's work grows with its position (causal), query tiles run slowest and last ones first, so
the long tiles start first and short ones fill the end; of all heads at once, or of one section of heads after the
other, as many as have their K and V in L2 together. Otherwise query tiles run fastest: CTAs that run at the same
time share the K and V of one head in L2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from warpspec.fmha.mask import key_range
from warpspec.fmha.splits import split_part

TILE_OVERHEAD = 1.5  # what the start and end of a query tile cost, in KV tiles (H200, D 128)
MOST_TILES = 1 << 13  # whose balance is computed on the host: the first ones stand for all
MOST_SECTIONS = 64  # sizes of sections that are tried


@dataclass(frozen=True)
class TileGrid:
    """Extents of the grid. Ints on the host, Int32 in a kernel; likewise below."""

    query_tiles: int
    head_tiles: int
    heads_kv: int
    batch: int

    @property
    def size(self):
        """CTAs in all."""
        return self.query_tiles * self.head_tiles * self.heads_kv * self.batch

    def decode(self, index, *, longest_first: bool, section=None, minimum=min):
        """CTA index -> (query tile, head tile, KV head, batch).

        section: (head tile, KV head, batch) triples in a section, neighbours of one KV head; None: all.
        """
        heads = self.head_tiles * self.heads_kv
        if longest_first:
            rows = heads * self.batch
            section = rows if section is None else section
            first = index // (section * self.query_tiles) * section
            index = index - first * self.query_tiles
            size = minimum(section, rows - first)  # the last section may be short
            query_tile = self.query_tiles - 1 - index // size
            rest = first + index % size
        else:
            rest, query_tile = index // self.query_tiles, index % self.query_tiles
        batch, head = rest // heads, rest % heads
        return query_tile, head % self.head_tiles, head // self.head_tiles, batch


@dataclass(frozen=True)
class KeySpan:
    """KV tiles of one M tile. A row's interval [first, end) of visible keys moves up with its position, so
    the lowest and the highest position of the tile bound them all.

    begin, count: KV tiles to visit, begin to begin + count - 1; each has a key that some row sees.
    first, end: the keys that some row sees, [first, end). inner_first, inner_end: those that every row sees.
    """

    begin: int
    count: int
    first: int
    end: int
    inner_first: int
    inner_end: int

    def tile(self, step):
        """KV tile of the step-th visit: from the last down, so that under a causal mask the tiles that hold a
        row's newest keys, where its maximum often lies, come first and later rescales are rare."""
        return self.begin + self.count - 1 - step

    def part(self, split, splits):
        """The span of one of ``splits`` contiguous parts of its KV tiles; a part may have none."""
        first, count = split_part(split, splits, self.count)
        return replace(self, begin=self.begin + first, count=count)

    def needs_mask(self, tile, tile_keys: int):
        """True where some row does not see some key of the tile."""
        return (tile * tile_keys < self.inner_first) | ((tile + 1) * tile_keys > self.inner_end)

    def has_unseen(self, tile, tile_keys: int):
        """True where no row sees some key of the tile."""
        return (tile * tile_keys < self.first) | ((tile + 1) * tile_keys > self.end)


def key_span(lowest, highest, length, tile_keys: int, bounds: dict, minimum=min, maximum=max) -> KeySpan:
    """Span of the rows at positions lowest..highest; bounds: the compile-time arguments of
    ``mask.key_range``.

    Ints, or Int32 or numpy arrays with the matching ``minimum`` and ``maximum``.
    """
    first, inner_end = key_range(lowest, length, **bounds, minimum=minimum, maximum=maximum)
    inner_first, end = key_range(highest, length, **bounds, minimum=minimum, maximum=maximum)
    first_tile = first // tile_keys
    end_tile = (maximum(end, 0) + tile_keys - 1) // tile_keys
    some_key = minimum(maximum(end - first, 0), 1)
    return KeySpan(first_tile, (end_tile - first_tile) * some_key, first, end, inner_first, inner_end)


def place_in_round(round_, cta, ctas):
    """Which of a round's ``ctas`` tiles a persistent CTA does: CTAs take the tiles of a round in their order, of the
    next in the opposite one. Tiles get shorter along each, so a CTA's longer and shorter ones make up for each other.

    Ints or numpy arrays.
    """
    even = 1 - round_ % 2
    return even * cta + (1 - even) * (ctas - 1 - cta)


def balanced_section(
    grid: TileGrid, ctas: int, tile_counts: Sequence[int], cost: Callable[[int], float]
) -> int:
    """The section (``TileGrid.decode``) with the least time: what the busiest of ``ctas`` persistent CTAs has to do, as
    a multiple of the mean, times ``cost`` of the section; the largest among equals.

    tile_counts: KV tiles of each query tile. cost: what a section costs otherwise, 1 for nothing. Rounds and sections
    of unlucky sizes give one CTA long tiles every time: at 16384 causal queries, 16 heads of D 256 and one head to a
    section the busiest CTA has 53 percent more than the mean, and the H200 takes 63 percent longer than with all 16.
    """
    rows = grid.head_tiles * grid.heads_kv * grid.batch
    if grid.size <= ctas or grid.query_tiles == 1:  # nothing to balance, or one order whatever the section
        return max(rows, 1)
    work = np.asarray(tile_counts) + TILE_OVERHEAD
    number = np.arange(min(grid.size, MOST_TILES))
    round_, place = number // ctas, number % ctas
    cta = place_in_round(round_, place, ctas)  # its own inverse

    def time(section):
        first = number // (section * grid.query_tiles) * section
        size = np.minimum(section, rows - first)
        query_tile = grid.query_tiles - 1 - (number - first * grid.query_tiles) // size
        of_cta = np.bincount(cta, work[query_tile], minlength=ctas)
        return of_cta.max() / of_cta.mean() * cost(section)

    return min((rows, *range(min(rows, MOST_SECTIONS), 0, -1)), key=time)
