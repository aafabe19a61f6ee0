"""Lists of blocks in kernels (``fmha.block_mask``): the KV tiles that a tile visits, and the keys that a row sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.block_mask import WORD_BITS
from warpspec.fmha.schedule import KvTiles, split_range


class Visit(NamedTuple):
    """An entry of a list: a block of keys and its rule."""

    block: Int32
    rule: Int32


class Blocks(NamedTuple):
    """The operands that hold lists of blocks from the side of the queries, or of the keys."""

    visits: cute.Tensor
    counts: cute.Tensor
    patterns: cute.Tensor | None
    order: cute.Tensor | None = None

    def place(self, batch, head, block) -> tuple:
        """First indices of a block's list. Lists may be the same for all batch rows or heads. A block past the last one
        gets the last one's list."""
        return tuple(
            cutlass.min(index, size - 1)
            for index, size in zip((batch, head, block), self.counts.shape, strict=False)
        )


def kv_blocks(config, operands) -> Blocks | None:
    """Lists of the blocks of keys that queries visit, or None."""
    if not config.mask.has_blocks:
        return None
    return Blocks(operands.kv_visits, operands.kv_counts, operands.patterns, operands.kv_order)


class Listed(NamedTuple):
    """An entry of ``BlockMask.kv_order``: a block of queries, its list's counts, and the list's first entry."""

    block: Int32
    partial: Int32
    count: Int32
    first: Visit


def nth_listed(config, blocks: Blocks, query_tiles, number, batch, head) -> tuple:
    """(``Listed``, query tile) of the number-th query tile of a head, the ones with the longest lists first.

    Only the first block may have fewer tiles than the others (``BlockMask``).
    """
    of_block = -(-config.mask.block_size[0] // config.rows.queries)
    place = number + blocks.counts.shape[2] * of_block - query_tiles
    rank, tile = place // of_block, of_block - 1 - place % of_block
    words = blocks.order[(*blocks.place(batch, head, rank), None)]
    found = Listed(words[0], words[1], words[2], Visit(words[3], words[4]))
    return found, found.block * of_block + tile


@dataclass(frozen=True)
class BlockSpan(KvTiles):
    """KV tiles of an M tile, whose queries are of one block: those of the blocks on its list, in order.

    visits (BLOCK, 2): the list. tiles: KV tiles of a block. begin, count: the KV tiles to visit, counted along the
    list. masked: those before this one belong to partial blocks. end: the KV length if it may end in a tile, else None.
    cut: those from this one on belong to the full block in which the length ends; None if nobody looked for it.
    entry: the first step's entry of the list, if it has been read.
    """

    visits: cute.Tensor
    tiles: int
    begin: Int32
    count: Int32
    masked: Int32
    cut: Int32 | None = None
    end: Int32 | None = None
    entry: Visit | None = None
    first = 0  # of the keys that some row may see

    def tile(self, step, entry: Visit | None = None):
        """KV tile of the step-th visit. entry: its ``visit``, if it has been read."""
        number = self.begin + step
        block = self.visits[number // self.tiles, 0] if entry is None else entry.block
        return block * self.tiles + number % self.tiles

    def visit(self, step) -> Visit:
        """Read the entry of the step-th visit; of a step past the list, some other one."""
        place = cutlass.min((self.begin + step) // self.tiles, self.visits.shape[0] - 1)
        return Visit(self.visits[place, 0], self.visits[place, 1])

    def first_word(self, step, tile_keys: int) -> Int32:
        """Word of a row's pattern with which the step-th visit's tile begins."""
        return (self.begin + step) % self.tiles * (tile_keys // WORD_BITS)

    def split(self, split, splits) -> BlockSpan:
        """The span of one of ``splits`` contiguous ranges of its KV tiles; a range may be empty."""
        first, count = split_range(split, splits, self.count)
        return replace(self, begin=self.begin + first, count=count)

    def needs_mask(self, step, tile_keys: int):
        """Whether some row does not see some key of the step-th visit's tile."""
        masked = Boolean(self.begin + step < self.masked)
        return masked if self.end is None else masked | self.has_unseen(self.tile(step), tile_keys)

    def has_unseen(self, tile, tile_keys: int):
        """Whether some key of the tile lies past the KV length."""
        return Boolean((tile + 1) * tile_keys > self.end)

    def unmasked_steps(self) -> tuple:
        """(first, end): the steps whose KV tiles every row sees in full; the first step counts as masked."""
        if self.end is not None and self.cut is None:
            return self.count, self.count
        first = cutlass.min(cutlass.max(self.masked - self.begin, 1), self.count)
        if self.cut is None:
            return first, self.count
        return first, cutlass.max(cutlass.min(self.cut - self.begin, self.count), first)


def list_of(config, blocks: Blocks, batch, head, first_query, length) -> BlockSpan:
    """The span of an M tile, with its list, and without numbers of KV tiles: they are 0."""
    rows, keys = config.mask.block_size
    visits = blocks.visits[(*blocks.place(batch, head, first_query // rows), None, None)]
    end = Int32(length) if config.requests.ends_in_tile else None
    return BlockSpan(visits, keys // config.tile_n, *(Int32(0),) * 3, end=end)


def block_span(
    config, blocks: Blocks, batch, head, first_query, length, listed: Listed | None = None
) -> BlockSpan:
    """The KV tiles of an M tile. listed: its block's, if it has been read."""
    block = first_query // config.mask.block_size[0]
    span = list_of(config, blocks, batch, head, first_query, length)
    if listed is None:
        place = blocks.place(batch, head, block)
        partial, count = (blocks.counts[(*place, number)] for number in range(2))
    else:
        partial, count = listed.partial, listed.count
        span = replace(span, entry=None if config.output.splits else listed.first)
    if not config.requests.ends_in_tile:
        return replace(span, count=count * span.tiles, masked=partial * span.tiles)
    if config.scheduler.has_warp:  # other roles that find their tiles lack the registers
        count, cut = blocks_within(span.visits, partial, count, length, config.mask.block_size[1])
        span = replace(span, cut=cut * span.tiles)
    some = Boolean(length > 0) & Boolean(block < blocks.counts.shape[2])
    count = Int32(cutlass.select_(some, count, Int32(0)))
    return replace(span, count=count * span.tiles, masked=partial * span.tiles)


@cute.jit
def blocks_within(visits: cute.Tensor, partial, count, length, keys: cutlass.Constexpr) -> tuple:
    """(number of a list's blocks without its last full ones that begin past a KV length, number of its blocks in front
    of the full one in which the length ends). partial, count: partial blocks and all. keys: keys of a block."""
    # Full blocks are in order: those before ``low`` begin before the end.
    low, high = Int32(partial), Int32(count)
    if high > low:  # noqa: SIM102 (on the device, "and" reads both)
        if visits[high - 1, 0] * keys < length:
            low = high
    while high > low:
        middle = (low + high) // 2
        if visits[middle, 0] * keys < length:
            low = middle + 1
        else:
            high = middle
    cut = low
    if low > partial:  # noqa: SIM102
        if (visits[low - 1, 0] + 1) * keys > length:
            cut = low - 1
    return low, cut


@dataclass(frozen=True)
class RowBlocks:
    """The keys that a row sees of the blocks it visits.

    span: the span of its tile. patterns: the operand, or None. row: number of the row's query in its block. length: KV
    length.
    """

    span: BlockSpan
    patterns: cute.Tensor | None
    row: Int32
    length: Int32

    def interval(self, rule, first, end) -> tuple:
        """[first, end) of the keys that the row sees of a block with this rule, but for its pattern. first, end: those
        of partial blocks."""
        whole = Boolean(rule < 0)
        return (
            Int32(cutlass.select_(whole, Int32(0), Int32(first))),
            Int32(cutlass.select_(whole, Int32(self.length), Int32(end))),
        )

    def words(self, step, rule, tile_keys: int) -> cute.Tensor:
        """The row's pattern in the step-th visit's tile: words (KEY / 32), bit i for key i. rule: the block's."""
        count = tile_keys // WORD_BITS
        number = cutlass.max(rule, ~rule)
        row = self.patterns[number, self.row, None]  # (WORD)
        words = cute.make_rmem_tensor(count, Int32)
        cute.autovec_copy(
            cute.local_tile(row, (count,), (self.span.first_word(step, tile_keys) // count,)), words
        )
        return words

    def key_at(self, number, tile_keys: int, first, end) -> tuple:
        """(key, whether the row sees it) for the number-th key along the list, from that of the span's first tile
        on."""
        step, place = number // tile_keys, number % tile_keys
        entry = self.span.visit(step)
        key, rule = self.span.tile(step, entry) * tile_keys + place, entry.rule
        low, high = self.interval(rule, first, end)
        seen = Boolean(key >= low) & Boolean(key < high)
        if self.patterns is not None:
            word = self.span.first_word(step, tile_keys) + place // WORD_BITS
            word = self.patterns[cutlass.max(rule, ~rule), self.row, word]
            seen = seen & Boolean((word >> (place % WORD_BITS)) & 1 != 0)
        return cutlass.min(key, self.length - 1), seen
