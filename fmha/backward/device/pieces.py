"""Which steps of a key tile a piece of it has (``tile`` says how tiles are cut)."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32

from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.schedule import split_range


def aligned_piece(piece, most, after, steps) -> tuple:
    """(first step of a key tile, steps) of a piece with heads inside.

    Counted from the request's last query tile on, the tile has ``steps`` steps after ``after`` others, and the pieces
    of all key tiles begin at multiples of ``most``. piece: its number among those.
    """
    first = cutlass.min(cutlass.max(piece * most - after, 0), steps)
    end = cutlass.min(cutlass.max((piece + 1) * most - after, 0), steps)
    return first, end - first


def steps_of_piece(config: BackwardKernel, cut, steps: Int32, queries, some: Boolean) -> tuple:
    """(first step, number of steps) of a piece of a key tile. cut: as in ``tile.key_tile``. steps: of the whole tile.
    queries: (query tiles of the request, the first one that sees a key, how many do, heads). some: whether any does."""
    piece, pieces, most = cut
    tiles_q, begin, count, group = queries
    zero = Int32(0)
    if cutlass.const_expr(not config.heads_inside):
        first_step, steps = split_range(piece, cutlass.max(pieces, 1), steps)
    else:
        after = Int32(cutlass.select_(some, (tiles_q - begin - count) * group, zero))
        if cutlass.const_expr(config.cuts_by_length):
            piece += after // most
        else:
            most = cutlass.max((tiles_q * group + pieces - 1) // pieces, 1)
        first_step, steps = aligned_piece(piece, most, after, steps)
    return first_step, Int32(cutlass.select_(Boolean(pieces > 0), steps, zero))
