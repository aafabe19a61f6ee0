"""The loop over a persistent CTA's tiles, which every role goes through alike."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.fmha.device.grid import index_of, rounds
from warpspec.fmha.device.line import chunk_at
from warpspec.fmha.device.queue import next_tile
from warpspec.fmha.device.tile import tile_at


@cute.jit
def each_tile(config: cutlass.Constexpr, operands, where, body: cutlass.Constexpr, role, uses):
    """uses = body(role, tile, uses) for each of the CTA's tiles; returns the last uses.

    where: ``grid.Where``; where work is cut by length, ``line.Chunks``. role: what body needs; has the
    channels. uses: counts.
    """
    if cutlass.const_expr(config.chunked):
        for round_ in cutlass.range(where.line.rounds, unroll=1):
            chunk = chunk_at(config, operands, where.line, where.cursors, round_)
            head, query_tile = chunk.begin.head, chunk.begin.query_tile
            while chunk.holds(head, query_tile):
                tile = chunk.tile(head, query_tile)
                uses = body(role, tile, uses)
                head, query_tile = chunk.next(head, query_tile, tile)
    elif cutlass.const_expr(config.queued):
        number, _, _ = cute.arch.block_idx()
        use = Int32(0)
        while number < where.tiles:
            tile = tile_at(config, operands, where.grid, where.window, number, where.section)
            uses = body(role, tile, uses)
            number = next_tile(role.channels, where.slot, use)
            use += 1
    else:
        for round_ in cutlass.range(rounds(where), unroll=1):
            tile = tile_at(config, operands, where.grid, where.window, index_of(round_), where.section)
            uses = body(role, tile, uses)
    return uses
