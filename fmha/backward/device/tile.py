"""The key tile a CTA works on, and the query tiles whose rows see some of its keys.

A key tile's *steps* are its (query head, query tile) pairs. If a tile is cut, a CTA works on one of its *pieces*
(``schedule``).

The order of the steps decides what key tiles that run at the same time have in common:

- By default steps go through the heads one after another, and pieces are equal runs of steps.
- With ``heads_inside``, steps go down from the last query tile, and at each query tile through the heads, so that all
  key tiles reach the same query tiles at about the same time. What they read together stays in L2. If dQ is added up in
  a fixed order, that of the key tiles, each key tile can follow close behind the previous one; with heads in the outer
  loop, key tiles with fewer query tiles would wait at every head.
- With ``inner_heads``, for key tiles that all have the same number of query tiles, steps go through as many heads first
  and then through the next ones, so that key tiles that run together read less.

With heads inside, pieces are cut at the same steps in all key tiles of a request, so that the pieces of two key tiles
reach what they have in common at the same time: steps are counted from the request's last query tile on, and the c-th
piece ends after c times as many steps as a piece may have.

With packed requests, CTAs take the key tiles with the most steps first (``order.sort_key_tiles``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.backward.device.blocks import (
    FAR,
    NO_MASK,
    KeyBlock,
    first_step,
    key_block_of,
    last_step,
    step_after,
    steps_of,
)
from warpspec.fmha.backward.device.pieces import steps_of_piece
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.device.packed import entry, find_request, query_tiles
from warpspec.fmha.device.request import Request, request_at
from warpspec.fmha.device.tile import INTEGERS, widened_by
from warpspec.fmha.lists import RANK
from warpspec.fmha.mask import key_range, position_range
from warpspec.fmha.schedule import key_span

START_STEP = 7  # distance in query tiles between the first ones of neighbouring key tiles


@dataclass(frozen=True)
class KeyTile:
    """A key tile of one KV head, or a piece of its steps.

    request: batch row or request; place: where its queries and keys are. number: the tile's, in the request. first_key:
    the tile's first, in the request. first_head, group: query heads of the KV head; with sliced heads, of the slice.
    pieces: of the tile; 0: the CTA has none. further: query tile n > 0 of the request has the number ``further`` + n
    (``index_of``). sums_place: where a piece's sums are. first_step, steps: which of the
    tile's steps it has. begin, count: query tiles of each head, of all pieces. inner_first, inner_end: queries that see
    every key of the tile. seen_first, seen_end: keys of the request that some row sees; rows_first, rows_end: rows that
    see some key of the request. bounds: arguments of ``key_range``. ranges, seen_by: the operands, where there are
    ranges. blocks: with lists of blocks, their tables; steps then go through them, and first_step, begin, count,
    inner_first and inner_end say nothing. patterns: the operand q_patterns.
    """

    config: BackwardKernel
    request: Int32
    kv_head: Int32
    place: Request
    number: Int32
    first_key: Int32
    first_head: Int32
    group: Int32
    pieces: Int32
    sums_place: tuple
    further: Int32
    first_step: Int32 | int
    steps: Int32
    begin: Int32
    count: Int32
    inner_first: Int32
    inner_end: Int32
    seen_first: Int32
    seen_end: Int32
    rows_first: Int32
    rows_end: Int32
    bounds: dict
    ranges: cute.Tensor | None = None
    seen_by: cute.Tensor | None = None
    blocks: KeyBlock | None = None
    patterns: cute.Tensor | None = None

    @property
    def start(self) -> Int32:
        """The query tile at which each head's steps begin, and from which they wrap around.

        Where all key tiles of a head have the same query tiles, each starts at a different one, so that they do not all
        add to the same dQ. With heads inside, all start at the last.
        """
        config = self.config
        if config.heads_inside:
            return self.begin + cutlass.max(self.count, 1) - 1
        if config.mask.band or not config.rotates:
            return self.begin
        return self.begin + self.number * START_STEP % cutlass.max(self.count, 1)

    @property
    def start_head(self) -> Int32:
        """The head at which each query tile's steps begin, with heads inside. Neighbouring key tiles begin at
        neighbouring heads, so that they do not all add to the same dQ; if dQ's order is fixed, all begin at the
        first."""
        if self.config.deterministic:
            return self.first_head
        return self.first_head + self.number % cutlass.max(self.group, 1)

    def following(self, head, query_tile) -> tuple:
        """The (query head, query tile) of the next step."""
        if self.config.mask.has_blocks:
            return step_after(self.blocks, head, query_tile)
        if self.config.inner_heads:
            place = (head - self.first_head) & (self.config.inner_heads - 1)
            past = Boolean(place == self.config.inner_heads - 1)
            past |= Boolean(head + 1 == self.first_head + self.group)
            over = past & Boolean(query_tile == self.begin)  # with these heads
            head = Int32(cutlass.select_(past & ~over, head - place, head + 1))
            return head, Int32(cutlass.select_(over, self.start, query_tile - Int32(past)))
        if self.config.heads_inside:
            past = Boolean(head + 1 == self.first_head + self.group)
            head = Int32(cutlass.select_(past, self.first_head, head + 1))
            return head, query_tile - Int32(Boolean(head == self.start_head))
        query_tile += 1
        query_tile = Int32(
            cutlass.select_(Boolean(query_tile == self.begin + self.count), self.begin, query_tile)
        )
        return head + Int32(Boolean(query_tile == self.start)), query_tile

    def place_of(self, step) -> tuple:
        """The (query head, query tile) of one of the tile's steps, unless inner_heads is set."""
        if self.config.heads_inside:
            group = cutlass.max(self.group, 1)
            head = self.start_head + step % group
            past = Boolean(head >= self.first_head + group)
            return head - Int32(cutlass.select_(past, group, Int32(0))), self.start - step // group
        count = cutlass.max(self.count, 1)
        head, offset = self.first_head + step // count, step % count
        query_tile = self.start + offset
        past = Boolean(query_tile >= self.begin + count)
        return head, query_tile - Int32(cutlass.select_(past, count, Int32(0)))

    @property
    def first(self) -> tuple:
        """The (query head, query tile) of the CTA's first step."""
        if self.config.mask.has_blocks:
            return first_step(self.blocks)
        if self.config.cut:
            return self.place_of(self.first_step)
        return self.start_head if self.config.heads_inside else self.first_head, self.start

    @property
    def last(self) -> tuple:
        """The (query head, query tile) of the CTA's last step."""
        if self.config.mask.has_blocks:
            return last_step(self.blocks)
        if self.config.cut:
            return self.place_of(self.first_step + self.steps - 1)
        head = self.first_head + self.group - 1
        if self.config.heads_inside:
            first = Boolean(self.start_head == self.first_head)
            return Int32(cutlass.select_(first, head, self.start_head - 1)), self.begin
        end = Int32(cutlass.select_(Boolean(self.start == self.begin), self.begin + self.count, self.start))
        return head, end - 1

    def index_of(self, query_tile) -> Int32:
        """Number of a query tile of the request among those of all requests. It is computed without reading memory,
        because a step's loads and its additions to dQ wait for it."""
        further = self.further + query_tile
        if self.config.requests.packed_q:
            return Int32(cutlass.select_(Boolean(query_tile == 0), self.request, further))
        return further

    @property
    def has_unseen_keys(self):
        """Whether some key of the tile is seen by no query."""
        end = self.first_key + self.config.tile_n
        return Boolean(self.seen_first > self.first_key) | Boolean(self.seen_end < end)

    @property
    def batch(self):
        """Batch row of q, k and the like."""
        return 0 if self.config.requests.packed_q else self.request

    def queries_of(self, key) -> tuple:
        """[first, end) of the queries that see a key of the request."""
        start, seq_q = self.place.start, self.place.seq_q
        if self.config.mask.has_ranges:
            row = cutlass.max(cutlass.min(self.place.first_key + key, self.seen_by.shape[1] - 1), 0)
            first, end = (self.seen_by[self.batch, row, number] for number in range(2))
        else:
            first, end = position_range(key, **self.bounds, maximum=cutlass.max)
            first = Int32(0) if first is None else cutlass.max(first - start, 0)
            end = seq_q if end is None else cutlass.min(end - start, seq_q)
        exists = Boolean(key < self.place.length)
        return Int32(cutlass.select_(exists, first, Int32(FAR))), Int32(
            cutlass.select_(exists, end, Int32(0))
        )

    def needs_mask(self, head, query_tile, block: int):
        """Whether some row of one of the query tile's blocks does not see some key."""
        if self.config.mask.has_blocks:
            partial = Boolean(self.blocks.rule_at(head, query_tile) != NO_MASK)
            return partial | Boolean(self.first_key + self.config.tile_n > self.place.length)
        first = query_tile * self.config.tile_m + block * self.config.block_m
        return Boolean(first < self.inner_first) | Boolean(first + self.config.block_m > self.inner_end)

    def has_unseen_rows(self, query_tile):
        """Whether some row in shared memory sees no key at all, or belongs to another request."""
        first = query_tile * self.config.tile_m
        return Boolean(first < self.rows_first) | Boolean(first + self.config.tile_m > self.rows_end)

    def turn(self, head, query_tile) -> Int32:
        """Number of key tiles, those of earlier keys, add to a query tile's dQ before this one."""
        if self.config.mask.has_blocks:
            tiles = self.config.mask.block_size[1] // self.config.tile_n
            return self.blocks.entry(head, query_tile, RANK) * tiles + self.number % tiles
        first = query_tile * self.config.tile_m
        last = cutlass.min(first + self.config.tile_m, self.place.seq_q) - 1
        start, length = self.place.start, self.place.length
        span = key_span(start + first, start + last, length, self.config.tile_n, self.bounds, **INTEGERS)
        begin = span.begin
        if self.config.mask.has_ranges:
            begin = self.keys_of(first)[0] // self.config.tile_n
        return self.number - begin

    def keys_of(self, query) -> tuple:
        """[first, end) of the keys that a query of the request sees."""
        start, length = self.place.start, self.place.length
        first, end = key_range(start + query, length, **self.bounds, **INTEGERS)
        if self.config.mask.has_ranges:
            row = cutlass.max(self.place.first_row + query, 0)
            first, end = widened_by(self.ranges, self.batch, row, first, end, length)
        return first, end


def key_tiles_of(config: BackwardKernel, operands):
    """Key tiles of each KV head, of all requests or of one batch row."""
    if cutlass.const_expr(config.requests.packed_k):
        requests = cute.size(operands.cu_seqlens_k) - 1
        return query_tiles(config.tile_n, operands.k.shape[1], requests)
    return cute.ceil_div(operands.k.shape[1], config.tile_n)


def own_group(config: BackwardKernel):
    """Which of the ``column_groups`` of a key tile this CTA computes."""
    return cute.arch.block_idx()[0] % config.column_groups if config.column_groups > 1 else 0


def key_tile(
    config: BackwardKernel, operands, window, own, kv_head, cut, sums_place=(0, 0, 0), query_heads=None
) -> KeyTile:
    """A piece of a key tile of one KV head. own: (request, the tile's number there). cut: (piece, pieces of the
    tile, most steps of a piece if tiles are cut by length). query_heads: (first, how many) of the KV head's query
    heads; None: all."""
    request, number = own
    pieces, heads = cut[1], operands.k.shape[2]
    place = request_at(config.requests, operands, request)
    bounds, ranges = config.mask.bounds(window), (None, None)
    if config.mask.has_ranges:
        ranges = (operands.ranges, operands.seen_by)
    first_key = number * config.tile_n
    last_key = cutlass.min(first_key + config.tile_n, place.length) - 1
    group = operands.q.shape[2] // heads
    first_head = kv_head * group
    if cutlass.const_expr(query_heads is not None):
        first_head += query_heads[0]
        group = query_heads[1]
    tile = KeyTile(
        config,
        request,
        kv_head,
        place,
        number,
        first_key,
        first_head,
        group,
        pieces,
        sums_place,
        further_tiles(config, operands, request),
        *(Int32(0),) * 10,  # of ``with_steps``
        bounds,
        *ranges,
        patterns=operands.q_patterns,
    )
    return with_steps(config, operands, tile, last_key, cut)


def with_steps(config: BackwardKernel, operands, tile: KeyTile, last_key, cut) -> KeyTile:
    """Return the tile with the steps of its piece, and with who sees what. last_key: the tile's, in the request. cut:
    as in ``key_tile``."""
    _, seq_q, _, length, _ = tile.place
    first_key, zero, group = tile.first_key, Int32(0), tile.group
    low, inner_end = tile.queries_of(first_key)
    inner_first, high = tile.queries_of(last_key)
    some = Boolean(last_key >= first_key) & Boolean(high > low)
    begin = low // config.tile_m
    count = (high + config.tile_m - 1) // config.tile_m - begin
    count = Int32(cutlass.select_(some, count, zero))
    tiles_q = (seq_q + config.tile_m - 1) // config.tile_m
    first_step, steps = zero, count * group
    if cutlass.const_expr(config.cut and not config.mask.has_blocks):
        first_step, steps = steps_of_piece(config, cut, steps, (tiles_q, begin, count, group), some)
    blocks = None
    if cutlass.const_expr(config.mask.has_blocks):
        heads = (tile.first_head, tile.first_head + group)
        blocks = key_block_of(config, operands, tile.request, first_key, tiles_q, heads)
        steps = steps_of(blocks)
    # Rows past the last query need no mask: their statistics make P zero.
    inner_end = Int32(cutlass.select_(Boolean(inner_end >= seq_q), Int32(FAR), inner_end))
    inner_end = Int32(cutlass.select_(Boolean(first_key + config.tile_n > length), zero, inner_end))
    seen_first, _ = tile.keys_of(zero)
    _, seen_end = tile.keys_of(seq_q - 1)
    rows_first, _ = tile.queries_of(0)
    _, rows_end = tile.queries_of(length - 1)
    # Past the last row of a tensor TMA fills zeros: nothing has to be cleared there.
    if cutlass.const_expr(not config.requests.packed_q):
        rows_end = Int32(cutlass.select_(Boolean(rows_end >= seq_q), Int32(FAR), rows_end))
    if cutlass.const_expr(not (config.requests.packed_k or config.requests.has_kv_lengths)):
        seen_end = Int32(cutlass.select_(Boolean(seen_end >= length), Int32(FAR), seen_end))
    return replace(
        tile,
        first_step=first_step,
        steps=steps,
        begin=begin,
        count=count,
        inner_first=inner_first,
        inner_end=inner_end,
        seen_first=Int32(seen_first),
        seen_end=seen_end,
        rows_first=rows_first,
        rows_end=rows_end,
        blocks=blocks,
    )


@cute.jit
def load_of(config: cutlass.Constexpr, operands, window, tile_index, limits: cutlass.Constexpr) -> tuple:
    """(what ``order.sort_key_tiles`` sorts by, steps, pieces) of a key tile, or of each slice of it; of any batch row,
    where all are alike. limits: (most steps of a piece, slices).

    If dQ's order is fixed, tiles are sorted by what nearly is their query tiles, but never grows with their keys: the
    request's query tiles that come after their first one, at most those of any tile of the window.
    """
    zero, (most, slices) = Int32(0), limits
    request, number = zero, tile_index
    if cutlass.const_expr(config.requests.packed_k):
        request, number = find_request(operands.cu_seqlens_k, tile_index, config.tile_n, operands.k.shape[1])
    whole = replace(config, cut=False, slices=False)
    tile = key_tile(whole, operands, window, (request, number), zero, (zero, Int32(1), zero))
    steps, pieces = tile.steps, Int32(1)
    weight = tile.count
    tiles_q = (tile.place.seq_q + config.tile_m - 1) // config.tile_m
    if cutlass.const_expr(config.cuts_by_length):
        if cutlass.const_expr(config.slices):
            steps = steps // slices
        after = zero
        if cutlass.const_expr(config.heads_inside and config.ends_early):
            after = cutlass.max(tiles_q - tile.begin - tile.count, 0) * tile.group % most
        pieces = cutlass.max((after + steps + most - 1) // most, 1)
        pieces = Int32(cutlass.select_(Boolean(steps > 0), pieces, Int32(1)))
        weight = (steps + pieces - 1) // pieces
    if cutlass.const_expr(config.deterministic):
        weight = tiles_q
        if cutlass.const_expr(not config.mask.has_ranges and not config.mask.has_blocks):
            weight = cutlass.max(tiles_q - tile.begin, 0)
            bounds = tile.bounds
            if cutlass.const_expr(bounds["left"] is not None):
                right = zero if cutlass.const_expr(bounds["right"] is None) else bounds["right"]
                if cutlass.const_expr(config.mask.causal or bounds["right"] is not None):
                    rows = bounds["left"] + right + config.tile_n * config.mask.key_stride
                    weight = cutlass.min(weight, rows // config.tile_m + 2)
    return weight, steps, pieces


def further_tiles(config: BackwardKernel, operands, request) -> Int32:
    """``KeyTile.further`` of a request; of a batch row, the number of its first query tile."""
    if config.requests.packed_q:
        requests = cute.size(operands.cu_seqlens_q) - 1
        begins = entry(operands.cu_seqlens_q, request, operands.q.shape[1]) // config.tile_m
        return Int32(requests + begins - 1)
    return Int32(request * cute.ceil_div(operands.q.shape[1], config.tile_m))
