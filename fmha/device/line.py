"""Cut the line (``fmha.line``) on the device: where a CTA's chunks begin and end, and the tiles in them.

Before the roles begin, each warp computes some ends of the CTA's chunks: a lane adds up the lengths of its share of the
requests, the lanes' sums are scanned, and the cut is located first among shares, then among requests, then among query
tiles. Roles read the ends (``Cursor``) from shared memory.

In all rounds but the last, cuts move back to the begin of a query tile: pieces of tiles are costly, and with several
rounds tiles are small compared with chunks. In the last round a chunk may begin and end within a tile, unless all tiles
are equally long and chunks become little longer if each is a tile (``chunk_length``). Each chunk with a piece of a cut
tile leaves a state in one of its CTA's two workspace places; and the CTA whose chunk begins at the tile's first cut
leaves a join record, from which ``device.join`` joins the states.

If heads are in step (``TileScheduler.in_step``), the line has one head of each request. It is cut into fewer chunks,
and as many neighbouring CTAs as there are heads take each of them, one head each. So keys of all heads are read at a
time, which are neighbours in memory.

If pieces are added up (``TileScheduler.adds_up``), each request has one query tile. A CTA goes through its chunk from
the end to the beginning: first it leaves the state of the tile that goes on in the next chunk, and the tile that began
in an earlier chunk comes last. So the CTA with a tile's second piece seldom waits for the first one, and only for a CTA
with a lower number, which started earlier (``sm90.add_up``).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.device.warp import running_sum
from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.config import CURSOR_WORDS, CUT_WORDS
from warpspec.fmha.device.chunk_length import chunk_length
from warpspec.fmha.device.grid import grid_of, requests_of
from warpspec.fmha.device.request import request_at
from warpspec.fmha.device.tile import INTEGERS, select_integer, tile_of
from warpspec.fmha.line import AHEAD_REQUESTS, KEPT_WORDS, MOST_ROUNDS, STATES, cut, round_count, stretch

SIDES = 2  # a chunk's begin and its end
BEGIN, END = range(SIDES)
LAST_LANE = WARP_THREADS - 1
LONGEST_STEP = (1 << 31) - 1  # from cut to cut; tiles are shorter


class Line(NamedTuple):
    """The sizes by which a launch cuts its line.

    heads: number of (KV head, head tile) pairs; if query tiles are in step, too, of (query tile, KV head, head tile)
    triples. head_tiles, group: head tiles and query heads of a KV head. requests: number of requests. rounds: rounds of
    chunks. window_left, window_right: the window; unbounded sides are not read. query_tiles: query tiles of a request,
    if they are in step.
    """

    heads: Int32
    head_tiles: Int32
    group: Int32
    requests: Int32
    rounds: Int32
    window_left: Int32
    window_right: Int32
    query_tiles: Int32 | None = None

    @property
    def window(self) -> tuple:
        return self.window_left, self.window_right


class Chunks(NamedTuple):
    """The data by which a persistent CTA finds its chunks.

    cursors: words in shared memory, (WORD, SIDE, ROUND). cut: likewise the words of ``Cut``. If another launch has cut
    the line, cursors are the words of the only chunk, (WORD) (``device.cuts``). lengths, found: if the line is cut
    ahead (``device.cut_ahead``), the requests' lengths, likewise, and a word.
    """

    line: Line
    cursors: cute.Tensor | None = None
    cut: cute.Tensor | None = None
    lengths: cute.Tensor | None = None
    found: cute.Tensor | None = None

    @property
    def window(self) -> tuple:
        return self.line.window

    def at(self, config, cursors: cute.Pointer) -> Chunks:
        """cursors: Int32, to ``config.scheduler.cursor_bytes`` of shared memory."""
        places = cute.make_layout((CURSOR_WORDS, SIDES, MOST_ROUNDS))
        cut = cute.make_tensor(cursors + cute.size(places), cute.make_layout(CUT_WORDS))
        placed = self._replace(cursors=cute.make_tensor(cursors, places), cut=cut)
        if not config.scheduler.cuts_ahead:
            return placed
        lengths = cute.make_tensor(cut.iterator + CUT_WORDS, cute.make_layout(AHEAD_REQUESTS))
        found = cute.make_tensor(lengths.iterator + AHEAD_REQUESTS, cute.make_layout(1))
        return placed._replace(lengths=lengths, found=found)

    def kept_at(self, words: cute.Pointer) -> Chunks:
        """words: Int32, to the words of a chunk in shared memory."""
        return self._replace(cursors=cute.make_tensor(words, cute.make_layout(KEPT_WORDS)))


def chunks_of(config, operands, numbers) -> Chunks:
    """The ``Chunks`` of a launch. Host side. numbers: ``host.LaunchNumbers``."""
    tiles, _ = grid_of(config, operands)
    heads = tiles.head_tiles * tiles.heads_kv
    full = operands.q.shape[1] // config.rows.queries * operands.q.shape[0] * heads
    rounds = round_count(full, numbers.ctas, minimum=cutlass.min, maximum=cutlass.max)
    group = operands.q.shape[2] // operands.k.shape[2]
    requests = requests_of(config.requests, operands)
    line = Line(heads, tiles.head_tiles, group, requests, rounds, *numbers.window)
    if config.scheduler.queries_in_step:
        line = line._replace(heads=heads * tiles.query_tiles, query_tiles=tiles.query_tiles)
    return Chunks(line)


class Place(NamedTuple):
    """A CTA's place among those that share a line.

    chunk, chunks: number of its chunk in a round, and chunks of a round. head: the head that it takes of every request
    if heads are in step, else 0. number: that of its join record and states; those of one line follow one another.
    """

    chunk: Int32
    chunks: Int32
    head: Int32 | int
    number: Int32


def place_of(config, line: Line) -> Place:
    """The ``Place`` of this CTA."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    if not config.scheduler.in_step:
        return Place(cta, ctas, 0, cta)
    chunks, chunk, head = ctas // line.heads, cta // line.heads, cta % line.heads
    return Place(chunk, chunks, head, head * chunks + chunk)


def heads_along(config, line: Line):
    """Heads of a request that follow one another on the line."""
    return 1 if config.scheduler.in_step else line.heads


def head_step(config, line: Line):
    """From a head of the line to the next one of a chunk."""
    return line.heads if config.scheduler.in_step else 1


class Cursor(NamedTuple):
    """A place on the line.

    head: request * heads + its (KV head, head tile) pair. query_tile: number of the query tile in the request.
    fraction: the fraction of the tile's length that lies before the place, 0 to 1; 0 is the tile's begin.
    """

    head: Int32
    query_tile: Int32
    fraction: Float32


class Cut(NamedTuple):
    """The cut at the begin of a CTA's last chunk, in units of the line.

    offset: how much of the tile lies before it. length: the tile's. step: from one cut to the next.
    """

    offset: Int32
    length: Int32
    step: Int32

    def fraction(self, offset) -> Float32:
        """``Cursor.fraction`` of a cut at this offset."""
        return fraction_of(offset, self.length)


class Join(NamedTuple):
    """Record of the first cut through a tile, int32 words in global memory.

    pieces: number of the tile's pieces, or 0 if the record's CTA has no such cut. first: number of the state of the
    first of them; the others' follow from the CTA. The other fields describe the tile's rows: batch row of o, first
    head, and first query in that row; number of heads and of queries.
    """

    pieces: Int32
    first: Int32
    batch: Int32
    first_head: Int32
    first_row: Int32
    heads: Int32
    queries: Int32
    unused: Int32


class Scan(NamedTuple):
    """Lengths by lane. before: sum over all lanes before this one. total: sum over all lanes."""

    before: Int64
    total: Int64

    def lane_of(self, place) -> Int32:
        """The last lane that begins no later than a place."""
        return cute.arch.popc(cute.arch.vote_ballot_sync(Boolean(self.before <= place))) - 1

    def before_lane(self, lane) -> Int64:
        return cute.arch.shuffle_sync(self.before, lane)


class Source(Protocol):
    """What a line consists of, if not requests (``AttentionKernel.line_source``)."""

    def stretch(self, config, operands, line: Line, request):
        """``Stretch`` of what takes the place of a request."""

    def tile(self, config, operands, line: Line, query_tile, head):
        """The ``RowTile`` for a query tile of a head of the line, with what else is asked of a ``Tile`` here."""

    def lengths(self, operands) -> cute.Tensor:
        """The only lengths that the line follows from, if it is cut ahead (``device.cut_ahead``)."""

    def with_lengths(self, operands, lengths: cute.Tensor):
        """The operands with others in their place."""

    def words(self, config) -> tuple[str, ...]:
        """Names of a tile's words in a record (``device.record``)."""

    def word(self, tile, name: str) -> Int32:
        """The word of a tile, if it is none of its span."""

    def read(self, config, operands, word: dict, piece):
        """The tile of a record. word: its words by name."""

    def operands(self, config, kv_lengths, sizes):
        """Operands of a call of these ``cuts.LineSizes``, of which the line asks for shapes and lengths. Host side."""

    def chunks(self, config, operands) -> Chunks:
        """``Chunks`` of a launch. Host side."""


def query_tile_at(config, operands, line: Line, query_tile, head):
    """The ``Tile`` for a query tile of a head of the line."""
    if config.line_source is not None:
        return config.line_source.tile(config, operands, line, query_tile, head)
    heads = heads_of(line, head)
    if config.scheduler.queries_in_step:
        query_tile, heads = query_in_step(line, head)
    return tile_of(config, operands, line.group, line.window, query_tile, *heads)


def stretch_of(config, operands, line: Line, request):
    """``Stretch`` of a request. One without queries has one tile, too, which is idle."""
    if config.line_source is not None:
        return config.line_source.stretch(config, operands, line, request)
    found, bounds = request_at(config.requests, operands, request), config.mask.bounds(line.window)
    if config.scheduler.adds_up:
        found, tiles, bounds = only_tile(config, found, line, bounds)
    else:
        tiles = cutlass.max((found.seq_q + config.rows.queries - 1) // config.rows.queries, 1)
    sizes = {"queries": config.rows.queries, "tile_n": config.tile_n, "overhead": config.tile_overhead}
    return stretch(found.start, found.length, tiles, **sizes, bounds=bounds, wide=Int64, **INTEGERS)


def only_tile(config, found, line: Line, bounds: dict) -> tuple:
    """(request, number of tiles, bounds) for ``stretch`` of a request that is one tile of the line: the only one, or
    the last of several in step, which sees the last keys. With its last query at the last key, a causal tile is as long
    as any: nothing has to be found out for it."""
    if config.scheduler.queries_in_step:
        others = (line.query_tiles - 1) * config.rows.queries
        found = found._replace(seq_q=found.seq_q - others, start=found.start + others)
    if config.mask.causal and not config.requests.has_q_start and bounds["right"] is None:
        bounds = bounds | {"causal": False}
    return found, Int32(1), bounds


@cute.jit
def length_of(config: cutlass.Constexpr, operands, line, request, end) -> Int64:
    """Length of a request on the line; 0 from request ``end`` on."""
    found = stretch_of(config, operands, line, cutlass.min(request, end - 1))
    length = found.upto(found.tiles) * Int64(heads_along(config, line))
    return Int64(cutlass.select_(Boolean(request < end), length, Int64(0)))


@cute.jit
def scan(own) -> Scan:
    """The ``Scan`` of every lane's length. By a whole warp."""
    upto = running_sum(own, cute.arch.lane_idx())
    return Scan(upto - own, cute.arch.shuffle_sync(upto, LAST_LANE))


@cute.jit
def shares(config: cutlass.Constexpr, operands, line, of_lane) -> Scan:
    """Work of the ``of_lane`` requests that start at lane * of_lane, by a whole warp."""
    first, own = cute.arch.lane_idx() * of_lane, Int64(0)
    for request in cutlass.range(first, first + of_lane, unroll=4):  # this many loads at a time
        own += length_of(config, operands, line, request, line.requests)
    return scan(own)


@cute.jit
def common_length(config: cutlass.Constexpr, operands, line, found, of_lane) -> Int64:
    """The length that all tiles have, or 0 if they differ; by a whole warp. found: ``shares``.

    Of a lane's requests only the first one is looked at: the lane's sum tells whether the others are alike.
    """
    first = cute.arch.lane_idx() * of_lane
    tiles = stretch_of(config, operands, line, cutlass.min(first, line.requests - 1))
    length = cute.arch.shuffle_sync(tiles.upto(1), 0)
    count = cutlass.max(cutlass.min(of_lane, line.requests - first), 0)
    upto = found.before + length * Int64(tiles.tiles * heads_along(config, line) * count)
    following = Int64(cute.arch.shuffle_sync_down(found.before, 1))
    last = Boolean(cute.arch.lane_idx() == LAST_LANE)
    alike = Boolean(upto == Int64(cutlass.select_(last, found.total, following)))
    return Int64(cutlass.select_(cute.arch.vote_all_sync(alike), length, Int64(0)))


@cute.jit
def locate(config: cutlass.Constexpr, operands, line, found, of_lane, place) -> tuple:
    """(head of the line, query tile, offset in it, its length) of a place before the line's end. By a whole warp.

    found, of_lane: ``shares``, and requests of a lane. If heads are in step, the head is the request's first.
    """
    share, thread = found.lane_of(place), cute.arch.lane_idx()
    rest = place - found.before_lane(share)
    request = share * of_lane
    end = cutlass.min(request + of_lane, line.requests)
    while request + 1 < end:
        group = scan(length_of(config, operands, line, request + thread, end))
        if rest < group.total:
            lane = group.lane_of(rest)
            rest -= group.before_lane(lane)
            request += lane
            end = request + 1  # found
        else:
            rest -= group.total
            request += WARP_THREADS
    request = cutlass.min(request, line.requests - 1)
    tiles = stretch_of(config, operands, line, request)
    of_head, head = tiles.upto(tiles.tiles), Int32(0)
    if cutlass.const_expr(not config.scheduler.in_step):
        head = Int32(Float32(rest) * cute.arch.rcp_approx(Float32(of_head)))  # or one more, or less
        head = cutlass.max(cutlass.min(head, line.heads - 1), 0)
        rest -= of_head * Int64(head)
        if rest < 0:
            head -= 1
            rest += of_head
        elif rest >= of_head:
            head += 1
            rest -= of_head
    low, count, length = Int32(0), tiles.tiles, of_head
    if count > 1:
        while count > 1:
            step = (count + WARP_THREADS - 1) // WARP_THREADS
            probe = thread * step
            begins = Boolean(probe < count) & Boolean(tiles.upto(low + cutlass.min(probe, count)) <= rest)
            passed = (cute.arch.popc(cute.arch.vote_ballot_sync(begins)) - 1) * step
            low, count = low + passed, cutlass.min(step, count - passed)
        begin = tiles.upto(low)
        length = tiles.upto(low + 1) - begin
        rest -= begin
    return request * line.heads + head, low, rest, length


@cute.jit
def place_chunks(config: cutlass.Constexpr, operands, chunks):
    """Write the words of ``chunks`` to shared memory. By the whole CTA; a barrier has to follow."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    place_ends(config, operands, chunks, warp, config.threads // WARP_THREADS)


@cute.jit
def place_ends(config: cutlass.Constexpr, operands, chunks, warp, warps: cutlass.Constexpr):
    """Warp number ``warp`` of so many that write the words of ``chunks``: each finds some ends."""
    line, cursors = chunks.line, chunks.cursors
    own = place_of(config, line)
    if warp < SIDES * line.rounds:
        of_lane = (line.requests + WARP_THREADS - 1) // WARP_THREADS
        found = shares(config, operands, line, of_lane)
        tile = common_length(config, operands, line, found, of_lane)
        size = chunk_length(config, line, found.total, Int32(line.rounds * own.chunks), tile)
        for number in cutlass.range(warp, SIDES * line.rounds, warps, unroll=1):
            round_, side = number // SIDES, number % SIDES
            chunk = round_ * own.chunks + own.chunk + side
            place = size * Int64(chunk)
            head, query_tile, offset, length = line.requests * line.heads, Int32(0), Int64(0), Int64(1)
            if place < found.total:
                head, query_tile, offset, length = locate(config, operands, line, found, of_lane, place)
                if chunk <= (line.rounds - 1) * own.chunks:  # moves to the begin of the tile
                    offset = Int64(0)
            if cute.arch.lane_idx() == 0:
                cursors[0, side, round_] = head + own.head
                cursors[1, side, round_] = query_tile
                floats = cute.make_tensor(cute.recast_ptr(cursors.iterator, dtype=Float32), cursors.layout)
                floats[2, side, round_] = fraction_of(offset, length)
                if number == SIDES * (line.rounds - 1) + BEGIN:
                    step = cutlass.min(size, Int64(LONGEST_STEP))
                    for i, word in enumerate(Cut(Int32(offset), Int32(length), Int32(step))):
                        chunks.cut[i] = word


def fraction_of(offset, length) -> Float32:
    """The fraction of a tile's length that lies before an offset. It grows with the offset, and is the same for a
    number of 32 bits or 64."""
    return Float32(offset) * cute.arch.rcp_approx(Float32(length))


@cute.jit
def write_join(config: cutlass.Constexpr, operands, chunks):
    """Write the record of this CTA's last chunk: whether its begin is the first cut through a tile, which pieces the
    tile has, and whose rows. By a warp; reads the words of ``place_chunks``."""
    line, own = chunks.line, place_of(config, chunks.line)
    begin, cut = (
        cursor_at(chunks.cursors, BEGIN, line.rounds - 1),
        Cut(*(chunks.cut[i] for i in range(CUT_WORDS))),
    )
    head = cutlass.min(begin.head, line.requests * line.heads - 1)
    tile = query_tile_at(config, operands, line, begin.query_tile, head)
    count = tile.span.count
    before, earlier = tiles_before(config, begin.fraction, count), cut.offset - cut.step
    cuts = Boolean(begin.fraction > Float32(0.0)) & Boolean(before > 0) & Boolean(before < count)
    continues = Boolean(own.chunk > 1) & Boolean(earlier > 0)  # the CTA before begins in the tile, too
    first = cuts & (Boolean(tiles_before(config, cut.fraction(earlier), count) == 0) | Boolean(not continues))
    further = cutlass.min((cut.length - 1 - cut.offset) // cut.step, own.chunks - 1 - own.chunk)
    words = Join(
        pieces=select_integer(first, 2 + further, 0),
        first=state_of(own.number - 1, Boolean(not continues)),
        batch=Int32(tile.batch),
        first_head=tile.first_head,
        first_row=tile.first_row_of(0),
        heads=cutlass.min(tile.group - tile.head_tile * config.rows.pack, config.rows.pack),
        queries=tile.seq_q - tile.first_query,
        unused=Int32(0),
    )
    if cute.arch.lane_idx() == 0:
        record = operands.joins[own.number, None]
        for i, word in enumerate(words):
            record[i] = word


def tiles_before(config, fraction, kv_tiles) -> Int32:
    """``line.cut``. Where pieces are added up, a tile's overhead lies in front of its keys: a CTA pays for it that has
    the begin of the tile, and so a piece more."""
    overhead = config.tile_overhead if config.scheduler.adds_up else 0
    return cut(fraction, kv_tiles, Int32, cutlass.min, select_integer, overhead)


def state_of(number, begins) -> Int32:
    """Number of the state that a CTA leaves of its piece of a tile. number: ``Place.number``. begins: the tile begins
    in its chunk."""
    return STATES * number + Int32(begins)


def heads_of(line: Line, head) -> tuple:
    """(head tile, KV head, request) of a head of the line."""
    request, pair = head // line.heads, head % line.heads
    return pair % line.head_tiles, pair // line.head_tiles, request


def query_in_step(line: Line, head) -> tuple:
    """(query tile, ``heads_of``) of a head of the line, if query tiles are in step."""
    request, number = head // line.heads, head % line.heads
    pairs = line.heads // line.query_tiles
    query_tile, pair = number // pairs, number % pairs
    return query_tile, (pair % line.head_tiles, pair // line.head_tiles, request)


def cursor_at(cursors: cute.Tensor, side: int, round_) -> Cursor:
    floats = cute.make_tensor(cute.recast_ptr(cursors.iterator, dtype=Float32), cursors.layout)
    return Cursor(cursors[0, side, round_], cursors[1, side, round_], floats[2, side, round_])
