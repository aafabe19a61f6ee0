"""The loop over a persistent CTA's tiles, which every role goes through alike."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.fmha.device.grid import index_of, rounds
from warpspec.fmha.device.line import chunk_at
from warpspec.fmha.device.queue import take
from warpspec.fmha.device.record import read_tile, wait_tile, write_end, write_tile
from warpspec.fmha.device.tile import tile_at


@cute.jit
def each_tile(config: cutlass.Constexpr, operands, where, body: cutlass.Constexpr, role, uses):
    """uses = body(role, tile, uses) for each of the CTA's tiles; returns the last uses.

    where: ``grid.Where``, or where tiles come as records ``record.Records``. role: what body needs; has the channels.
    uses: counts.
    """
    if cutlass.const_expr(config.scheduled):
        number = Int32(0)
        some = wait_tile(role.channels, where.slot, number)
        while some:
            tile = read_tile(config, role.channels, where, number)
            uses = body(role, tile, uses)
            number += 1
            some = wait_tile(role.channels, where.slot, number)
    else:
        uses = each_found(config, operands, where, body, role, uses)
    return uses


@cute.jit
def each_found(config: cutlass.Constexpr, operands, where, body: cutlass.Constexpr, role, uses):
    """``each_tile`` of a warp that finds the tiles itself. where: ``grid.Where``; where work is cut by length,
    ``line.Chunks``."""
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
        while number < where.tiles:
            tile = tile_at(config, operands, where.grid, where.window, number, where.section)
            uses = body(role, tile, uses)
            number = take(operands.queue, where.tiles)
    else:
        for round_ in cutlass.range(rounds(where), unroll=1):
            tile = tile_at(config, operands, where.grid, where.window, index_of(round_), where.section)
            uses = body(role, tile, uses)
    return uses


@dataclass(frozen=True)
class Scheduler:
    """What the scheduler has for all tiles. slot: of records."""

    config: object
    channels: dict
    slot: cute.Tensor


@cute.jit
def schedule(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands, where, slot: cute.Tensor):
    """The scheduler: a record of each of the CTA's tiles, then one that says there are no more.

    Consumes: tile_empty. Produces: tile_full.
    """
    use = each_found(config, operands, where, schedule_tile, Scheduler(config, channels, slot), Int32(0))
    write_end(channels, slot, use)


@cute.jit
def schedule_tile(role, tile, use):
    write_tile(role.config, role.channels, role.slot, tile, use)
    return use + 1
