"""wgmma's register fragments: the rows and columns of S and O in a consumer thread.

A warp of a consumer holds 16 rows. A thread has columns of rows g and g + 8 with g = lane / 4: in every 8 columns the
ones at 2 (lane % 4) and next to it. Element i of a fragment (n) belongs to row i // 2 % 2 of the thread and to column
8 (i // 4) + 2 (lane % 4) + i % 2. PTX ISA: "Register Fragments" of wgmma.
"""

from __future__ import annotations

from cutlass import cute

from warpspec.common.device.wgmma import PAIR, QUAD, ROW_DISTANCE, THREAD_ROWS, WARP_ROWS, elements
from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.device.tile import Row
from warpspec.fmha.device.unseen import RowColumns


def thread_rows(config, tile, row_group, thread) -> tuple[Row, ...]:
    """The rows of a thread (0..127) of a consumer that works on a row group: two, of its warp's 16.

    If warps have their own KV tiles, any of them may get the tile's rows in the end, of which a thread has one if there
    are 8."""
    lane, count = thread % WARP_THREADS, THREAD_ROWS
    first = thread // WARP_THREADS * WARP_ROWS + lane // QUAD
    if config.by_warp:
        first, count = lane // QUAD, config.shape.row_tiles
    return tuple(tile.row(first + r * ROW_DISTANCE, lane % QUAD, row_group) for r in range(count))


def thread_of(row: Row):
    """The thread whose first row this is, 0..127, by what registers hold of it during KV tiles."""
    lane = row.index % WARP_ROWS * QUAD + row.member
    return row.index // WARP_ROWS * WARP_THREADS + lane


def row_columns(config, o: cute.Tensor, r: int, row: Row, column_group) -> RowColumns:
    """A thread's columns of row r in its fragment o (n). column_group: the consumer's, of O."""
    own = elements(o, r)
    pairs = [own[at : at + PAIR] for at in range(0, len(own), PAIR)]
    numbers = [block * QUAD + row.member for block in range(len(pairs))]
    if not config.heads.whole:
        return RowColumns(pairs, numbers, lambda whole: whole)
    return RowColumns(
        pairs, numbers, lambda whole: cute.local_tile(whole, (config.o_columns,), (column_group,))
    )
