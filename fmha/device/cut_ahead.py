"""Cuts a line (``device.line``) while the launch before still runs, by lengths that the latter may still write.

The scheduler warp copies the lengths to shared memory, finds its chunk by the copy, and writes the record of its first
tile, which nobody reads yet. When the launch before has ended, it reads the lengths again. Mostly they are what they
were, as lengths change once a step and not with each layer: then the record is announced at once. Otherwise the warp
starts again. So what is read too early only costs time: the copy alone decides, and it is right in the end.

Where a producer warp writes the records (``TileScheduler.by_producer``), it cuts the line, too, and writes the first
record behind all that. Where roles find their tiles themselves, the load warp cuts the line, and all wait for it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.device.ahead import prefetch_small, prefetch_table
from warpspec.fmha.device.chunk import chunk_at
from warpspec.fmha.device.line import place_ends
from warpspec.fmha.device.record import Scheduler, fill_record, write_busy_tile

BATCH = 8  # lengths that a lane loads at a time


@cute.jit
def cut_ahead(config: cutlass.Constexpr, channels: cutlass.Constexpr, operands, chunks, records):
    """Write the ends of the CTA's chunks and announce the first tile's record, unless a producer writes it later or
    there are no records. By the warp that schedules, from the start of the kernel; it waits for the end of the launch
    before.

    Produces: tile_full.
    """
    role = Scheduler(config, channels, records)
    known = known_operands(config, operands, chunks)
    # Made anew: what follows from it is not kept for the tiles behind, when registers are few.
    chunks = chunks._replace(line=chunks.line._replace(heads=anew(chunks.line.heads)))
    lengths = operands.kv_lengths if config.line_source is None else config.line_source.lengths(operands)
    copy_lengths(lengths, chunks)
    if cutlass.const_expr(config.line_source is None):
        prefetch_small(operands)
        if cutlass.const_expr(operands.page_table is not None):
            prefetch_table(operands.page_table)
    again, count = Boolean(True), Int32(0)
    while again:
        place_ends(config, known, chunks, Int32(0), 1)
        cute.arch.sync_warp()
        if cutlass.const_expr(config.scheduler.fills_first):
            count = fill_first(role, known, chunks)
        cute.arch.griddepcontrol_wait()  # at once, if it has been waited for
        again = copy_lengths(lengths, chunks)
    if cutlass.const_expr(config.scheduler.fills_first):
        if cute.arch.lane_idx() == 0:
            chunks.found[0] = count
        cute.arch.sync_warp()
        if count > 0:
            channels["tile_full"].arrive_warp(0)


@cute.jit
def fill_first(role, known, chunks) -> Int32:
    """Write the first tile's record; returns the number of records, 0 or 1."""
    chunk, count = chunk_at(role.config, known, chunks, 0), Int32(0)
    if chunk.last_head >= chunk.first_head:
        tile = chunk.tile(chunk.last_head, Int32(0))
        if tile.piece.some:
            fill_record(role, tile, 0)
            count = Int32(1)
    return count


def known_operands(config, operands, chunks):
    """The operands, with the copy of the lengths in place of these."""
    if config.line_source is None:
        return operands._replace(kv_lengths=chunks.lengths)
    return config.line_source.with_lengths(operands, chunks.lengths)


def anew(number) -> Int32:
    """The number, of which the compiler does not know that it is the same."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(number)]
    )


@cute.jit
def copy_lengths(lengths: cute.Tensor, chunks) -> Boolean:
    """Copy the lengths from memory, where they may change at any time; returns whether the copy has changed. By a whole
    warp, which may have read the copy and then may read it again."""
    count, changed = Int32(cute.size(lengths)), Boolean(False)
    cute.arch.sync_warp()
    for first in cutlass.range(cute.arch.lane_idx(), count, WARP_THREADS * BATCH, unroll=1):
        loaded = cute.make_rmem_tensor(BATCH, Int32)
        for i in cutlass.range_constexpr(BATCH):
            request = cutlass.min(first + i * WARP_THREADS, count - 1)
            # Not through L1, which may have what the launch before has overwritten since.
            address = lengths.iterator + request
            loaded[i] = cute.arch.load(address, Int32, sem="relaxed", scope="gpu")
        for i in cutlass.range_constexpr(BATCH):
            request = first + i * WARP_THREADS
            if request < count:
                changed = changed | Boolean(chunks.lengths[request] != loaded[i])
                chunks.lengths[request] = loaded[i]
    cute.arch.sync_warp()
    return cute.arch.vote_any_sync(changed)


@cute.jit
def each_further(config: cutlass.Constexpr, operands, chunks, role) -> Int32:
    """Write a record for each of the CTA's tiles but the one that ``cut_ahead`` looked at. Returns the number of all
    records."""
    use = chunks.found[0]
    known = known_operands(config, operands, chunks)
    for round_ in cutlass.range(chunks.line.rounds, unroll=1):
        chunk = chunk_at(config, known, chunks, round_)
        head = chunk.last_head
        if round_ == 0:
            head -= chunk.step
        while head >= chunk.first_head:
            tile = chunk.tile(head, Int32(0))
            if tile.piece.some:
                use = write_busy_tile(role, tile, use)
            head -= chunk.step
    return use
