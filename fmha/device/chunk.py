"""A CTA's work in one round of the line (``device.line``): which tiles, or pieces of tiles, lie in its chunk."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.config import CUT_WORDS
from warpspec.fmha.device.line import (
    SIDES,
    Chunks,
    Cursor,
    Cut,
    Line,
    cursor_at,
    head_step,
    place_of,
    query_tile_at,
    state_of,
    tiles_before,
)
from warpspec.fmha.device.tile import Piece, select_integer


@dataclass(frozen=True)
class Chunk:
    """A CTA's work in one round, from begin to end. last_cut: the cut at the begin of the CTA's last chunk."""

    config: object
    operands: object
    line: Line
    begin: Cursor
    end: Cursor
    last_cut: Cut

    def holds(self, head, query_tile) -> Boolean:
        """Whether a tile, no earlier than the chunk's begin, has a piece in the chunk."""
        last = self.end.query_tile + Int32(self.end.fraction > Float32(0.0))
        return Boolean(head < self.end.head) | (Boolean(head == self.end.head) & Boolean(query_tile < last))

    def tile(self, head, query_tile):
        """The ``Tile`` for a query tile's piece in the chunk."""
        tile = query_tile_at(self.config, self.operands, self.line, query_tile, head)
        count = tile.span.count

        def other_than(cursor):
            return Boolean(head != cursor.head) | Boolean(query_tile != cursor.query_tile)

        begins = other_than(self.begin) | Boolean(self.begin.fraction == Float32(0.0))
        ends = other_than(self.end)
        first = select_integer(begins, 0, tiles_before(self.config, self.begin.fraction, count))
        last = select_integer(ends, count, tiles_before(self.config, self.end.fraction, count))
        own = place_of(self.config, self.line)
        whole = Boolean(last == count) & (begins | Boolean(count > 0))
        if self.config.scheduler.adds_up:
            others = other_pieces(self.config, self.last_cut, own, first, count)
            state = state_of(own.number, Boolean(first == 0))
            return tile.cut(Piece(first, last - first, whole, state, *others))
        whole = Boolean(first == 0) & whole
        return tile.cut(Piece(first, last - first, whole, state_of(own.number, begins)))

    def next(self, head, query_tile, tile) -> tuple:
        """(head, query tile) after ``tile``, which is at (head, query_tile)."""
        last = Boolean((query_tile + 1) * self.config.rows.queries >= tile.seq_q)
        return head + Int32(last) * self.step, select_integer(last, 0, query_tile + 1)

    @property
    def step(self):
        """From a head of the line to the next one of the chunk."""
        return head_step(self.config, self.line)

    @property
    def first_head(self) -> Int32:
        return self.begin.head

    @property
    def last_head(self) -> Int32:
        """The last head of the line with a piece in the chunk, if each has one query tile."""
        return self.end.head - select_integer(self.end.fraction > Float32(0.0), 0, self.step)


@cute.jit
def other_pieces(config: cutlass.Constexpr, cut, own, first, count) -> tuple:
    """How many pieces of a tile come before the one that begins with KV tile ``first`` of ``count``, and how many after
    it; both 0 for a first piece. By a whole warp, whose lanes look at a cut each. Only the begin of a CTA's last chunk
    cuts a tile. cut: that ``Cut``. own: the CTA's ``Place``."""
    earlier, later, lane = Int32(0), Int32(0), Int64(cute.arch.lane_idx())
    more = Boolean(first > 0)
    while more:
        place = Int64(cut.offset) - Int64(cut.step) * (lane + earlier)
        inside = Boolean(place > 0) & Boolean(own.chunk > earlier + Int32(lane))  # chunk 0 begins with a tile
        fraction = cut.fraction(cutlass.max(place, Int64(0)))
        cuts = cute.arch.popc(
            cute.arch.vote_ballot_sync(inside & Boolean(tiles_before(config, fraction, count) > 0))
        )
        earlier += cuts
        more = Boolean(cuts == WARP_THREADS)
    more = Boolean(first > 0)
    while more:
        place = Int64(cut.offset) + Int64(cut.step) * (lane + later + 1)
        inside = Boolean(place < Int64(cut.length))
        fraction = cut.fraction(cutlass.min(place, Int64(cut.length)))
        cuts = cute.arch.popc(
            cute.arch.vote_ballot_sync(inside & Boolean(tiles_before(config, fraction, count) < count))
        )
        later += cuts
        more = Boolean(cuts == WARP_THREADS)
    return earlier, later


def chunk_at(config, operands, chunks: Chunks, round_) -> Chunk:
    """The CTA's chunk of a round."""
    ends = (cursor_at(chunks.cursors, side, round_) for side in range(SIDES))
    return Chunk(config, operands, chunks.line, *ends, Cut(*(chunks.cut[i] for i in range(CUT_WORDS))))
