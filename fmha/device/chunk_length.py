"""The length of the chunks that a line is cut into (``device.line``)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.fmha.line import LEAST_TILES

WHOLE_SHARE = 8  # chunks may be longer by 1 / this of their length if that leaves equal tiles whole
EVEN_TILES, PAIR_SHARE = 3, 16  # if pieces are added up: by so many KV tiles, or by 1 / this of it
UNCUT_TILES = 6  # or by so many, if chunks are whole tiles, of which nothing is added up
BOUND_SHARE = 7  # or by 1 / this, if memory is the bound, which a few SMs less keep as busy


def chunk_length(config, line, total, chunks, tile) -> Int64:
    """Length of every chunk but the last ones, which may be shorter or have nothing: the quotient, or a little more.

    line: ``line.Line``. chunks: their number. tile: the length that all tiles have, or 0. If a tile is a little longer
    than the quotient, a chunk is one tile, and none is cut. Where pieces are added up, a chunk may also be several
    whole tiles, or each tile several equal chunks: then no CTA has pieces of two.
    """
    most = Int64(Float32(total) * (cute.arch.rcp_approx(Float32(chunks)) * Float32(1.0 + 2.0**-20))) + 1
    room = most // WHOLE_SHARE
    if config.scheduler.adds_up:
        even, room, tiles = even_length(most, tile), most // PAIR_SHARE, Int64(EVEN_TILES)
        if config.line_source is None:
            # One tile of heads reads a request's keys.
            room = Int64(cutlass.select_(Boolean(line.heads == 1), most // BOUND_SHARE, room))
            tiles = Int64(cutlass.select_(Boolean(even >= tile), Int64(UNCUT_TILES), tiles))
        tile, room = even, cutlass.max(tiles * Int64(config.tile_n * config.mask.key_stride), room)
    whole = Boolean(tile >= most) & Boolean(tile <= most + room)
    most = Int64(cutlass.select_(whole, tile, most))
    return cutlass.max(most, Int64(LEAST_TILES * config.tile_n * config.mask.key_stride))


@cute.jit
def even_length(most, tile) -> Int64:
    """The least length from ``most`` on that divides a tile evenly or is several whole ones. tile: its length; if it is
    0, so is this."""
    found = Int64(0)
    if tile > 0:  # a division of 64 bits takes long, with requests of all lengths for nothing
        chunks = cutlass.max(Int32(Float32(tile) * cute.arch.rcp_approx(Float32(most))), 1)
        equal = Int64(Float32(tile) * (cute.arch.rcp_approx(Float32(chunks)) * Float32(1.0 + 2.0**-20))) + 1
        several = (most + tile - 1) // tile * tile
        found = Int64(cutlass.select_(Boolean(chunks > 1), equal, several))
    return found
