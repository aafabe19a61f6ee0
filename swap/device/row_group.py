"""A group of rows: which thread has what, and sums over a row's threads.

Two warps have a row; a thread has VECTOR adjacent columns of it at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.swap.config import ROW_THREADS, ROW_WARPS, VECTOR, WARPS


class Scratch(NamedTuple):
    """Shared memory of the phase.

    terms: bf16 (COLUMN, ROW), GROUP_ROWS rows of high terms and as many of low ones. z: fp32 (OUTPUT, ROW). Both are
    None without a router. sums: fp32, two buffers with a number for each warp.
    """

    terms: cute.Tensor | None
    z: cute.Tensor | None
    sums: cute.Tensor


class RowThread(NamedTuple):
    """A thread's place. row: number among all rows, clamped. in_range: whether the row exists. row_of_group: number of
    the row in the group. member: number of the thread among the row's ROW_THREADS."""

    row: Int32
    in_range: Boolean
    row_of_group: Int32
    member: Int32


def warp_sum(value) -> Float32:
    """Sum over a warp, with the same bits in all lanes."""
    for offset in (16, 8, 4, 2, 1):
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
    return value


def columns_of(config) -> int:
    """Columns of a row that a thread has."""
    return config.d_model // ROW_THREADS


def vector_of(row: cute.Tensor, i, member) -> cute.Tensor:
    """(VECTOR): a thread's i-th vector of a row (D)."""
    return cute.local_tile(row, (VECTOR,), (i * ROW_THREADS + member,))


def squares(values: cute.Tensor) -> Float32:
    total = Float32(0.0)
    for i in range(cute.size(values)):
        total = total + values[i] * values[i]
    return total


@cute.jit
def put_squares(values: cute.Tensor, scratch, at, buffer: cutlass.Constexpr):
    """Write the warp's sum of squares of its part of a row to one of two buffers; ``row_sum`` reads it after a
    barrier."""
    value = warp_sum(squares(values))
    if cute.arch.lane_idx() == 0:
        scratch.sums[buffer * WARPS + at.row_of_group * ROW_WARPS + at.member // WARP_THREADS] = value


def row_sum(scratch, at, buffer: int) -> Float32:
    """Sum over a row's warps, with the same bits in all threads."""
    total = Float32(0.0)
    for warp in range(ROW_WARPS):
        total = total + scratch.sums[buffer * WARPS + at.row_of_group * ROW_WARPS + warp]
    return total


def inverse_rms(config, total) -> Float32:
    """1 / sqrt(mean of squares + eps)."""
    return cute.math.rsqrt(total * (1.0 / config.d_model) + config.eps)
