"""The loop over a CTA's tiles, the same for every role."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.device.ahead import prefetch_small, prefetch_table, wait_for_launch
from warpspec.fmha.device.chunk import chunk_at
from warpspec.fmha.device.cut_ahead import each_further, known_operands
from warpspec.fmha.device.cuts import kept_chunk, prefetch_cuts
from warpspec.fmha.device.grid import index_of, rounds
from warpspec.fmha.device.longest import order_of
from warpspec.fmha.device.partitions import partition_at, partitions_of
from warpspec.fmha.device.queue import take
from warpspec.fmha.device.record import (
    Scheduler,
    read_tile,
    wait_tile,
    write_busy_tile,
    write_end,
    write_tile,
)
from warpspec.fmha.device.tile import tile_at


@cute.jit
def each_tile(
    config: cutlass.Constexpr,
    operands,
    where,
    body: cutlass.Constexpr,
    role,
    uses,
    keeps: cutlass.Constexpr = False,
    hands_back: cutlass.Constexpr = False,
):
    """Call ``uses = body(role, tile, uses)`` for each of the CTA's tiles, in order; return the last ``uses``.

    where: how tiles are found: ``grid.Where``, or ``line.Chunks`` if work is cut by length, or ``record.Records`` if
    another warp computes them. role: what body needs, including the channels. uses: use counts of rings. keeps: body
    reads the tile's record again, so the record is released only after body. hands_back: body releases it itself, by an
    arrival at tile_empty, and gets the record's number as a further argument.
    """
    if cutlass.const_expr(config.scheduler.has_warp):
        number = Int32(0)
        some = wait_tile(config, role.channels, where, number)
        while some:
            tile = read_tile(config, where, number)
            if cutlass.const_expr(not keeps and not hands_back):
                role.channels["tile_empty"].arrive_warp(number)
            if cutlass.const_expr(hands_back):
                uses = body(role, tile, uses, number)
            else:
                uses = body(role, tile, uses)
            if cutlass.const_expr(keeps):
                role.channels["tile_empty"].arrive_warp(number)
            number += 1
            some = wait_tile(config, role.channels, where, number)
    else:
        uses = each_found(config, operands, where, body, role, uses)
    return uses


@cute.jit
def each_scheduled(
    config: cutlass.Constexpr, operands, chunks, records, body: cutlass.Constexpr, role, uses, schedules
):
    """``each_tile`` for producer warps, one of which, that ``schedules``, also finds the tiles of the CTA's only chunk
    and writes their records (``TileScheduler.by_producer``)."""
    number, some = Int32(0), Boolean(True)
    if cutlass.const_expr(config.scheduler.cuts_ahead):
        operands = known_operands(config, operands, chunks)
    head = Int32(0)
    if schedules:  # other warps do not wait for the chunk that is found ahead
        head = only_chunk(config, operands, chunks).last_head
    while some:
        if schedules:
            head = write_next(role, operands, chunks, records, head, number)
        some = wait_tile(config, role.channels, records, number)
        if some:
            tile = read_tile(config, records, number)
            role.channels["tile_empty"].arrive_warp(number)
            uses = body(role, tile, uses)
        number += 1
    return uses


@cute.jit
def write_next(role, operands, chunks, records, head, number):
    """Write, as record number ``number``, the chunk's first tile from a head of the line on, backwards, or that there
    is none. Returns the head to go on with."""
    config, found = role.config, Boolean(False)
    chunk, scheduler = only_chunk(config, operands, chunks), Scheduler(config, role.channels, records)
    while Boolean(head >= chunk.first_head) & (not found):
        tile = chunk.tile(head, Int32(0))
        found = tile.piece.some
        if found:
            write_tile(scheduler, tile, number)
        head -= chunk.step
    if not found:
        write_end(scheduler, number)
    return head


def only_chunk(config, operands, chunks):
    """The CTA's chunk of the only round."""
    return (kept_chunk if config.scheduler.reads_cuts else chunk_at)(config, operands, chunks, 0)


@cute.jit
def schedule(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands, where, records):
    """The scheduler warp: write a record for each of the CTA's tiles that has queries, then one that says there are no
    more.

    Consumes: tile_empty. Produces: tile_full.
    """
    role = Scheduler(config, channels, records)
    if cutlass.const_expr(config.scheduler.cuts_ahead):
        write_end(role, each_further(config, operands, where, role))
    else:
        schedule_all(config, operands, where, role)


@cute.jit
def schedule_all(config: cutlass.Constexpr, operands, where, role):
    """``schedule`` of tiles of which none has been found ahead."""
    if cutlass.const_expr(config.waits_late):
        prefetch_small(operands)
    if cutlass.const_expr(config.scheduler.reads_cuts):
        prefetch_cuts(operands)
        if cutlass.const_expr(operands.page_table is not None):
            prefetch_table(operands.page_table)
    if cutlass.const_expr(config.scheduler.sorts or config.scheduler.reads_cuts):
        wait_for_launch(config)
    write_end(role, each_found(config, operands, where, write_busy_tile, role, Int32(0)))


@cute.jit
def each_found(config: cutlass.Constexpr, operands, where, body: cutlass.Constexpr, role, uses):
    """``each_tile`` for a warp that finds the tiles itself."""
    if cutlass.const_expr(config.scheduler.cuts_tiles):
        for round_ in cutlass.range(where.line.rounds, unroll=1):
            if cutlass.const_expr(config.scheduler.reads_cuts):
                chunk = kept_chunk(config, operands, where, round_)
            else:
                chunk = chunk_at(config, operands, where, round_)
            if cutlass.const_expr(config.scheduler.adds_up):
                head = chunk.last_head
                while head >= chunk.first_head:
                    tile = chunk.tile(head, Int32(0))
                    if tile.piece.some:
                        uses = body(role, tile, uses)
                    head -= chunk.step
            else:
                head, query_tile = chunk.begin.head, chunk.begin.query_tile
                while chunk.holds(head, query_tile):
                    tile = chunk.tile(head, query_tile)
                    uses = body(role, tile, uses)
                    head, query_tile = chunk.next(head, query_tile, tile)
    elif cutlass.const_expr(config.scheduler.from_queue):
        grid, tiles, order, partitions = where.grid, where.tiles, None, None
        if cutlass.const_expr(config.queues_partitions):
            partitions = partitions_of(config, operands, where, role.records.order)
            tiles = partitions.count
        elif cutlass.const_expr(config.scheduler.sorts):
            order = order_of(config, operands, role.records.order)
            grid, tiles = order.grid(config, grid, tiles, operands)
        number, _, _ = cute.arch.block_idx()
        while number < tiles:
            if cutlass.const_expr(config.queues_partitions):
                tile = partition_at(config, operands, where, partitions, number)
            else:
                tile = tile_at(config, operands, grid, where.window, number, where.section, order)
            uses = body(role, tile, uses)
            role.channels["tile_empty"].wait_previous(uses)  # until the CTA is nearly done with its tile
            number = take(operands.counters, tiles)
    elif cutlass.const_expr(config.scheduler.single):
        number, _, _ = cute.arch.block_idx()
        tile = tile_at(config, operands, where.grid, where.window, number, where.section)
        uses = body(role, tile, uses)
    else:
        for round_ in cutlass.range(rounds(where), unroll=1):
            tile = tile_at(config, operands, where.grid, where.window, index_of(round_), where.section)
            uses = body(role, tile, uses)
    return uses
