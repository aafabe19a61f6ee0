"""The two rows of a consumer thread, and where they belong.

A warp of a consumer holds 16 rows of its S and O: a thread has parts of rows g and g + 8 with g = lane / 4, and of
every 8 columns those at 2 (lane % 4) and the next. PTX ISA: "Register Fragments" of wgmma.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32

from warpspec.fmha.features import WARP_THREADS
from warpspec.fmha.mask import key_range
from warpspec.fmha.tile import INTEGERS, Place

WARP_ROWS = 16
HALF_ROWS = 8  # rows between a thread's two
QUAD = 4  # threads that share a row
ROW_HALVES = 2  # rows of a thread


@dataclass(frozen=True)
class Row:
    """index: row of the consumer's 64. half: which of the four threads that share it. first, end: keys it sees,
    [first, end)."""

    index: Int32
    half: Int32
    first: Int32
    end: Int32


def first_query(config, tile, group):
    """First query of a group of 64 rows."""
    return tile.first_query + group * config.group_queries


def rows(config, tile, group, thread) -> tuple[Row, Row]:
    """The two rows of a thread (0..127) of a consumer. group: of 64 rows. Idle rows get the keys of the query they
    would be."""
    lane = thread % WARP_THREADS
    upper = thread // WARP_THREADS * WARP_ROWS + lane // QUAD
    return tuple(
        _row(config, tile, group, upper + half * HALF_ROWS, lane % QUAD) for half in range(ROW_HALVES)
    )


def _row(config, tile, group, index, quad) -> Row:
    position = tile.start + first_query(config, tile, group) + index // config.pack
    first, end = key_range(position, tile.length, **tile.bounds, **INTEGERS)
    if config.splits:  # of the row's keys, those of this part
        begin = tile.span.begin * config.tile_n
        first = cutlass.max(first, begin)
        end = cutlass.min(end, begin + tile.span.count * config.tile_n)
    return Row(index, quad, first, end)


def place(config, tile, group, index) -> Place:
    """Where a row belongs. group: of 64 rows; index: of the row in it."""
    head = tile.head_tile * config.pack + index % config.pack
    query = first_query(config, tile, group) + index // config.pack
    inside = Boolean(head < tile.group) & Boolean(query < tile.seq_q)
    busy = Boolean(index < config.pack * config.group_queries)
    return Place(tile.batch, tile.kv_head, tile.kv_head * tile.group + head, query, inside & busy)
