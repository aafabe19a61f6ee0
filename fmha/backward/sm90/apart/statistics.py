"""Statistics of a consumer's queries, made by the kernel that makes dQ: then no kernel comes before it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from warpspec.common.device.wgmma import QUAD, ROW_DISTANCE, THREAD_ROWS, WARPGROUP_ROWS
from warpspec.fmha.backward.device.rows import (
    load_vectors,
    part_of_dot,
    row_of,
    row_statistics,
    zero_after_loads,
)


@cute.jit
def make_statistics(own, statistics: cute.Tensor):
    """Make lse' and -delta of the thread's queries: write them to ``statistics`` (THREAD_ROWS, 2), and to memory for
    the kernel that makes dK and dV. A quad shares its rows of O and dO, which it reads from memory while Q and dO are
    on their way."""
    operands, tile = own.operands, own.tile
    held, lses, queries = [], [], []
    for r in cutlass.range_constexpr(THREAD_ROWS):
        query = tile.first_query + own.consumer * WARPGROUP_ROWS + own.row + r * ROW_DISTANCE
        row = row_of(query, tile.place.first_row, tile.place.seq_q, operands.o)
        lines = (operands.o[tile.batch, row, tile.head, None], operands.do[tile.batch, row, tile.head, None])
        held.append(load_vectors(own.config, lines, own.member, QUAD))
        lses.append(operands.lse[tile.batch, tile.head, row])
        queries.append(query)
    zero = zero_after_loads(own.thread)
    for r in cutlass.range_constexpr(THREAD_ROWS):
        dot = part_of_dot(own.config, held[r], own.member, QUAD, zero)
        for distance in (1, 2):
            dot += Float32(cute.arch.shuffle_sync_bfly(dot, distance))
        inside = Boolean(queries[r] < tile.place.seq_q)
        total, delta, _ = row_statistics(own.config, lses[r], None, None, inside, dot)
        statistics[r, 0], statistics[r, 1] = total, -delta
        write_statistics(own, r, total, -delta)


@cute.jit
def write_statistics(own, r: cutlass.Constexpr, lse, less):
    """Write lse' and -delta of the thread's row r to memory, each by one thread of the quad."""
    config, tile = own.config, own.tile
    index = own.consumer * WARPGROUP_ROWS + own.row + r * ROW_DISTANCE
    number, place = index // config.row_tile, index % config.row_tile
    row_tile = own.operands.statistics[tile.head, tile.row_tile(own.operands, number), None, None]
    value = Float32(cutlass.select_(Boolean(own.member == 0), lse, less))
    column = 2 * own.member + place % 2
    if Boolean(number < tile.row_tiles_there()) & Boolean(own.member < 2):
        row_tile[place // 2, column] = value
