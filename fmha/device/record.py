"""Tile records: one warp of a CTA works out its tiles, the others read them from shared memory.

Which tile comes next costs divisions, searches and loads from global memory. The *scheduler* does them while the other
roles work on the tiles before, and leaves a record in the next of ``record_count`` places once everybody has handed
that place back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.device.tile import Piece, Tile
from warpspec.fmha.features import RECORD_WORDS, AttentionKernel
from warpspec.fmha.schedule import KeySpan

SPAN = ("begin", "count", "first", "end", "inner_first", "inner_end")


class Records(NamedTuple):
    """ring: of records, (WORD, STAGE) Int32 in shared memory. The rest is what every tile has in common. tree,
    ranges: the operands."""

    ring: cute.Tensor
    window_left: Int32
    window_right: Int32
    tree: cute.Tensor | None = None
    ranges: cute.Tensor | None = None

    def words(self, config, use) -> cute.Tensor:
        """Words of the use-th record."""
        count = config.scheduler.record_count
        return self.ring[None, use % count if count > 1 else 0]


def records_of(config: AttentionKernel, base: cute.Pointer, where, operands) -> Records:
    """base: Int32, to ``config.scheduler.record_bytes`` of shared memory. where: what the scheduler finds tiles by."""
    ring = cute.make_tensor(base, cute.make_layout((RECORD_WORDS, config.scheduler.record_count)))
    return Records(ring, *where.window, operands.tree, operands.ranges)


def words_of(config: AttentionKernel) -> tuple[str, ...]:
    """What a record has, in order; the first says whether there is a tile."""
    words = (
        "some",
        *SPAN,
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
    words += ("whole", "piece_state") if config.scheduler.cuts_tiles else ()
    assert len(words) <= RECORD_WORDS
    return words


@dataclass(frozen=True)
class Scheduler:
    """What the scheduler has for all tiles."""

    config: AttentionKernel
    channels: dict
    records: Records


@cute.jit
def write_tile(role, tile, use):
    """Leave the use-th record; returns use + 1. By the scheduler, a whole warp.

    Consumes: tile_empty. Produces: tile_full.
    """
    config, channels = role.config, role.channels
    channels["tile_empty"].wait_previous(use)
    if cute.arch.lane_idx() == 0:
        words = role.records.words(config, use)
        for i, name in enumerate(words_of(config)):
            words[i] = word_of(tile, name)
    channels["tile_full"].arrive_warp(use)
    return use + 1


def word_of(tile: Tile, name: str) -> Int32:
    if name == "some":
        return Int32(1)
    if name in SPAN:
        return Int32(getattr(tile.span, name))
    if name == "whole":
        return Int32(tile.piece.whole)
    return Int32(tile.piece.state if name == "piece_state" else getattr(tile, name))


@cute.jit
def write_end(role, use):
    """Instead of the use-th record: there are no more tiles."""
    role.channels["tile_empty"].wait_previous(use)
    if cute.arch.lane_idx() == 0:
        words = role.records.words(role.config, use)
        words[0] = Int32(0)
    role.channels["tile_full"].arrive_warp(use)


def wait_tile(config: AttentionKernel, channels: dict, records: Records, use) -> Boolean:
    """Whether there is a use-th tile. By whole warps.

    Consumes: tile_full.
    """
    channels["tile_full"].wait(use)
    return Boolean(records.words(config, use)[0] != 0)


def read_tile(config: AttentionKernel, records: Records, use) -> Tile:
    """The use-th tile, which ``wait_tile`` has found. Who has read it for the last time hands it back, by
    tile_empty, one arrival a warp."""
    words = records.words(config, use)
    word = {name: words[i] for i, name in enumerate(words_of(config))}
    piece = None
    if config.scheduler.cuts_tiles:
        piece = Piece(0, word["count"], Boolean(word["whole"] != 0), word["piece_state"])
    return Tile(
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
        span=KeySpan(*(word[name] for name in SPAN)),
        piece=piece,
        tree=records.tree,
        ranges=records.ranges,
    )
