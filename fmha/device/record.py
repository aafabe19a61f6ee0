"""Tile records: one warp of a persistent CTA works out the next tile, the others read it from shared memory.

Which tile comes next costs divisions, searches and loads from global memory. The *scheduler* does them while the other
roles work on the tile before, and leaves a record in the one slot there is as soon as everybody has begun that tile.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.device.tile import Piece, Tile, bounds_of
from warpspec.fmha.features import KernelFeatures
from warpspec.fmha.schedule import KeySpan

SPAN = ("begin", "count", "first", "end", "inner_first", "inner_end")


class Records(NamedTuple):
    """The slot, (WORD) Int32 in shared memory, and what every tile has in common. window: (left, right)."""

    slot: cute.Tensor
    window_left: Int32
    window_right: Int32


def words_of(config: KernelFeatures) -> tuple[str, ...]:
    """What a record has, in order; the first says whether there is a tile."""
    words = ("some", *SPAN, "head_tile", "kv_head", "request", "first_query", "start", "length", "group", "seq_q")
    words += ("first_row",) if config.packed_q else ()
    words += ("first_key",) if config.packed_k else ()
    words += ("split",) if config.splits else ()
    return words + (("whole", "piece_slot") if config.chunked else ())


@cute.jit
def write_tile(config: cutlass.Constexpr, channels: cutlass.Constexpr, slot: cute.Tensor, tile, use):
    """The use-th record. By the scheduler, a whole warp.

    Consumes: tile_empty. Produces: tile_full.
    """
    channels["tile_empty"].wait_previous(use)
    if cute.arch.lane_idx() == 0:
        for i, name in enumerate(words_of(config)):
            slot[i] = word_of(tile, name)
    channels["tile_full"].arrive_warp(use)


def word_of(tile: Tile, name: str) -> Int32:
    if name == "some":
        return Int32(1)
    if name in SPAN:
        return Int32(getattr(tile.span, name))
    if name == "whole":
        return Int32(tile.piece.whole)
    return Int32(tile.piece.slot if name == "piece_slot" else getattr(tile, name))


@cute.jit
def write_end(channels: cutlass.Constexpr, slot: cute.Tensor, use):
    """Instead of the use-th record: there are no more tiles."""
    channels["tile_empty"].wait_previous(use)
    if cute.arch.lane_idx() == 0:
        slot[0] = Int32(0)
    channels["tile_full"].arrive_warp(use)


def wait_tile(channels: dict, slot: cute.Tensor, use) -> Boolean:
    """Whether there is a use-th tile. By whole warps.

    Consumes: tile_full.
    """
    channels["tile_full"].wait(use)
    return Boolean(slot[0] != 0)


def read_tile(config: KernelFeatures, channels: dict, records: Records, use) -> Tile:
    """The use-th tile, which ``wait_tile`` has found. By whole warps.

    Produces: tile_empty.
    """
    word = {name: records.slot[i] for i, name in enumerate(words_of(config))}
    channels["tile_empty"].arrive_warp(use)
    piece = None
    if config.chunked:
        piece = Piece(0, word["count"], Boolean(word["whole"] != 0), word["piece_slot"])
    return Tile(
        config,
        query_tile=0,  # nobody asks for it
        head_tile=word["head_tile"],
        kv_head=word["kv_head"],
        batch=0 if config.packed_q else word["request"],
        request=word["request"],
        first_query=word["first_query"],
        first_row=word.get("first_row", 0),
        first_key=word.get("first_key", 0),
        start=word["start"],
        length=word["length"],
        split=word.get("split", 0),
        group=word["group"],
        seq_q=word["seq_q"],
        bounds=bounds_of(config, (records.window_left, records.window_right)),
        span=KeySpan(*(word[name] for name in SPAN)),
        piece=piece,
    )
