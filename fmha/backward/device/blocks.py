"""Lists of blocks (``fmha.block_mask``) from the side of the keys: the query tiles that visit a key tile, and the
queries that see a key.

For each block of keys a table has, at each block of queries that visits it, which one is the next. So a step follows
from the step before it, and no role counts along a list.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.block_mask import WORD_BITS
from warpspec.fmha.lists import COUNT, FIRST, LAST, NEXT, ORDER, RULE

FAR = 2**30  # past the queries of every request
NO_MASK = -1  # rule of a full block


class KeyBlock(NamedTuple):
    """The tables of a key tile's block.

    batch: batch row of the keys. number: number of the block. tiles: query tiles of a block of queries. query_tiles:
    query tiles of a head. heads: [first, end) of the query heads. rule (1): a register with the rule at the thread's
    present step; None: the tables say it.
    """

    visits: cute.Tensor
    counts: cute.Tensor
    batch: Int32
    number: Int32
    tiles: int
    query_tiles: Int32
    heads: tuple
    rule: cute.Tensor | None = None

    def rule_at(self, head, query_tile) -> Int32:
        """RULE of a query tile's block. With ``rule``, the thread is at that tile."""
        return self.entry(head, query_tile, RULE) if self.rule is None else self.rule[0]

    def place(self, head) -> tuple:
        """First indices in the tables; lists may be the same for all batch rows or heads."""
        batches, heads, blocks = self.counts.shape[:3]
        return (
            cutlass.min(self.batch, batches - 1),
            cutlass.max(cutlass.min(head, heads - 1), 0),
            cutlass.min(self.number, blocks - 1),
        )

    def counted(self, head, which: int) -> Int32:
        """FIRST, LAST or COUNT of the blocks of queries that visit this block."""
        return self.counts[(*self.place(head), which)]

    def entry(self, head, query_tile, which: int) -> Int32:
        """NEXT, RULE or RANK of a query tile's block."""
        block = cutlass.min(query_tile // self.tiles, self.visits.shape[3] - 1)
        return self.visits[(*self.place(head), block, which)]

    def first_tile(self, head) -> Int32:
        """The first query tile of a head."""
        return self.counted(head, FIRST) * self.tiles

    def last_tile(self, head) -> Int32:
        return cutlass.min((self.counted(head, LAST) + 1) * self.tiles, self.query_tiles) - 1

    def tiles_of(self, head) -> Int32:
        """How many query tiles of a head there are."""
        count = self.counted(head, COUNT) * self.tiles
        return count - (self.counted(head, LAST) + 1) * self.tiles + self.last_tile(head) + 1


def key_block_of(config: cutlass.Constexpr, operands, request, first_key, tiles_q, heads: tuple) -> KeyBlock:
    """What the lists of blocks say of a key tile. heads: (first, one past the last) of the query heads."""
    rows, keys = config.mask.block_size
    row_tiles = rows // config.tile_m
    return KeyBlock(
        operands.q_visits, operands.q_counts, request, first_key // keys, row_tiles, tiles_q, heads
    )


def ordered_tile(config: cutlass.Constexpr, operands, request, head, tiles, number) -> Int32:
    """The key tile of a row that begins as the ``number``-th: those whose blocks the most blocks of queries visit come
    first. request, head: the row's batch row and first query head. tiles: of the row. Where dQ has a fixed order, tiles
    begin in theirs."""
    if cutlass.const_expr(config.deterministic):
        return number
    batches, heads, _, _ = operands.q_counts.shape
    per_block = config.mask.block_size[1] // config.tile_n
    missing = (per_block - tiles % per_block) % per_block  # tiles of the last block, which then comes first
    slot = number + Int32(cutlass.select_(Boolean(number < per_block - missing), Int32(0), missing))
    place = (cutlass.min(request, batches - 1), cutlass.min(head, heads - 1), slot // per_block)
    return operands.q_counts[(*place, ORDER)] * per_block + slot % per_block


@cute.jit
def steps_of(block) -> Int32:
    """Steps of a key tile of a ``KeyBlock``."""
    steps, (first, end) = Int32(0), block.heads
    for head in cutlass.range(first, end, unroll=1):
        if block.counted(head, COUNT) > 0:
            steps += block.tiles_of(head)
    return steps


@cute.jit
def head_from(block, head, step: cutlass.Constexpr) -> Int32:
    """The first head from ``head`` on, up or down, that has query tiles; past the others if there is none."""
    first, end = block.heads
    searching = Boolean(head >= first) & Boolean(head < end)
    while searching:
        if block.counted(head, COUNT) > 0:
            searching = Boolean(False)
        else:
            head += step
            searching = Boolean(head >= first) & Boolean(head < end)
    return head


def first_step(block: KeyBlock) -> tuple:
    """(query head, query tile) of the first step."""
    head = head_from(block, Int32(block.heads[0]), 1)
    return head, block.first_tile(head)


def last_step(block: KeyBlock) -> tuple:
    """(query head, query tile) of the last step."""
    head = head_from(block, Int32(block.heads[1]) - 1, -1)
    return head, block.last_tile(head)


@cute.jit
def step_after(block, head, query_tile, after=None) -> tuple:
    """(query head, query tile) of the step after one. after: NEXT at the one, if it is known."""
    following = query_tile + 1
    if Boolean(following % block.tiles == 0) | Boolean(following >= block.query_tiles):
        if cutlass.const_expr(after is None):
            following = block.entry(head, query_tile, NEXT) * block.tiles
        else:
            following = after * block.tiles
        if following <= query_tile:  # the list begins again: the next head
            head = head_from(block, head + 1, 1)
            following = block.first_tile(head)
    return head, following


def listed(block) -> tuple:
    """(whether all of a block is seen, words of the patterns of a thread's keys or None), for an ``arithmetic.Block``:
    bit i of a key's words for the thread's column i."""
    config, tile = block.config, block.tile
    rows, keys = config.mask.block_size
    rule = tile.blocks.rule_at(block.head, block.first_query // config.tile_m)
    if not config.mask.has_patterns:
        return Boolean(rule < 0), None
    place = block.first_query % rows
    first, shift, found = place // WORD_BITS, place % WORD_BITS, []
    first_key = block.keys[0] % keys
    for key in block.keys:  # one address for all, which are in one block: registers are scarce
        number = first_key + (key - block.keys[0])
        row = tile.patterns[cutlass.max(rule, ~rule), number, None]  # (WORD)
        found.append([row[first + i] >> shift for i in range(max(block.columns) // WORD_BITS + 1)])
    return Boolean(rule < 0), found


def seen_of_block(whole, first, end) -> tuple:
    """[first, end) of the queries that see a key. whole: all of a block, if the key exists; otherwise those given."""
    exists = Boolean(first != FAR)
    return (
        Int32(cutlass.select_(whole & exists, Int32(0), Int32(first))),
        Int32(cutlass.select_(whole & exists, Int32(FAR), Int32(end))),
    )
