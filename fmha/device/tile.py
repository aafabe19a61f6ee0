"""The tile that a CTA works on: its queries, heads and batch row, the keys its rows see, and where its results go.

Every role computes its tile itself: a value computed before the split into roles would get one register or stack slot
from ptxas for all of them, although their register budgets differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint64

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.config import AttentionKernel
from warpspec.fmha.device.ahead import prefetch_pages, wait_for_launch
from warpspec.fmha.device.blocks import RowBlocks, block_span, kv_blocks, nth_listed
from warpspec.fmha.device.longest import nth_longest
from warpspec.fmha.device.packed import in_order, request_of
from warpspec.fmha.device.request import request_at
from warpspec.fmha.device.tree import Drafts, depth_of, drafts_between, drop_lowest
from warpspec.fmha.line import STATES
from warpspec.fmha.mask import key_range, widened
from warpspec.fmha.schedule import KeySpan, KvTiles, extent, key_span
from warpspec.fmha.tree import MOST_DRAFTS

INTEGERS = {"minimum": cutlass.min, "maximum": cutlass.max}


@dataclass(frozen=True)
class Row:
    """A query row, as seen by one of the threads that work on it.

    index: the row's number in its row group, of ``config.rows.group_size`` rows. member: this thread's number among
    those that share the row; number 0 writes the row's statistics. first, end: the row sees the keys [first, end); None
    if the source of the keys decides this itself. drafts: with a tree, the drafts whose keys it also sees. blocks: with
    lists of blocks, what it sees of them; first and end then apply to partial blocks.
    """

    index: Int32
    member: Int32
    first: Int32 | None = None
    end: Int32 | None = None
    drafts: RowDrafts | None = None
    blocks: RowBlocks | None = None


@dataclass(frozen=True)
class Piece:
    """The KV tiles of an M tile that one chunk of the line holds (``device.line``): ``count`` of them, starting with
    number ``first`` of the tile's span. whole: the piece has all of them, so this CTA writes the rows' results.
    Otherwise it writes their un-normalised state to place ``state`` of the workspace.

    If pieces are added up (``TileScheduler.adds_up``), whole says that the piece is the tile's last. ``earlier`` pieces
    of the tile come before this one and ``later`` ones after it; both are 0 for a tile's first piece, which need not
    know of others. ``state_of`` tells where their states are. kept: ``some``, if another launch found out."""

    first: Int32
    count: Int32
    whole: Boolean
    state: Int32
    earlier: Int32 | int = 0
    later: Int32 | int = 0
    kept: Boolean | None = None

    @property
    def meeting(self) -> Int32:
        """``Place.number`` of the CTA with the tile's first piece."""
        return self.state // STATES - self.earlier

    def state_of(self, number) -> Int32:
        """Number of the state of a piece of this tile; 0 is the first."""
        return STATES * self.meeting + cutlass.max(STATES * number, 1)

    @property
    def some(self) -> Boolean:
        """Whether there is anything to do: a cut close to an end of a tile leaves a piece without KV tiles."""
        if self.kept is not None:
            return self.kept
        return Boolean(self.count > 0) | (self.whole & Boolean(self.first == 0))


@dataclass(frozen=True)
class Place:
    """The place of a row in the problem.

    batch, head, query: indices in q, o and the statistics. request, kv_head: indices of its keys. in_range: whether the
    problem has such a row.
    """

    batch: Int32 | int
    request: Int32
    kv_head: Int32
    head: Int32
    query: Int32
    in_range: Boolean


class RowTile(Protocol):
    """Rows that a CTA works on at a time, and their keys: all that softmax and the epilogues need to know.

    ``Tile``: keys of one request, dense, packed or paged. ``latent.gathered.task.Task``: keys gathered by slot. A
    source of keys is such a class, the load role that fills its KV tiles (``load``, ``gather``), and a ``hide`` of the
    keys in a KV tile that a row does not see (``sm90.consumer.ConsumerTile``, ``sm100.softmax_warps.Columns``).
    """

    span: KvTiles
    split: Int32

    def row(self, index, member, row_group=0) -> Row:
        """A row, by its number in its row group. member: as in ``Row``."""

    def place(self, index, row_group=0) -> Place:
        """The place of a row's results."""

    @property
    def row_count(self) -> Int32:
        """Rows of its first row group from this number on belong to no query; it may exceed the group's rows."""


@dataclass(frozen=True)
class Tile(RowTile):
    """An M tile and the KV tiles of its rows.

    query_tile, head_tile, kv_head, split: its place in the grid; kv_head is that of its first row group. batch: its
    batch row in q and o; request: the owner of its keys. They differ for packed queries, all of which are in batch row
    0. first_query: the tile's first query in its request. first_row: where the request's queries begin in their row of
    q. first_key: where its keys begin in k, with packed keys. start: position of query 0. length: KV length. group:
    query heads of a KV head. seq_q: queries of the request. bounds: arguments of ``key_range``. span: the KV tiles.
    tree, ranges, patterns: the operands.
    """

    config: AttentionKernel
    query_tile: Int32
    head_tile: Int32
    kv_head: Int32
    batch: Int32 | int
    request: Int32
    first_query: Int32
    first_row: Int32 | int
    first_key: Int32 | int
    start: Int32
    length: Int32
    split: Int32
    group: Int32
    seq_q: Int32
    bounds: dict
    span: KeySpan
    piece: Piece | None = None
    tree: cute.Tensor | None = None
    ranges: cute.Tensor | None = None
    patterns: cute.Tensor | None = None

    def cut(self, piece: Piece) -> Tile:
        """The piece of this tile."""
        span = replace(self.span, begin=self.span.begin + piece.first, count=piece.count)
        return replace(self, span=span, piece=piece)

    @property
    def row_count(self) -> Int32:
        """As in ``RowTile``."""
        return (self.seq_q - self.first_query) * self.config.rows.pack

    @property
    def first_head(self):
        """First query head of the tile."""
        return self.first_head_of(0)

    def first_head_of(self, row_group):
        """First query head of a row group."""
        return first_head_of(self.config, self.group, self.kv_head_of(row_group), self.head_tile)

    def kv_head_of(self, row_group):
        """KV head of a row group."""
        return self.kv_head + row_group if self.config.rows.heads_apart else self.kv_head

    @property
    def keys_batch(self):
        """The keys' batch row in k and v, if they are not paged."""
        return 0 if self.config.requests.packed_k else self.request

    def first_query_of(self, row_group):
        """First query of a row group, in its request."""
        if self.config.rows.heads_apart:
            return self.first_query
        return self.first_query + row_group * self.config.rows.group_queries

    def first_row_of(self, row_group):
        """First query of a row group, in its row of q."""
        first = self.first_query_of(row_group)
        return first + self.first_row if self.config.requests.packed_q else first

    def row(self, index, member, row_group=0) -> Row:
        """A row and the keys it sees; an idle row gets the keys of the query it would be."""
        config, drafts, blocks = self.config, None, None
        position = self.start + self.first_query_of(row_group) + index // config.rows.pack
        if cutlass.const_expr(config.mask.has_tree):
            drafts = RowDrafts(self, self.first_row_of(row_group) + index // config.rows.pack)
            position = self.start
            if config.mask.has_left:
                position = position + depth_of(drafts.word())
        first, end = key_range(position, self.length, **self.bounds, **INTEGERS)
        if cutlass.const_expr(config.mask.has_tree):
            end = cutlass.min(end, self.start)
        if cutlass.const_expr(config.mask.has_ranges):
            query = self.first_row_of(row_group) + index // config.rows.pack
            first, end = widened_by(self.ranges, self.batch, query, first, end, self.length)
        if cutlass.const_expr(config.mask.has_blocks):
            query = self.first_query_of(row_group) + index // config.rows.pack
            query = query % config.mask.block_size[0]
            blocks = RowBlocks(self.span, self.patterns, query, self.length)
        elif cutlass.const_expr(
            config.output.splits or config.scheduler.cuts_tiles
        ):  # limit the row's keys to this split
            begin = self.span.begin * config.tile_n
            first = cutlass.max(first, begin)
            end = cutlass.min(end, begin + self.span.count * config.tile_n)
        return Row(index, member, first, end, drafts, blocks)

    def place(self, index, row_group=0) -> Place:
        """The place that a row belongs to. index: the row's number in its row group."""
        config = self.config
        head = self.head_tile * config.rows.pack + index % config.rows.pack
        query = self.first_query_of(row_group) + index // config.rows.pack
        inside = Boolean(head < self.group) & Boolean(query < self.seq_q)
        busy = Boolean(index < config.rows.pack * config.rows.group_queries)
        if config.requests.packed_q:
            query = query + self.first_row
        kv_head = self.kv_head_of(row_group)
        head = kv_head * self.group + head
        return Place(self.batch, self.request, kv_head, head, query, inside & busy)


@dataclass(frozen=True)
class RowDrafts:
    """The drafts whose keys a row sees. They are read again for each of the few KV tiles that hold drafts' keys;
    keeping them would take registers in all the others. query: the row's query, counted in its batch row of q; an idle
    row's may lie past the end."""

    tile: Tile
    query: Int32

    def word(self) -> Uint64:
        """The row's word of the tree; an idle row gets some other row's."""
        tree = self.tile.tree
        return Uint64(tree[self.tile.batch, cutlass.min(self.query, tree.shape[1] - 1)])

    def read(self, key=0) -> Drafts:
        """The drafts within the window, with their keys counted from ``key``."""
        tile, word = self.tile, self.word()
        if tile.config.mask.has_left:
            word = drop_lowest(word, cutlass.max(depth_of(word) - tile.bounds["left"], 0))
        return drafts_between(word, tile.start, 0, tile.span.end).counted_from(key)

    def of_span(self) -> Drafts:
        """The drafts whose keys lie in the tile's KV tiles."""
        tile, drafts = self.tile, self.read()
        begin = tile.span.begin * tile.config.tile_n
        return drafts_between(drafts.seen, tile.start, begin, begin + tile.span.count * tile.config.tile_n)


def widened_by(ranges: cute.Tensor, batch, query, first, end, length) -> tuple:
    """``widened`` by the range of a query; an idle row may lie past the last query."""
    query = cutlass.min(query, ranges.shape[1] - 1)
    given = (ranges[batch, query, number] for number in range(2))
    return widened(first, end, *given, length, **INTEGERS, select=select_integer)


def select_integer(condition, yes, no) -> Int32:
    return Int32(cutlass.select_(Boolean(condition), Int32(yes), Int32(no)))


@cute.jit
def hull(
    config: cutlass.Constexpr, ranges: cute.Tensor, batch, first_query, last_query, length, span
) -> tuple:
    """[first, end) of the keys that some of a tile's rows see, including its queries' ranges. span: without the ranges.
    Called by a whole warp."""
    first, end = Int32(span.first), Int32(span.end)
    for begin in cutlass.range(0, config.rows.queries, WARP_THREADS, unroll=1):
        query = cutlass.min(first_query + begin + cute.arch.lane_idx(), cutlass.max(last_query, 0))
        first, end = widened_by(ranges, batch, query, first, end, length)
    for step in cutlass.range(WARP_THREADS.bit_length() - 1, unroll=1):
        first = cutlass.min(first, Int32(cute.arch.shuffle_sync_bfly(first, Int32(1) << step)))
        end = cutlass.max(end, Int32(cute.arch.shuffle_sync_bfly(end, Int32(1) << step)))
    return first, end


def last_first(config: AttentionKernel) -> bool:
    """Whether query tiles run from the last to the first, one query tile of all heads at a time: work grows with a
    row's position, as it often does with lists of blocks, or tiles of packed queries or of listed blocks have their own
    order (``packed``, ``blocks.nth_listed``)."""
    return config.mask.causal or config.requests.packed_q or config.mask.has_blocks


def tile_at(config: AttentionKernel, operands, grid, window, index, section=None, order=None) -> Tile:
    """The index-th tile of the launch.

    operands: ``Operands``. grid: ``grid.Grid`` or ``grid.DivisorGrid``. window: (left, right), not read where
    unbounded. section: of ``TileGrid.decode``. order: ``longest.Order`` if packed query tiles are sorted.
    """
    split = Int32(0)
    if cutlass.const_expr(config.output.splits):
        index, split = index // grid.splits, index % grid.splits
    if cutlass.const_expr(config.requests.packed_q and not config.requests.many_queries):
        section = None
    query_tile, head_tile, kv_head, request = grid.tiles(config, operands).decode(
        index, longest_first=last_first(config), section=section, minimum=cutlass.min
    )
    if cutlass.const_expr(config.waits_late and config.finds_in_memory):
        if cutlass.const_expr(not config.requests.packed_q):
            prefetch_pages(config, operands, request)
        wait_for_launch(config)
    if cutlass.const_expr(config.requests.packed_q):
        request, query_tile = packed_tile(config, operands, query_tile, extent(grid.query_tiles), order)
    listed = None
    if cutlass.const_expr(config.mask.has_order):
        query_tiles = extent(grid.query_tiles)
        head = first_head_of(config, grid.group, kv_head, head_tile)
        listed, query_tile = nth_listed(
            config, kv_blocks(config, operands), query_tiles, query_tiles - 1 - query_tile, request, head
        )
    tile = tile_of(config, operands, grid.group, window, query_tile, head_tile, kv_head, request, listed)
    if cutlass.const_expr(config.output.splits):
        tile = replace(tile, split=split, span=tile.span.split(split, extent(grid.splits)))
    return tile


@cute.jit
def packed_tile(config: cutlass.Constexpr, operands, number, query_tiles, order) -> tuple:
    """(request, its query tile) of a query tile of packed requests. number: its number in the grid, whose tiles run
    from the last to the first."""
    queries, total = config.rows.queries, operands.q.shape[1]
    rank = query_tiles - 1 - number
    if cutlass.const_expr(config.requests.many_queries):
        request, query_tile = in_order(operands.cu_seqlens_q, number, queries, total)
    else:
        request, query_tile = request_of(operands.cu_seqlens_q, rank, queries, total)
    if cutlass.const_expr(order is not None):  # noqa: SIM102
        if order.sorts:
            request, query_tile = nth_longest(order, rank)
    return request, query_tile


def positions_of(config: AttentionKernel, start, first_query, last_query) -> tuple:
    """(Lowest, highest) position of a tile's queries; bounds of them if queries are drafts. start: of query 0."""
    if config.mask.has_tree:  # valid for any words: the host does not see them
        return start - 1, start + MOST_DRAFTS - 1
    return start + first_query, start + last_query


def first_head_of(config: AttentionKernel, group, kv_head, head_tile):
    """First query head of a tile. group: query heads of a KV head."""
    return kv_head * group + head_tile * config.rows.pack


def tile_of(
    config: AttentionKernel, operands, group, window, query_tile, head_tile, kv_head, request, listed=None
) -> Tile:
    """The tile at a place of the grid, with all of its keys. group: query heads of a KV head. listed: ``blocks.Listed``
    of its block of queries, if that has been read."""
    first_row, seq_q, first_key, length, start = request_at(config.requests, operands, request)
    bounds = config.mask.bounds(window)
    first_query = query_tile * config.rows.queries
    if cutlass.const_expr(config.rows.heads_apart):
        kv_head = kv_head * config.rows.kv_heads
    last_query = cutlass.min(first_query + config.rows.queries, seq_q) - 1
    positions = positions_of(config, start, first_query, last_query)
    span = key_span(*positions, length, config.tile_n, bounds, **INTEGERS)
    batch = 0 if config.requests.packed_q else request
    if cutlass.const_expr(config.mask.has_ranges and not config.mask.has_blocks):
        first, end = Int32(0), length  # roles that find their own tiles lack the registers for more
        if cutlass.const_expr(config.column_groups == 1 or config.scheduler.has_warp):
            rows = (first_row + first_query, first_row + last_query)
            first, end = hull(config, operands.ranges, batch, *rows, length, span)
        span = span.over(first, end, config.tile_n, **INTEGERS)
    if cutlass.const_expr(config.mask.has_blocks):
        blocks, head = kv_blocks(config, operands), first_head_of(config, group, kv_head, head_tile)
        span = block_span(config, blocks, request, head, first_query, length, listed)
    if cutlass.const_expr(config.requests.packed_q):  # a tile past its request's queries
        some = Boolean(first_query < seq_q)
        span = replace(span, count=Int32(cutlass.select_(some, span.count, Int32(0))))
    return Tile(
        config,
        query_tile,
        head_tile,
        kv_head,
        batch,
        request,
        first_query,
        first_row,
        first_key,
        start,
        length,
        Int32(0),
        group,
        seq_q,
        bounds,
        span,
        tree=operands.tree,
        ranges=operands.ranges,
        patterns=operands.patterns,
    )
