"""Tasks of a CTA, each 64 heads of one query, with all keys or a split, and how roles find them. Device side.

Every role computes its own task, as the roles of the attention kernels compute their tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from warpspec.common.hardware import TMA_ALIGNMENT, WORD_BYTES
from warpspec.common.operands import BFLOAT16, FLOAT32, INT32, UINT8, UINT32, Number, Operand, Several
from warpspec.fmha.device.ahead import prefetch_line, prefetch_lines, prefetch_table
from warpspec.fmha.device.cut_ahead import cut_ahead
from warpspec.fmha.device.cuts import Shaped, copy_cuts, prefetch_cuts
from warpspec.fmha.device.line import Chunks, Line, Source, heads_of, place_chunks
from warpspec.fmha.device.logits import with_factor
from warpspec.fmha.device.tile import INTEGERS, Piece, Place, Row, RowTile
from warpspec.fmha.device.tiles import each_tile
from warpspec.fmha.line import Stretch
from warpspec.fmha.logits import LogitNumbers
from warpspec.fmha.operands import COUNTERS, CUTS, PIECES, RESULT, STATE
from warpspec.fmha.schedule import SparseTiles, extent
from warpspec.latent.gathered.config import MAX_KEY_SETS, PAGE_ROWS, ROPE_DIM

MASK_BITS = 32
LENGTHS = tuple(f"length_{number}" for number in range(MAX_KEY_SETS))  # words of a task's record


@cute.jit
def start(
    config: cutlass.Constexpr,
    storage: cutlass.Constexpr,
    operands,
    units,
    atom,
    warp,
    channels: cutlass.Constexpr = None,
    records=None,
):
    """What all of a CTA's threads do once mbarriers are initialised: wait for the launch before, and share out the
    tasks if they are cut by length; a barrier of the CTA, or of its cluster. atom: of the load warp, if any. channels,
    records: asked for if the line is cut ahead. Returns the units with the CTA's chunks."""
    if cutlass.const_expr(atom is not None):  # noqa: SIM102
        if warp == config.load_warp:
            cute.nvgpu.cpasync.prefetch_descriptor(atom)
    if warp == config.load_warp + 1:
        prefetch_sets(operands)
    if cutlass.const_expr(config.scheduler.reads_cuts):
        prefetch_cuts(operands)
    if cutlass.const_expr(config.scheduler.cuts_ahead):
        units = units.at(config, storage.cursors.data_ptr())
        cute.arch.sync_threads()
        if warp == config.load_warp:
            cut_ahead(config, channels, operands, units, records)
    # The launch before has ended; the next one, which waits likewise, or the second kernel may start.
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(config.scheduler.places_chunks):
        units = units.at(config, storage.cursors.data_ptr())
        place_chunks(config, operands, units)
    elif cutlass.const_expr(config.scheduler.copies_cuts):
        units = units.kept_at(storage.cursors.data_ptr())
        copy_cuts(operands, units)
    if cutlass.const_expr(not (config.scheduler.cuts_ahead and config.scheduler.has_warp)):
        cute.arch.sync_threads()
    if cutlass.const_expr(config.gathers.cluster > 1):
        cute.arch.cluster_arrive_relaxed()  # the peer's mbarriers are initialised, too
        cute.arch.cluster_wait()
    return units


def prefetch_sets(operands) -> None:
    """Prefetch what tells where keys are, and their scale: first lines of lengths and of slots. By a whole warp, before
    the launch before has ended (``device.ahead``)."""
    for each in operands.sets:
        if each.lengths is not None:
            prefetch_lines(each.lengths)
        prefetch_table(each.slots)
    if operands.kv_scale is not None:
        prefetch_line(operands.kv_scale.iterator.toint())


class KeySetConfig(NamedTuple):
    """What of a configuration concerns one key set.

    there: whether there is such a set. has_lengths: whether it has lengths.
    """

    there: bool
    has_lengths: bool


def key_set_of(config, number: int) -> KeySetConfig:
    """The ``KeySetConfig`` of the number-th key set."""
    there = number < config.gathers.sets
    return KeySetConfig(there, there and config.gathers.lengths[number])


class KeySetOperands(NamedTuple):
    """One key set among the arguments.

    pool: [pages, words]. slots: int32 [T, K]. lengths: int32 [T] or None. page_size: rows of a page.
    """

    pool: Annotated[Any, Operand(UINT32, 2, None, TMA_ALIGNMENT, "there")]
    slots: Annotated[Any, Operand(INT32, 2, when="there")]
    lengths: Annotated[Any, Operand(INT32, 1, when="has_lengths")]
    page_size: Annotated[Any, Number(INT32)]


class DeviceKeySet(NamedTuple):
    """One key set on the device.

    pool: [pages, words]. slots: int32 [T, K]. lengths: int32 [T] or None. page_size: rows of a page, prepared so that
    division by it is a multiplication. queries, query_tiles: None, or the numbers of a request's queries and query
    tiles, prepared likewise where ``config.prepares_divisors``, if slots is a page table [R, pages] and lengths is [R].
    """

    pool: cute.Tensor
    slots: cute.Tensor
    lengths: cute.Tensor | None
    page_size: cute.FastDivmodDivisorV2
    queries: cute.FastDivmodDivisorV2 | Int32 | None = None
    query_tiles: cute.FastDivmodDivisorV2 | Int32 | None = None

    def request(self, token):
        """Index of the token's row in slots."""
        return token if self.queries is None else token // self.queries

    def end_of(self, token) -> Int32:
        """One past the last row of its request that the token sees, which may be below 0. For a page table."""
        rows = Int32(self.lengths[self.request(token)])
        rows = cutlass.max(cutlass.min(rows, Int32(self.slots.shape[1]) * PAGE_ROWS), 0)
        return rows - extent(self.queries) + 1 + token % self.queries

    def length(self, token) -> Int32:
        """Number of slots of the token, or rows of its request, that the token sees."""
        most = Int32(self.slots.shape[1])
        if self.queries is not None:
            return cutlass.max(self.end_of(token), 0)
        if self.lengths is None:
            return most
        return cutlass.max(cutlass.min(Int32(self.lengths[token]), most), 0)


@cute.jit
def place_of(fmt: cutlass.Constexpr, key_set: DeviceKeySet, slot) -> tuple:
    """(address of the row, bytes from there to its scales) of a slot; address 0 if there is no such row."""
    address, scale_at = Int64(0), Int32(0)
    page_rows = key_set.page_size.divisor
    here = Boolean(slot >= 0) & Boolean(slot < key_set.pool.shape[0] * page_rows)
    if here:
        page, within = slot // key_set.page_size, slot % key_set.page_size
        address = key_set.pool.iterator.toint() + Int64(page) * Int64(key_set.pool.stride[0] * WORD_BYTES)
        address = address + Int64(within * fmt.row_stride)
        if cutlass.const_expr(fmt.apart):
            scale_at = page_rows * fmt.data_bytes + within * (fmt.scale_stride - fmt.row_stride)
        else:
            scale_at = Int32(fmt.value_bytes)
    return address, scale_at


def q_dtype(config) -> str:
    """dtype of q; bytes stand for codes."""
    return UINT8 if config.gathers.has_q_scale else BFLOAT16


class Gathered(NamedTuple):
    """Tensors of a launch.

    q: [1, T, H, D]. o: as q, with the splits in front if there are any; in FP8 words of four e4m3, with scales fp32
    [1, T, H, 4], else None. sink: [H]. lse, row_max, row_sum: [1, H, T]. cos_sin: fp32 [N, R] and positions: int32 [T],
    or None. kv_scale, q_scale: fp32 [1] or None. cuts, pieces, counters: as in ``fmha.operands.Operands``. sets:
    ``KeySetOperands``, in kernels the ``DeviceKeySet``s that there are.
    """

    q: Annotated[Any, Operand(q_dtype, 4, lambda c: c.heads.qk, TMA_ALIGNMENT)]
    o: Annotated[Any, RESULT]
    scales: Annotated[Any, Operand(FLOAT32, 4, when="gathers.float8")]
    sink: Annotated[Any, Operand(FLOAT32, 1, when="output.has_sink")]
    lse: Annotated[Any, Operand(FLOAT32, 3, when="output.has_lse")]
    row_max: Annotated[Any, STATE]
    row_sum: Annotated[Any, STATE]
    cos_sin: Annotated[Any, Operand(FLOAT32, 2, ROPE_DIM, when="gathers.rotate_back")]
    positions: Annotated[Any, Operand(INT32, 1, when="gathers.rotate_back")]
    kv_scale: Annotated[Any, Operand(FLOAT32, 1, when="gathers.has_kv_scale")]
    q_scale: Annotated[Any, Operand(FLOAT32, 1, when="gathers.has_q_scale")]
    cuts: Annotated[Any, CUTS]
    pieces: Annotated[Any, PIECES]
    counters: Annotated[Any, COUNTERS]
    sets: Annotated[tuple, Several(KeySetOperands, MAX_KEY_SETS, key_set_of)]


class GatheredNumbers(NamedTuple):
    """The numbers among the arguments.

    logits: the numbers of the map from logits to weights. splits: number of splits of each query's keys. ctas: the
    most CTAs of a persistent launch.
    """

    logits: LogitNumbers
    splits: Annotated[Any, Number(INT32)]
    ctas: Annotated[Any, Number(INT32)]


def score_numbers(config, operands: Gathered, numbers: LogitNumbers) -> LogitNumbers:
    """The map's numbers for products of codes, if all keys have one scale, and Q may have one.

    numbers: the map's numbers for products of Q with the keys themselves.
    """
    if not config.gathers.has_kv_scale:
        return numbers
    factor, scale = numbers.factor, Float32(operands.kv_scale[0])
    if config.gathers.has_q_scale:  # no product is beyond fp32 unless that of all three is
        other = Float32(operands.q_scale[0])
        larger, smaller = cute.arch.fmax(scale, other, nan=True), cute.arch.fmin(scale, other, nan=True)
        is_small = Boolean(factor < Float32(1.0))
        factor = factor * Float32(cutlass.select_(is_small, larger, smaller))
        scale = Float32(cutlass.select_(is_small, smaller, larger))
    return with_factor(config.logits, numbers, factor * scale)


class Units(NamedTuple):
    """The number of tasks of a launch, and the sizes that decompose a task's index, fastest first, prepared so that
    division by them is a multiplication."""

    total: Int32
    head_groups: cute.FastDivmodDivisorV2
    splits: cute.FastDivmodDivisorV2


@dataclass(frozen=True)
class Task(RowTile):
    """A task: heads of one query, or of several queries of a request if keys have a page table, and all of their keys
    or a split of them.

    token, head_group, split: numbers of the task's first token, head group and split. queries: number of its queries.
    heads: heads of q. lengths: for each key set, how many of its keys the last token sees. ends: the end of the set's
    tiles. span: all tiles. first_end: one past the last key that the first token sees, if there may be several tokens.
    piece: the task's ``Piece``, if work is cut by length.
    """

    config: object
    token: Int32
    queries: Int32 | int
    head_group: Int32
    split: Int32
    heads: Int32
    lengths: tuple
    ends: tuple
    span: SparseTiles
    first_end: Int32 | None = None
    piece: Piece | None = None

    @property
    def last_token(self):
        """The token that sees the most keys."""
        return self.token + self.queries - 1

    def cut(self, piece: Piece) -> Task:
        """The piece of this task."""
        span = replace(self.span, first=self.span.first + piece.first, count=piece.count)
        return replace(self, span=span, piece=piece)

    # What a line (``device.line``) asks of a tile besides.

    @property
    def batch(self):
        return 0

    @property
    def group(self):
        return self.heads

    @property
    def head_tile(self):
        return self.head_group

    @property
    def first_head(self):
        return self.head_group * self.config.rows.pack

    @property
    def first_query(self):
        return 0

    @property
    def seq_q(self):
        """Queries of a line's request, as which a query tile counts."""
        return self.queries

    @property
    def row_count(self):
        return self.queries * self.config.rows.pack

    def first_row_of(self, row_group):
        return self.token

    def row(self, index, member, row_group=0) -> Row:
        """The record of a row for the threads that share it. Its end is that of its query, if there may be several."""
        if self.first_end is None:
            return Row(index, member)
        return Row(index, member, Int32(0), self.first_end + index // self.config.rows.pack)

    def place(self, index, row_group=0) -> Place:
        """The place that a row's results go to."""
        pack, query = self.config.rows.pack, 0
        head = self.head_group * pack + index
        if self.first_end is not None:
            head, query = self.head_group * pack + index % pack, index // pack
        token = self.token + query
        return Place(
            0, token, Int32(0), head, token, Boolean(head < self.heads) & Boolean(query < self.queries)
        )


def task_at(config, operands: Gathered, units: Units, index) -> Task:
    """The index-th task of the launch. Head groups of one query are adjacent, because they read the same keys."""
    head_group, rest = index % units.head_groups, index // units.head_groups
    split, number = rest % units.splits, rest // units.splits
    task = whole_task(config, operands, head_group, number)
    tiles = task.span.count
    first = tiles * split // units.splits
    count = tiles * (split + 1) // units.splits - first
    return replace(task, split=split, span=replace(task.span, first=first, count=count))


def whole_task(config, operands: Gathered, head_group, number) -> Task:
    """All KV tiles of a head group of the number-th query, or of the queries of a tile, for a page table."""
    token, queries, most = number, 1, config.rows.queries
    if most > 1:
        own, tiles = extent(operands.sets[0].queries), operands.sets[0].query_tiles
        if not config.prepares_divisors:
            tiles = (own + most - 1) // most
        first = number % tiles * most
        token = number // tiles * own + first
        queries = cutlass.min(own - first, most)
    lengths = tuple(each.length(token + queries - 1) for each in operands.sets)
    return task_of(config, operands, token, queries, head_group, lengths)


def task_of(config, operands: Gathered, token, queries, head_group, lengths: tuple) -> Task:
    """All KV tiles of a task. lengths: as in ``Task``."""
    ends, tiles, first_end = [], Int32(0), None
    for length in lengths:
        tiles = tiles + (length + config.tile_n - 1) // config.tile_n
        ends.append(tiles)
    span = SparseTiles(Int32(0), tiles)
    if config.rows.queries > 1:
        first_end = lengths[0] - (queries - 1)
    if config.clears_unseen:
        all_end = lengths[0] if first_end is None else cutlass.max(first_end, 0)
        span = replace(span, all_end=all_end, some_end=lengths[0])
    heads = operands.q.shape[2]
    return Task(config, token, queries, head_group, Int32(0), heads, lengths, tuple(ends), span, first_end)


class Queries(Source):
    """The queries of a launch, or tiles of them, as a line, whose heads are head groups."""

    def stretch(self, config, operands: Gathered, line: Line, request) -> Stretch:
        """``Stretch`` of a query; its length is that of whole KV tiles."""
        limit = whole_task(config, operands, Int32(0), request).span.count * config.tile_n
        overhead = config.tile_overhead * config.tile_n
        return Stretch(Int32(1), 1, overhead, None, None, limit, {"wide": Int64, **INTEGERS})

    def tile(self, config, operands: Gathered, line: Line, query_tile, head) -> Task:
        """All of a query's tiles for a head group."""
        head_group, _, number = heads_of(line, head)
        return whole_task(config, operands, head_group, number)

    def lengths(self, operands: Gathered) -> cute.Tensor:
        return operands.sets[0].lengths

    def with_lengths(self, operands: Gathered, lengths: cute.Tensor) -> Gathered:
        return operands._replace(sets=(operands.sets[0]._replace(lengths=lengths),))

    def words(self, config) -> tuple[str, ...]:
        return ("token", "queries", "head_group", "first", "count", *LENGTHS[: config.gathers.sets])

    def word(self, tile: Task, name: str):
        return tile.lengths[LENGTHS.index(name)] if name in LENGTHS else getattr(tile, name)

    def read(self, config, operands: Gathered, word: dict, piece: Piece) -> Task:
        queries = word["queries"] if config.rows.queries > 1 else 1
        lengths = tuple(word[name] for name in LENGTHS[: config.gathers.sets])
        task = task_of(config, operands, word["token"], queries, word["head_group"], lengths)
        return replace(task, span=replace(task.span, first=word["first"], count=word["count"]), piece=piece)

    def operands(self, config, kv_lengths, sizes) -> Gathered:
        """Operands of a call over pages."""
        q = Shaped((1, sizes.requests * sizes.queries, sizes.heads, 0))
        table = Shaped((sizes.requests, sizes.extent))
        key_set = DeviceKeySet(None, table, kv_lengths, None, *divisors_of(config, sizes.queries))
        absent = dict.fromkeys(Gathered._fields)
        return Gathered(**absent | {"q": q, "sets": (key_set,)})

    def chunks(self, config, operands: Gathered) -> Chunks:
        return units_of(config, operands, 1)


QUERIES = Queries()


def divisors_of(config, queries) -> tuple:
    """``queries`` and ``query_tiles`` of a ``DeviceKeySet`` with this many queries of a request. Host side."""
    tiles = cute.ceil_div(queries, config.rows.queries)
    prepared = cute.FastDivmodDivisorV2 if config.prepares_divisors else Int32
    return tuple(prepared(Int32(each)) for each in (queries, tiles))


def units_of(config, operands: Gathered, splits):
    """``Units`` of a launch, or, if work is cut by length, ``Chunks`` in one round. Host side."""
    q, first = operands.q, operands.sets[0]
    head_groups = cute.ceil_div(q.shape[2], config.rows.pack)
    tiles = Int32(q.shape[1])
    if config.rows.queries > 1:
        tiles = first.lengths.shape[0] * extent(first.query_tiles)
    if config.scheduler.cuts_tiles:
        return Chunks(Line(head_groups, head_groups, q.shape[2], tiles, Int32(1), Int32(0), Int32(0)))
    divisors = (cute.FastDivmodDivisorV2(Int32(each)) for each in (head_groups, splits))
    return Units(Int32(tiles * head_groups * splits), *divisors)


@cute.jit
def each_task(
    config: cutlass.Constexpr,
    operands,
    units,
    body: cutlass.Constexpr,
    role,
    uses,
    keeps: cutlass.Constexpr = False,
):
    """Call ``uses = body(role, task, uses)`` for each of the CTA's tasks, in order; return the last ``uses``.

    units: ``Units``, or if work is cut by length what ``tiles.each_tile`` asks for. role: what body needs. uses: use
    counts of rings. keeps: as in ``each_tile``.
    """
    if cutlass.const_expr(config.scheduler.cuts_tiles):
        uses = each_tile(config, operands, units, body, role, uses, keeps)
    else:
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for index in cutlass.range(cta, units.total, ctas, unroll=1):
            uses = body(role, task_at(config, operands, units, index), uses)
    return uses


def seen_words(mask: list, row: Row, first_key) -> list:
    """The words of a KV tile's mask without keys that the row's query does not see, if queries differ in that.

    first_key: the tile's first key.
    """
    if row.end is None:
        return mask
    seen = []
    for number, word in enumerate(mask):
        count = cutlass.min(cutlass.max(row.end - first_key - number * MASK_BITS, 0), MASK_BITS)
        below = Uint32((Int64(1) << Int64(count)) - Int64(1))
        seen.append(word & below)
    return seen
