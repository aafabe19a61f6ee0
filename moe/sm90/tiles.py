"""The order of a CTA's tiles: entries of work, each some rows of one expert, times row tiles of its weights."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.common.operands import BFLOAT16, FLOAT32, INT32, UINT8, Number, Operand
from warpspec.moe.permute import WORK_COLUMNS, head_rows

EXPERT, FIRST, COUNT = 0, 1, 2  # columns of an entry


class StreamOperands(NamedTuple):
    """Tensors of a launch.

    tokens: [T or R, padded K] bf16 in the kernel's order. source: int32 [R] or None; row r is token source[r] //
    choices. row_scale: fp32 [T], of tokens, or None. data: uint8 [E, row tile, bytes]. global_scale: [E, 1 or 2]. bias:
    [E, rows] or None. Either work: int32 [heads + entries, 4], ends of classes, then (expert, first row, rows); or ids:
    int32 [T, k], if the configuration has a ``Routing``. out: [R, columns]. chunks: chunks along K. limit: the clamp of
    gate and up.
    """

    tokens: Annotated[Any, Operand(BFLOAT16, 2, None, TMA_ALIGNMENT)]
    source: Annotated[Any, Operand(INT32, 1, when=lambda c: c.gathers and not c.routing)]
    row_scale: Annotated[Any, Operand(FLOAT32, 1, when="keeps_fp32")]
    data: Annotated[Any, Operand(UINT8, 3, None, TMA_ALIGNMENT)]
    global_scale: Annotated[Any, Operand(FLOAT32, 2, lambda c: 2 if c.gated else 1)]
    bias: Annotated[Any, Operand(FLOAT32, 2, when="has_bias")]
    work: Annotated[Any, Operand(INT32, 2, WORK_COLUMNS, when=lambda c: not c.routing)]
    ids: Annotated[Any, Operand(INT32, 2, when="routing")]
    out: Annotated[Any, Operand(lambda c: FLOAT32 if c.keeps_fp32 else BFLOAT16, 2, None, TMA_ALIGNMENT)]
    chunks: Annotated[Any, Number(INT32)]
    limit: Annotated[Any, Number(FLOAT32)]


class StreamGrid(NamedTuple):
    """Arguments of the launch. ctas: number of CTAs of the grid; they are persistent."""

    ctas: Annotated[Any, Number(INT32)]


class StreamTile(NamedTuple):
    """A tile: rows ``first`` to ``first + count`` of an expert, times row tiles of 64 features from ``row_tile`` on."""

    expert: Int32
    first: Int32
    count: Int32
    row_tile: Int32


def tile_count(config, ops, number: int = -1) -> Int32:
    """Number of tiles up to the end of class ``number``; by default the tiles of all classes."""
    if config.routing:
        return Int32(ops.ids.shape[0]) * config.routing.taken * groups(config, ops)
    number %= len(config.widths)
    return Int32(ops.work[number // WORK_COLUMNS, number % WORK_COLUMNS]) * groups(config, ops)


def stage_count(config, ops) -> Int32:
    """Stages of a tile."""
    return Int32(cute.ceil_div(ops.chunks, config.stage_chunks))


def groups(config, ops) -> Int32:
    """Number of tiles that an entry has."""
    return Int32(cute.ceil_div(ops.data.shape[1], config.shape.row_groups))


def tile_at(config, ops, index) -> StreamTile:
    """The index-th tile; the tiles of an entry are adjacent."""
    of_entry = groups(config, ops)
    if config.routing:
        row = index // of_entry
        expert, count = choice_at(config.routing, ops.ids, row)
        return StreamTile(expert, row, count, (index % of_entry) * config.shape.row_groups)
    entry = index // of_entry + head_rows(config.widths)
    return StreamTile(
        Int32(ops.work[entry, EXPERT]),
        Int32(ops.work[entry, FIRST]),
        Int32(ops.work[entry, COUNT]),
        (index % of_entry) * config.shape.row_groups,
    )


@cute.jit
def choice_at(routing: cutlass.Constexpr, ids, row) -> tuple:
    """(expert, 1) of a row of ``Routing``; (any expert, 0) if its id names none."""
    which = row % routing.taken
    expert, count = routing.experts + which - routing.choices, Int32(1)
    if which < routing.choices:
        expert = Int32(ids[row // routing.taken, which])
        if (expert < 0) | (expert >= routing.experts):
            expert, count = Int32(0), Int32(0)
    return expert, count


def has_rows(ops, tile: StreamTile, group) -> Boolean:
    """Whether the weights have a row tile for this consumer; the last tile of an expert may have fewer."""
    return Boolean(tile.row_tile + group < ops.data.shape[1])
