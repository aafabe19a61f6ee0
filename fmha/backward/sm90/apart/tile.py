"""The tiles that a CTA works on, and the steps in which a consumer's rows see something."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.hardware import WARPGROUP_ROWS
from warpspec.fmha.backward.device.blocks import FAR
from warpspec.fmha.backward.schedule import decode
from warpspec.fmha.device.packed import query_tiles, request_of
from warpspec.fmha.device.request import Request, request_at
from warpspec.fmha.device.tile import INTEGERS
from warpspec.fmha.mask import key_range
from warpspec.fmha.schedule import KeySpan, key_span, place_in_round


class Launch(NamedTuple):
    """What CTAs need to find their tiles. tiles: query tiles of a head, of all requests if they are packed. rows:
    heads of all batch rows. section: rows of a section (``schedule``). window: (left, right)."""

    tiles: Int32
    rows: Int32
    section: Int32
    window: tuple

    @property
    def count(self):
        """Tiles of the launch."""
        return self.tiles * self.rows


@dataclass(frozen=True)
class QueryTile:
    """A query tile of one head. number: the tile's, in the request. bounds: arguments of ``key_range``. span: the key
    tiles that some row sees."""

    config: object
    request: Int32
    number: Int32
    head: Int32
    kv_head: Int32
    place: Request
    bounds: dict
    span: KeySpan

    @property
    def first_query(self):
        """The tile's first query, in the request."""
        return self.number * self.config.tile_m

    @property
    def batch(self):
        """Batch row of q, k and the like."""
        return 0 if self.config.requests.packed_q else self.request

    def keys_of(self, query) -> tuple:
        """[first, end) of the keys that a query of the request sees."""
        place = self.place
        return key_range(place.start + query, place.length, **self.bounds, **INTEGERS)

    def span_of(self, first, count: int) -> KeySpan:
        """The key tiles that some of ``count`` queries from ``first`` on see."""
        place = self.place
        last = cutlass.min(first + count, place.seq_q) - 1
        rows = (place.start + first, place.start + last)
        span = key_span(*rows, place.length, self.config.tile_n, self.bounds, **INTEGERS)
        some = Boolean(first < place.seq_q)
        return replace(span, count=Int32(cutlass.select_(some, span.count, Int32(0))))

    def steps_of(self, consumer) -> tuple:
        """([first, end) of the tile's steps in which a consumer's rows see keys, their ``KeySpan``)."""
        own = self.span_of(self.first_query + consumer * WARPGROUP_ROWS, WARPGROUP_ROWS)
        first = Int32(cutlass.select_(Boolean(own.count > 0), own.begin - self.span.begin, Int32(0)))
        return first, first + own.count, own

    def row_tiles_there(self) -> Int32:
        """How many of the tile's row tiles have queries."""
        size = self.config.row_tile
        there = (self.place.seq_q - self.first_query + size - 1) // size
        return cutlass.min(there, self.config.row_tiles)

    def row_tile(self, operands, i: int) -> Int32:
        """Number of the i-th of the tile's row tiles among all (``KeyTile.index_of``)."""
        size, number = self.config.row_tile, self.number * self.config.row_tiles + i
        if cutlass.const_expr(self.config.requests.packed_q):
            requests = cute.size(operands.cu_seqlens_q) - 1
            further = requests + self.place.first_row // size - 1 + number
            return Int32(cutlass.select_(Boolean(number == 0), self.request, further))
        return self.request * cute.ceil_div(operands.q.shape[1], size) + number


@dataclass(frozen=True)
class OwnKeys:
    """A consumer's 64 keys of a key tile. steps: [first, end) of the tile's steps in which some of these keys may be
    seen. alone: whether nobody sees the first block of the first step, or the second one of the last. inner_first,
    inner_end: the queries that see all of them, as of ``KeyTile``."""

    steps: tuple
    alone: tuple
    inner_first: Int32
    inner_end: Int32

    @classmethod
    def of(cls, config, tile, consumer) -> OwnKeys:
        """tile: ``KeyTile``."""
        length, seq_q, zero = tile.place.length, tile.place.seq_q, Int32(0)
        first_key = tile.first_key + consumer * WARPGROUP_ROWS
        some = Boolean(first_key < length)
        low, inner_end = tile.queries_of(first_key)
        inner_first, high = tile.queries_of(cutlass.min(first_key + WARPGROUP_ROWS, length) - 1)
        # Rows past the last query have weights of 0 unless a key has NaN, as one that nobody sees may.
        inner_first = Int32(cutlass.select_(Boolean(inner_first >= seq_q), Int32(FAR), inner_first))
        inner_end = Int32(cutlass.select_(Boolean(inner_end >= seq_q), Int32(FAR), inner_end))
        inner_end = Int32(cutlass.select_(Boolean(first_key + WARPGROUP_ROWS > length), zero, inner_end))
        first, end = zero, tile.steps
        if cutlass.const_expr(config.mask.band):  # otherwise a tile's steps begin anywhere
            one = Boolean(tile.group == 1) & Boolean(high > low)
            own_first = low // config.tile_m - tile.begin
            own_end = (high + config.tile_m - 1) // config.tile_m - tile.begin
            first = Int32(cutlass.select_(one, cutlass.max(own_first, 0), zero))
            end = Int32(cutlass.select_(one, cutlass.min(own_end, tile.steps), end))
        end = Int32(cutlass.select_(some, end, first))
        # Other heads' steps come in between; queries past the last begin no block of a step.
        # Where nobody sees any of the keys, the two blocks would be of one step.
        own = Boolean(tile.group == 1) & some & Boolean(high > low)
        place = tile.begin * config.tile_m
        alone = alone_at((first, end), (low - place, high - place), config.tile_m)
        if cutlass.const_expr(config.mask.band):
            alone = alone[0], Boolean(False)  # both spill 8 bytes
        return cls((first, end), tuple(own & each for each in alone), inner_first, inner_end)


def alone_at(steps: tuple, seen: tuple, size: int) -> tuple:
    """Whether the first step has nothing to be seen in its first block, and whether the last has nothing in its second.
    steps: [first, end). seen: [first, end) of the rows, from the 0th step's first on. size: rows of a step."""
    (first, end), half = steps, size // 2
    return Boolean(seen[0] >= first * size + half), Boolean(seen[1] <= end * size - half)


def launch_of(config, operands, numbers) -> Launch:
    """Find how tiles are numbered."""
    heads, queries = operands.q.shape[2], operands.q.shape[1]
    if config.requests.packed_q:
        requests = cute.size(operands.cu_seqlens_q) - 1
        tiles, rows = query_tiles(config.tile_m, queries, requests), heads
    else:
        tiles, rows = cute.ceil_div(queries, config.tile_m), heads * operands.q.shape[0]
    return Launch(Int32(tiles), Int32(rows), numbers.section, (numbers.window_left, numbers.window_right))


def index_of(round_) -> Int32:
    """Number of this CTA's tile in a round; past the last tile, there is none."""
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    return round_ * ctas + place_in_round(round_, cta, ctas)


def rounds_of(tiles) -> Int32:
    """Rounds of the CTAs over this many tiles."""
    ctas = cute.arch.grid_dim()[0]
    return (tiles + ctas - 1) // ctas


def tile_at(config, operands, launch, index) -> QueryTile:
    """The index-th tile of the launch. Called by a whole warp."""
    number, row, _ = decode(launch.tiles, launch.rows, 1, launch.section, index, minimum=cutlass.min)
    heads = operands.q.shape[2]
    head, request = row % heads, row // heads
    if cutlass.const_expr(config.requests.packed_q):
        request, number = request_of(operands.cu_seqlens_q, number, config.tile_m, operands.q.shape[1])
    elif cutlass.const_expr(config.mask.causal):
        number = launch.tiles - 1 - number  # the longest first
    place = request_at(config.requests, operands, request)
    bounds = config.mask.bounds(launch.window)
    group = heads // operands.k.shape[2]
    tile = QueryTile(config, request, Int32(number), head, head // group, place, bounds, None)
    return replace(tile, span=tile.span_of(tile.first_query, config.tile_m))
