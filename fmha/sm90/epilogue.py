"""The epilogue of a consumer: its O from registers to global memory, and the row statistics."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.device.wgmma import flat, store_row
from warpspec.fmha.device.logits import unit
from warpspec.fmha.device.results import of_split, piece_statistics, sink_of, statistics
from warpspec.fmha.device.scales import value_factor
from warpspec.fmha.device.unseen import RowSum, recompute, tainted
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.sm90.add_up import (
    UNIT,
    UNITS,
    add_earlier,
    add_state,
    add_unit,
    adds_alone,
    announce,
    finish_share,
    leave_state,
    powers_of_means,
    share_of,
)
from warpspec.fmha.sm90.fragment import PAIR, QUAD, THREAD_ROWS, elements, row_columns
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS
from warpspec.fmha.sm90.softmax import over_quad
from warpspec.fmha.sm90.staging import (
    LOADS,
    TILE_WORDS,
    row_read,
    store_chunk,
    store_words,
)


class Results(Protocol):
    """Takes the finished rows of a thread."""

    def store(self, work, r: int, row, place, factor, empty, operands) -> None:
        """Store the consumer's columns of row r of the thread: O times ``factor``, zeros if ``empty``."""


@dataclass(frozen=True)
class RowResults(Results):
    """o, or a split's share of it."""

    def store(self, work, r: int, row, place, factor, empty, operands) -> None:
        store_scaled(work, flat(work.mma.o), r, columns(work, operands.o, place), place, factor, empty)


def store_scaled(work, o, r: int, target, place, factor, empty) -> None:
    """Store row r of the thread's columns in o (n) to ``target``: times ``factor``, zeros if ``empty``, which may
    be None."""
    for i in elements(o, r):
        o[i] = o[i] * factor
        if empty is not None:
            o[i] = Float32(cutlass.select_(empty, Float32(0.0), o[i]))
    output = work.config.output
    store = store_row if output.normalize or output.means else store_pairs
    store(o, r, work.rows[r].member, target, place.in_range)


ROW_RESULTS = RowResults()


@cute.jit
def epilogue(work, state, operands, stage, results: cutlass.Constexpr = ROW_RESULTS):
    """Write the rows of a thread: o = O / (row_sum + sink), lse; or un-normalised o, row_max, row_sum.

    work: ``ConsumerTile``; O is in ``work.mma.o``. state: from ``consumer.attend``. stage: the address of a tile in
    shared memory that the consumer may write to, or None. results: ``Results``, used without a stage. A row that sees
    no key writes zeros and -inf. For a piece of a tile, the rows' states go into the workspace. Rows' places are read
    again (``again``) where results are written: kept from where hidden values are looked for, they would spill.
    """
    if cutlass.const_expr(work.config.scheduler.adds_up):
        untaint_state(work, state, operands)
        alone = adds_alone(work)
        if work.tile.piece.whole & alone:
            state = add_earlier(work, state, operands, add_state)
            write_results(work.again(), state, operands, stage, results)
        else:
            leave_state(work, state, operands)
            if cutlass.const_expr(work.config.rereads):
                if Boolean(work.tile.piece.earlier == 0) | alone:
                    announce(work, operands)
                else:
                    write_share(work, operands)
            else:
                announce(work, operands)
    elif cutlass.const_expr(work.config.scheduler.cuts_tiles):
        if work.tile.piece.whole:
            write_results(work, state, operands, stage, results)
        else:
            write_piece(work, state, operands)
    else:
        write_results(work, state, operands, stage, results)


@cute.jit
def write_results(work, state, operands, stage, results: cutlass.Constexpr):
    """Like ``epilogue``, for a whole tile or a split."""
    rows = finish_rows(work, state, operands)
    if cutlass.const_expr(work.config.output.means and work.config.scales_means):
        rows = [
            (place, scale_mean(work, r, place, factor, operands), empty)
            for r, (place, factor, empty) in enumerate(rows)
        ]
    if cutlass.const_expr(stage is not None):
        _, factors, empties = zip(*rows, strict=True)
        store_tiles(work, factors, empties, operands, stage)
    else:
        for r, row in enumerate(rows):
            results.store(work, r, work.rows[r], *row, operands)


@cute.jit
def scale_mean(work, r: cutlass.Constexpr, place, factor, operands) -> Float32:
    """Multiply the factor of a split's row r by a power of two that brings its largest mean to the top of fp16's range.
    What the means then have to be multiplied by, for each consumer, stands behind the row sums of all splits."""
    up, down = powers_of_means(flat(work.mma.o), r, factor)
    splits = cute.size(operands.row_max, mode=[0])
    if place.in_range & Boolean(work.rows[r].member == 0):
        number = splits * (1 + work.column_group) + work.tile.split
        operands.row_sum[number, place.batch, place.head, place.query] = down
    return factor * up


@cute.jit
def write_share(work, operands):
    """Wait for the other pieces of a tile, and write the results of this one's share of the columns."""
    begin, step, thread = share_of(work, operands)
    write_units(replace(work, thread=thread).again(), operands, begin, step)
    finish_share(work.again(), operands)


@cute.jit
def write_units(work, operands, begin, step):
    """Write the results of units ``begin``, ``begin + step``, ... of the columns, added up over all pieces of a
    tile."""
    o = cute.make_rmem_tensor(UNIT, Float32)
    for number in cutlass.range(begin, UNITS, step, unroll=1):
        state = add_unit(work, operands, number, o)
        rows = finish_rows(work, state, operands, tells=Boolean(number == 0))
        for r, (place, factor, empty) in enumerate(rows):
            target = columns(work, operands.o, place)
            target = cute.local_tile(target, (work.config.o_columns // UNITS,), (number,))
            store_scaled(work, o, r, target, place, factor, empty)


def finish_rows(work, state, operands, tells=None) -> list:
    """Finish the rows of the thread: write their statistics, and sum O again where a hidden value reached it. Returns
    (the row's place, the factor of O, whether the row saw no key) for each; None for the latter if the factor says it.
    tells: whether to write them; None: yes.

    In a short call nothing hides the way from the last product to the stores: so v_scale and sinks are read at its
    start, those of all rows, and one branch lies on it.
    """
    config, scale = work.config, work.value_scale(operands)
    references, maxima, sums = state
    places = [work.tile.place(row.index, work.row_group) for row in work.rows]
    sinks = [sink_of(operands.sink, place.head) for place in places]
    totals = [over_quad(total, lambda a, b: a + b) for total in sums]
    if not config.scheduler.adds_up:  # then it was done for each piece
        untaint(work, places, references, totals, operands)
    score_unit, finished = unit(config.logits, work.numbers), []
    for r, place in enumerate(places):
        # One of the threads that share the row writes its statistics.
        teller = replace(work.rows[r], member=work.rows[r].member + work.column_group * QUAD)
        if tells is not None:
            teller = replace(teller, member=Int32(cutlass.select_(tells, Int32(teller.member), Int32(QUAD))))
        row_state, empty = (references[r], maxima[r], totals[r]), Boolean(totals[r] == Float32(0.0))
        factor = statistics(
            config, teller, place, work.tile, row_state, operands, score_unit, empty, sinks[r]
        )
        factor = value_factor(config, factor, scale)
        if config.shares_end and config.scheduler.adds_up:
            # O is finite (``untaint_state``), and a selection for each number is much code.
            factor, empty = Float32(cutlass.select_(empty, Float32(0.0), factor)), None
        finished.append((place, factor, empty))
    return finished


@cute.jit
def write_piece(work, state, operands):
    """Write the states of the rows of a thread to the piece's place in the workspace. One consumer has all columns."""
    config, tile, o = work.config, work.tile, flat(work.mma.o)
    scale, (references, maxima, sums) = work.value_scale(operands), state
    places = [tile.place(row.index, work.row_group) for row in work.rows]
    totals = [over_quad(total, lambda a, b: a + b) for total in sums]
    untaint(work, places, references, totals, operands)
    for r in cutlass.range_constexpr(len(work.rows)):
        row, empty = work.rows[r], Boolean(totals[r] == Float32(0.0))
        target = operands.pieces[
            tile.piece.state, work.row_group * WARPGROUP_ROWS + row.index, None
        ]  # (D + 8)
        row_state = (references[r], maxima[r], totals[r])
        factor = piece_statistics(config, row, target, row_state, unit(config.logits, work.numbers), empty)
        factor = value_factor(config, factor, scale)
        for i in elements(o, r):
            o[i] = o[i] * factor
        store_pairs(o, r, row.member, target, places[r].in_range)


def untaint_state(work, state: tuple, operands) -> None:
    """``untaint`` for the state of a tile or of a piece. Rows that see no key of the piece are no exception: their O is
    added times 0, so that it has to be finite."""
    references, _, sums = state
    places = [work.tile.place(row.index, work.row_group) for row in work.rows]
    totals = [over_quad(total, lambda a, b: a + b) for total in sums]
    totals = [Float32(cutlass.select_(total == Float32(0.0), Float32(1.0), total)) for total in totals]
    untaint(work, places, references, totals, operands)


@cute.jit
def untaint(
    work, places: cutlass.Constexpr, references: cutlass.Constexpr, totals: cutlass.Constexpr, operands
):
    """Sum rows of the thread again if a hidden value reached one (``device.unseen``)."""
    config, o = work.config, flat(work.mma.o)
    if cutlass.const_expr(config.mask.uneven or config.logits.bias is not None):
        own = [row_columns(config, o, r, row, work.column_group) for r, row in enumerate(work.rows)]
        reached = [place.in_range & tainted(o, own[r], totals[r]) for r, place in enumerate(places)]
        if reduce(operator.or_, reached):
            for r in cutlass.range_constexpr(len(reached)):
                if reached[r]:
                    recompute(
                        RowSum(config, work.rows[r], places[r], operands, references[r], work.numbers),
                        o,
                        own[r],
                    )


def columns(work, o: cute.Tensor, place) -> cute.Tensor:
    """(n): the consumer's columns of a row of o."""
    row = of_split(work.config, o, work.tile, place)
    if not work.config.heads.whole:
        return row
    return cute.local_tile(row, (work.config.o_columns,), (work.column_group,))


@cute.jit
def store_tiles(work, factors: cutlass.Constexpr, empties: cutlass.Constexpr, operands, stage):
    """Store O times its rows' factors in 16 bits, 64 columns at a time through shared memory, so that a row's columns
    are written contiguously. It takes fewer instructions than ``store_row``, which matters if nothing overlaps the
    epilogue."""
    config, o, dtype = work.config, flat(work.mma.o), operands.o.element_type
    targets, inside = [], []
    for load in cutlass.range_constexpr(LOADS):
        place = work.tile.place(row_read(work.thread, load), work.row_group)
        targets.append(columns(work, operands.o, place))
        inside.append(place.in_range)
    for block in cutlass.range_constexpr(config.o_columns // BLOCK):
        words = []
        for word in cutlass.range_constexpr(TILE_WORDS):
            r = word % THREAD_ROWS
            pair = cute.make_rmem_tensor(PAIR, dtype)
            for i in cutlass.range_constexpr(PAIR):
                pair[i] = (o[(block * TILE_WORDS + word) * PAIR + i] * factors[r]).to(dtype)
            packed = cute.recast_tensor(pair, Int32)[0]
            words.append(Int32(cutlass.select_(empties[r], Int32(0), packed)))
        store_words(stage, work.rows[0], words)
        cute.arch.sync_warp()
        for load in cutlass.range_constexpr(LOADS):
            store_chunk(stage, work.thread, load, targets[load], block, inside[load])
        cute.arch.sync_warp()  # before the next columns, or the next tile's P, are written


@cute.jit
def store_pairs(o: cute.Tensor, r: cutlass.Constexpr, lane, target: cute.Tensor, in_range):
    """Store row r (D) in fp32: each thread stores its pairs of columns, 32 bytes per quad. lane: number in the quad."""
    own = elements(o, r)
    if in_range:
        for block in cutlass.range_constexpr(len(own) // PAIR):
            pair = cute.make_rmem_tensor(PAIR, Float32)
            for place_ in cutlass.range_constexpr(PAIR):
                pair[place_] = o[own[block * PAIR + place_]]
            place = cute.local_tile(target, (PAIR,), (block * QUAD + lane,))
            cute.autovec_copy(pair, place)
