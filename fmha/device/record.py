"""Tile records: one warp of a CTA computes its tiles, the others read them from shared memory.

Finding the next tile takes divisions, searches and loads from global memory. The *scheduler* does these while the other
roles work on earlier tiles, and writes a record to the next of ``record_count`` stages once all readers have released
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.config import RECORD_WORDS, AttentionKernel
from warpspec.fmha.device.blocks import Blocks, Visit, kv_blocks, list_of
from warpspec.fmha.device.tile import Piece, Tile
from warpspec.fmha.schedule import SORTED_REQUESTS, KeySpan

SPAN = ("begin", "count", "first", "end", "inner_first", "inner_end")
BLOCK_SPAN = ("begin", "count", "masked", "cut")
ENTRY = ("block", "rule")  # of a list's first step


class Records(NamedTuple):
    """ring: of records, (WORD, STAGE) Int32 in shared memory. The other fields are common to all tiles. tree, ranges,
    blocks: the operands. order: words of sorted requests (``device.longest``), (REQUEST) Int32 in shared memory.
    operands: all of them, for a source of its own (``AttentionKernel.line_source``)."""

    ring: cute.Tensor
    window_left: Int32
    window_right: Int32
    tree: cute.Tensor | None = None
    ranges: cute.Tensor | None = None
    blocks: Blocks | None = None
    order: cute.Tensor | None = None
    operands: object | None = None

    def words(self, config, use) -> cute.Tensor:
        """Words of record number ``use``."""
        count = config.scheduler.record_count
        return self.ring[None, use % count if count > 1 else 0]


class Record(NamedTuple):
    """Record number ``use`` of some records."""

    records: Records
    use: Int32

    def read(self, config) -> Tile:
        """``read_tile``."""
        return read_tile(config, self.records, self.use)


def records_of(config: AttentionKernel, base: cute.Pointer, where, operands, order=None) -> Records:
    """base: Int32 pointer to ``config.scheduler.record_bytes`` of shared memory. where: how the scheduler finds
    tiles. order: Int32 pointer to ``config.scheduler.order_bytes`` of shared memory, used if tiles are sorted."""
    ring = cute.make_tensor(base, cute.make_layout((RECORD_WORDS, config.scheduler.record_count)))
    if config.line_source is not None:
        return Records(ring, *where.window, operands=operands)
    words = cute.make_tensor(order, cute.make_layout(SORTED_REQUESTS)) if config.scheduler.sorts else None
    return Records(ring, *where.window, operands.tree, operands.ranges, kv_blocks(config, operands), words)


def span_words(config: AttentionKernel) -> tuple[str, ...]:
    """The words of a tile's span."""
    if not config.mask.has_blocks:
        return SPAN
    return BLOCK_SPAN if config.requests.ends_in_tile else BLOCK_SPAN[:-1]


def words_of(config: AttentionKernel) -> tuple[str, ...]:
    """The words of a record, in order; the first says whether there is a tile."""
    words = tile_words(config) if config.line_source is None else config.line_source.words(config)
    words = ("some", *words)
    words += ("whole", "piece_state") if config.scheduler.cuts_tiles else ()
    words += ("earlier", "later") if config.scheduler.adds_up else ()
    assert len(words) <= RECORD_WORDS
    return words


def tile_words(config: AttentionKernel) -> tuple[str, ...]:
    """The words of a ``Tile``."""
    words = (
        *span_words(config),
        "head_tile",
        "kv_head",
        "request",
        "first_query",
        "start",
        "length",
        "group",
        "seq_q",
    )
    words += ("first_row",) if config.requests.packed_q else ()
    words += ("first_key",) if config.requests.packed_k else ()
    words += ("split",) if config.output.splits else ()
    return words + (ENTRY if config.mask.has_blocks else ())


@dataclass(frozen=True)
class Scheduler:
    """The scheduler's state for all tiles."""

    config: AttentionKernel
    channels: dict
    records: Records


@cute.jit
def write_busy_tile(role, tile, use):
    """``write_tile``, but packed queries' idle tiles get no record; returns the next record's number."""
    if cutlass.const_expr(role.config.requests.packed_q):
        if tile.first_query < tile.seq_q:
            use = write_tile(role, tile, use)
    else:
        use = write_tile(role, tile, use)
    return use


@cute.jit
def write_tile(role, tile, use):
    """Write record number ``use``; returns use + 1. Called by the scheduler, a whole warp.

    Consumes: tile_empty. Produces: tile_full.
    """
    channels = role.channels
    channels["tile_empty"].wait_previous(use)
    if cute.arch.lane_idx() == 0:
        put_words(role, tile, use)
        channels["tile_full"].arrive(use)
    return use + 1


@cute.jit
def fill_record(role, tile, use):
    """Write the words of record number ``use``, which nobody reads yet. By a whole warp."""
    if cute.arch.lane_idx() == 0:
        put_words(role, tile, use)


def put_words(role, tile, use) -> None:
    """Write the words of a record. By one lane."""
    words = role.records.words(role.config, use)
    for i, name in enumerate(words_of(role.config)):
        words[i] = word_of(role.config, tile, name)


def word_of(config: AttentionKernel, tile: Tile, name: str) -> Int32:
    if name == "some":
        return Int32(1)
    if name in (*SPAN, *BLOCK_SPAN):
        return Int32(getattr(tile.span, name))
    if name in ENTRY:
        entry = tile.span.visit(0) if tile.span.entry is None else tile.span.entry
        return Int32(getattr(entry, name))
    if name in ("whole", "earlier", "later"):
        return Int32(getattr(tile.piece, name))
    if name == "piece_state":
        return Int32(tile.piece.state)
    return Int32(getattr(tile, name) if config.line_source is None else config.line_source.word(tile, name))


@cute.jit
def write_end(role, use):
    """Write, as record number ``use``, that there are no more tiles."""
    role.channels["tile_empty"].wait_previous(use)
    if cute.arch.lane_idx() == 0:
        words = role.records.words(role.config, use)
        words[0] = Int32(0)
        role.channels["tile_full"].arrive(use)


def wait_tile(config: AttentionKernel, channels: dict, records: Records, use) -> Boolean:
    """Wait for record number ``use`` and return whether it has a tile. Called by whole warps.

    Consumes: tile_full.
    """
    channels["tile_full"].wait(use)
    return Boolean(records.words(config, use)[0] != 0)


def read_tile(config: AttentionKernel, records: Records, use) -> Tile:
    """Tile number ``use``, for which ``wait_tile`` returned True. After its last read, a warp releases the record with
    one arrival at tile_empty."""
    words = records.words(config, use)
    word = {name: words[i] for i, name in enumerate(words_of(config))}
    piece = None
    if config.scheduler.cuts_tiles:
        numbers = (word.get(name, 0) for name in ("earlier", "later"))
        piece = Piece(0, word["count"], Boolean(word["whole"] != 0), word["piece_state"], *numbers)
    if config.line_source is not None:
        return config.line_source.read(config, records.operands, word, piece)
    tile = Tile(
        config,
        query_tile=0,  # nobody asks for it
        head_tile=word["head_tile"],
        kv_head=word["kv_head"],
        batch=0 if config.requests.packed_q else word["request"],
        request=word["request"],
        first_query=word["first_query"],
        first_row=word.get("first_row", 0),
        first_key=word.get("first_key", 0),
        start=word["start"],
        length=word["length"],
        split=word.get("split", 0),
        group=word["group"],
        seq_q=word["seq_q"],
        bounds=config.mask.bounds((records.window_left, records.window_right)),
        span=None if config.mask.has_blocks else KeySpan(*(word[name] for name in SPAN)),
        piece=piece,
        tree=records.tree,
        ranges=records.ranges,
        patterns=records.blocks.patterns if config.mask.has_blocks else None,
    )
    if config.mask.has_blocks:
        place = (tile.request, tile.first_head, tile.first_query, tile.length)
        span = list_of(config, records.blocks, *place)
        numbers = {name: word[name] for name in span_words(config)}
        tile = replace(tile, span=replace(span, entry=Visit(*(word[name] for name in ENTRY)), **numbers))
    return tile
