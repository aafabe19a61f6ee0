"""The numbering of M tiles, the order in which CTAs work on them, and the KV tiles each one visits.

Everything here is arithmetic that the host and the kernels share: ints on the host, Int32 in a kernel.

The grid is one-dimensional and holds every (query tile, head tile, KV head, batch row) once: one launch for
everything. On sm_100a a CTA works on one tile, unless work is cut by length: two CTAs share an SM, so that one's
prologue and epilogue overlap the other's main loop, and the hardware starts CTAs in order as slots become free, which
balances uneven tiles without a queue in memory. On sm_90a CTAs are persistent and take tiles in rounds
(``place_in_round``).

Order: if a row's work grows with its position (causal), query tiles are the slowest index and run backwards, so the
long tiles start first and short ones fill the end; for all heads at once, or for one section of heads after another,
each with as many heads as fit their K and V into L2. Otherwise query tiles are the fastest index: CTAs that run at the
same time share the K and V of one head in L2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from warpspec.fmha.mask import key_range

SORTED_REQUESTS = 128  # most packed requests whose query tiles are sorted by length (``device.longest``)
SORTED_TILES = 2**16 - 1  # most query tiles of a request that are
# Least KV tiles of a partition (``device.partitions``), for calls whose keys are far fewer than the host had to expect:
# otherwise each KV tile would have a start, an end and a state of its own.
LEAST_PARTITION = 2


def extent(divisor):
    """The value of a prepared divisor (``cute.FastDivmodDivisorV2``); a plain number itself."""
    return getattr(divisor, "divisor", divisor)


def sortable(problem) -> bool:
    """Whether kernels that take query tiles from a queue sort a problem's by length (``device.longest``), unless it has
    too many requests."""
    return problem.requests.packed_q and problem.mask.causal and not problem.mask.has_blocks


def sorts_tiles(problem) -> bool:
    """Whether a problem's query tiles are sorted if CTAs take them from a queue."""
    return sortable(problem) and problem.batch <= SORTED_REQUESTS


def cuts_partitions(problem) -> bool:
    """Whether a problem's keys may be cut into partitions that CTAs take from a queue (``device.partitions``), if
    its requests have one query tile each."""
    requests, mask = problem.requests, problem.mask
    unknown = requests.packed_q or requests.packed_k or requests.has_kv_lengths
    return unknown and problem.batch <= SORTED_REQUESTS and not (mask.has_blocks or mask.has_ranges)


def stay_whole(tiles, splits, ctas):
    """Whether query tiles of equal length should not be cut into ``splits`` partitions each: all are one round of
    ``ctas`` CTAs, and their partitions would be as many rounds as splits, or more. Numbers, Int32 or numpy arrays."""
    return (tiles <= ctas) & ((splits - 1) * ctas < splits * tiles)


@dataclass(frozen=True)
class TileGrid:
    """Extents of the grid of M tiles."""

    query_tiles: int
    head_tiles: int
    heads_kv: int
    batch: int

    @property
    def rows(self):
        """Tiles of one number among the query tiles."""
        return self.head_tiles * self.heads_kv * self.batch

    @property
    def size(self):
        """CTAs in all."""
        return self.query_tiles * self.rows

    def decode(self, index, *, longest_first: bool, section=None, minimum=min):
        """Tile number -> (query tile, head tile, KV head, batch row).

        section: (head tile, KV head, batch row) triples in a section, neighbours of one KV head; None: all.
        """
        query_tiles, heads = extent(self.query_tiles), extent(self.head_tiles) * extent(self.heads_kv)
        if longest_first:
            rows = heads * self.batch
            section = rows if section is None else section
            first = self.section_of(index, section)
            index = index - first * query_tiles
            size = minimum(extent(section), rows - first)  # the last section may be short
            query_tile = query_tiles - 1 - index // size
            rest = first + index % size
        else:
            rest, query_tile = index // self.query_tiles, index % self.query_tiles
        return query_tile, *self.heads_of(rest, heads)

    def section_of(self, index, section):
        """First of the triples in the section that holds a tile."""
        return index // (section * self.query_tiles) * section

    def heads_of(self, rest, heads):
        """Number of a triple -> (head tile, KV head, batch row). heads: (head tile, KV head) pairs of a batch row."""
        batch, head = rest // heads, rest % heads
        return head % self.head_tiles, head // self.head_tiles, batch


class KvTiles(Protocol):
    """KV tiles that the rows of a tile visit, whatever the source of the keys. ``KeySpan``: keys that a mask hides.
    ``device.blocks.BlockSpan``: those of listed blocks. ``SparseTiles``: keys any of which may be missing."""

    begin: int
    count: int

    def tile(self, step):
        """KV tile of the step-th visit."""

    def needs_mask(self, step, tile_keys: int):
        """Whether some row does not see some key of the step-th visit's tile."""


@dataclass(frozen=True)
class SparseTiles(KvTiles):
    """KV tiles ``first`` to ``first`` + ``count`` - 1 if any of their keys may be missing (``config.mask.sparse``); the
    source of the keys says which. Every tile counts as one that no row sees whole.

    all_end, some_end: ends of the keys that all rows see and that any row sees, if rows differ in that. begin,
    inner_first and inner_end say, as in ``KeySpan``, that no tile is seen whole."""

    first: int
    count: int
    begin: int = 0
    inner_first: int = 0
    inner_end: int = 0
    all_end: int = 0
    some_end: int = 0

    def tile(self, step):
        """KV tile of the step-th visit."""
        return self.first + step

    def has_unseen(self, tile, tile_keys: int):
        """Whether some row does not see some key of the tile that another may see."""
        return (tile + 1) * tile_keys > self.all_end


@dataclass(frozen=True)
class KeySpan(KvTiles):
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

    def split(self, split, splits):
        """The span of one of ``splits`` contiguous ranges of its KV tiles; a range may be empty."""
        first, count = split_range(split, splits, self.count)
        return replace(self, begin=self.begin + first, count=count)

    def partition_of_size(self, number, size, minimum=min, maximum=max) -> KeySpan:
        """The span of one of its partitions of ``size`` KV tiles; the first may have fewer."""
        partitions = maximum((self.count + size - 1) // size, 1)
        end = self.count - (partitions - 1 - number) * size
        first = maximum(end - size, 0)
        return replace(self, begin=self.begin + first, count=end - first)

    def over(self, first, end, tile_keys: int, minimum=min, maximum=max) -> KeySpan:
        """The span of rows some of which see other keys besides, all within [first, end)."""
        begin, count = tiles_of(first, end, tile_keys, minimum, maximum)
        return replace(self, begin=begin, count=count, first=first, end=end)

    def needs_mask(self, step, tile_keys: int):
        """Whether some row does not see some key of the step-th visit's tile."""
        tile = self.tile(step)
        return (tile * tile_keys < self.inner_first) | ((tile + 1) * tile_keys > self.inner_end)

    def has_unseen(self, tile, tile_keys: int):
        """Whether some key of the tile is seen by no row."""
        return (tile * tile_keys < self.first) | ((tile + 1) * tile_keys > self.end)


def key_span(lowest, highest, length, tile_keys: int, bounds: dict, minimum=min, maximum=max) -> KeySpan:
    """Span of the rows at positions lowest..highest; bounds: the compile-time arguments of
    ``mask.key_range``.

    Ints, or Int32 or numpy arrays with the matching ``minimum`` and ``maximum``.
    """
    first, inner_end = key_range(lowest, length, **bounds, minimum=minimum, maximum=maximum)
    inner_first, end = key_range(highest, length, **bounds, minimum=minimum, maximum=maximum)
    begin, count = tiles_of(first, end, tile_keys, minimum, maximum)
    return KeySpan(begin, count, first, end, inner_first, inner_end)


def tiles_of(first, end, tile_keys: int, minimum=min, maximum=max) -> tuple:
    """(first, count) of the KV tiles that hold the keys [first, end)."""
    begin = first // tile_keys
    end_tile = (maximum(end, 0) + tile_keys - 1) // tile_keys
    return begin, (end_tile - begin) * minimum(maximum(end - first, 0), 1)


def place_in_round(round_, cta, ctas):
    """The place, among the ``ctas`` tiles of a round, of the tile that a persistent CTA takes.

    CTAs take the tiles of one round in order and those of the next round in reverse. Tiles get shorter along each
    round, so a CTA's longer and shorter tiles balance. Arguments are ints or numpy arrays.
    """
    even = 1 - round_ % 2
    return even * cta + (1 - even) * (ctas - 1 - cta)


def split_range(split, splits, tiles):
    """(first, count): the range of ``tiles`` KV tiles that a split covers. Ranges are contiguous, differ by at
    most one tile, and cover all; with fewer tiles than splits, some are empty.

    splits * tiles must be within int32.
    """
    first = split * tiles // splits
    return first, (split + 1) * tiles // splits - first
