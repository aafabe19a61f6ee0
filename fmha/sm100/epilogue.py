"""The epilogue, on the softmax warps: O from tensor memory to global memory, and the row statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from warpspec.common.device import tmem
from warpspec.fmha.device.logits import unit
from warpspec.fmha.device.results import of_split, piece_statistics, sink_of, statistics
from warpspec.fmha.device.scales import value_factor, value_scale
from warpspec.fmha.device.unseen import RowColumns, RowSum, recompute, tainted
from warpspec.fmha.heads import BLOCK


class Results(Protocol):
    """Destination of a row's columns. block: columns per call of ``store``."""

    block: ClassVar[int]

    def store(self, config, operands, tile, row, place, values, number, count) -> None:
        """Store block ``number`` of a row's final columns. values: (block) fp32. count: how many of them belong to the
        row."""


@dataclass(frozen=True)
class RowResults(Results):
    """o, what a split has of it, or a piece's state in the workspace."""

    block: ClassVar[int] = BLOCK

    @cute.jit
    def store(
        self,
        config: cutlass.Constexpr,
        operands,
        tile,
        row,
        place,
        values,
        number,
        count: cutlass.Constexpr,
    ):
        if cutlass.const_expr(config.scheduler.cuts_tiles):
            if tile.piece.whole:
                store(values, of_split(config, operands.o, tile, place), number, count)
            else:
                store(values, operands.pieces[tile.piece.state, row.index, None], number, count)
        else:
            store(values, of_split(config, operands.o, tile, place), number, count)


ROW_RESULTS = RowResults()


@cute.jit
def epilogue(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    row,
    place,
    tile,
    state,
    columns,
    operands,
    numbers,
    results: cutlass.Constexpr = ROW_RESULTS,
):
    """Write one row: o = O / (row_sum + sink), lse; or un-normalised o, row_max, row_sum. For a piece of a tile, write
    the row's state into the workspace.

    state: (reference, maximum, row_sum) from the softmax loop. columns: ``softmax_warps.Columns``. operands: global
    tensors. results: ``Results``. Consumes the last pv_done. A row that sees no key writes zeros and -inf whatever O
    holds.
    """
    reference, _, row_sum = state
    factor, empty = finish_row(config, channels, row, place, tile, state, operands, numbers, columns.use)
    for start, size in config.o_segments(results.block):
        values = cute.make_rmem_tensor(size, Float32)  # (D block)
        if cutlass.const_expr(config.scheduler.cuts_tiles):
            values.fill(0.0)  # or they would be kept from tile to tile, for one without keys
        if tile.span.count > 0:
            tmem.load_row(columns.o + start, values, columns.thread, config.load_columns)
            tmem.wait_loads()
        block = row.member * (config.o_columns // size) + start // size
        count = size if config.heads.whole else min(size, config.heads.v - start)
        if cutlass.const_expr(config.mask.uneven or config.logits.bias is not None):
            number = block if count == size else block * (size // count)
            own = RowColumns((range(count),), (number,), whole_row)
            if place.in_range & tainted(values, own, row_sum):
                recompute(RowSum(config, row, place, operands, reference, numbers), values, own)
        columns.finish(config, row, start, values)
        if place.in_range:
            scale_or_zero(values, factor, empty)
            results.store(config, operands, tile, row, place, values, block, count)


@cute.jit
def factor_of(config: cutlass.Constexpr, row, place, tile, state, operands, score_unit, empty) -> Float32:
    """Write the row's statistics beside its columns; returns the factor of O."""
    factor = Float32(1.0)
    arguments = config, row, place, tile, state, operands, score_unit, empty
    if cutlass.const_expr(config.scheduler.cuts_tiles):
        if tile.piece.whole:
            factor = statistics(*arguments, sink_of(operands.sink, place.head))
        else:
            target = operands.pieces[tile.piece.state, row.index, None]  # (D + 8)
            factor = piece_statistics(config, row, target, state, score_unit, empty)
    else:
        factor = statistics(*arguments, sink_of(operands.sink, place.head))
    return value_factor(config, factor, value_scale(config, operands, tile))


def store(values: cute.Tensor, row: cute.Tensor, block, count: int) -> None:
    """values (D block) to a row (D) in global memory, in its type. block: in units of their number; count: those that
    belong to the row, half of them or all."""
    size = cute.size(values)
    target = cute.local_tile(row, (count,), (block if count == size else block * (size // count),))
    converted = cute.make_rmem_tensor(size, row.element_type)  # (D block)
    converted.store(values.load().to(row.element_type))
    if count < size:
        converted = cute.local_tile(converted, (count,), (0,))
    cute.autovec_copy(converted, target)


@cute.jit
def finish_row(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    row,
    place,
    tile,
    state,
    operands,
    numbers,
    use=0,
):
    """Wait until O is complete and write the row's statistics; returns (factor of O, whether no key was seen). use: KV
    tiles that the CTA has finished before."""
    if tile.span.count > 0:
        channels["pv_done"].wait(use + tile.span.count - 1)
        tmem.fence_after_wait()
    empty = Boolean(state[2] == Float32(0.0))
    return factor_of(config, row, place, tile, state, operands, unit(config.logits, numbers), empty), empty


def whole_row(row: cute.Tensor) -> cute.Tensor:
    """The columns of a row (D) in which the thread's blocks of O are counted."""
    return row


def scale_or_zero(values: cute.Tensor, factor, empty) -> None:
    """Multiply values (n) by ``factor``; set them to zero if ``empty``, whatever they were."""
    for i in range(cute.size(values)):
        values[i] = Float32(cutlass.select_(empty, Float32(0.0), values[i] * factor))
