"""Chunks of the line (``device.line``) that one launch finds and many launches read: those of a step's layers.

Each CTA has words for its chunks in global memory: the first and the last head of the line with a piece in the chunk,
and the pieces of these two heads' tiles, one query tile a head. Tiles between them are whole. A piece's words hold what
CTAs that add up pieces must agree on: where the piece begins, which pieces there are, and whether this is the last.

So the results are right whatever lengths a reader finds. A last piece goes to the tile's end, a piece of a tile that
has become shorter may have no keys, and still leaves its state. Chunks are equally long for the lengths that they were
made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.hardware import VECTOR_BYTES, WORD_BYTES
from warpspec.fmha.device.ahead import prefetch_line, prefetch_pages
from warpspec.fmha.device.chunk import chunk_at
from warpspec.fmha.device.line import Chunks, Line, head_step, place_of, query_tile_at, state_of
from warpspec.fmha.device.tile import Piece, select_integer
from warpspec.fmha.line import KEPT_WORDS

VECTOR = VECTOR_BYTES // WORD_BYTES
# Vectors of words: the chunk's heads, the piece of the first head's tile, that of the last head's.
HEADS, FIRST, LAST = range(3)
WHOLE, SOME = 1, 2  # bits of a piece's marks
LATER = 1 << 16  # unit of the later pieces, above the earlier ones


class Shaped(NamedTuple):
    """A tensor of which only the shape is asked for."""

    shape: tuple


class KeptPiece(NamedTuple):
    """The words of a piece. first, count: its KV tiles. marks: WHOLE, if it is its tile's last piece, and SOME
    (``Piece.some``). others: earlier pieces of the tile, and LATER times the later ones."""

    first: Int32
    count: Int32
    marks: Int32
    others: Int32

    @classmethod
    def of(cls, piece: Piece) -> KeptPiece:
        marks = WHOLE * Int32(piece.whole) + SOME * Int32(piece.some)
        return cls(piece.first, piece.count, marks, Int32(piece.earlier) + LATER * Int32(piece.later))


@cute.jit
def write_cuts(config: cutlass.Constexpr, operands, chunks, cuts: cute.Tensor):
    """Write the words of this CTA's chunks. By a warp; reads the words of ``place_chunks``."""
    cta, _, _ = cute.arch.block_idx()
    line = chunks.line
    for round_ in cutlass.range(line.rounds, unroll=1):
        chunk = chunk_at(config, operands, chunks, round_)
        pieces = []
        for head in (chunk.first_head, chunk.last_head):  # of a chunk without tiles, nobody reads the pieces
            head = cutlass.max(cutlass.min(head, line.requests * line.heads - 1), 0)
            pieces.append(KeptPiece.of(chunk.tile(head, Int32(0)).piece))
        if cute.arch.lane_idx() == 0:
            words = cuts[cta, round_, None]
            for number, values in enumerate(((chunk.first_head, chunk.last_head, 0, 0), *pieces)):
                vector = cute.make_rmem_tensor(VECTOR, Int32)
                for i, value in enumerate(values):
                    vector[i] = Int32(value)
                cute.autovec_copy(vector, cute.local_tile(words, (VECTOR,), (number,)))


@dataclass(frozen=True)
class KeptChunk:
    """A chunk whose words have been found, used as ``chunk.Chunk`` is where pieces are added up. words: (WORD). pieces:
    those of the first and the last head's tiles, if they are in registers; None if words are read from shared memory
    for each tile, because consumers find their tiles themselves and have no room for more."""

    config: object
    operands: object
    line: Line
    words: cute.Tensor
    first_head: Int32
    last_head: Int32
    pieces: tuple | None

    @property
    def step(self):
        """From a head of the line to the next one of the chunk."""
        return head_step(self.config, self.line)

    def tile(self, head, query_tile):
        """The tile of a head, its piece in the chunk."""
        tile = query_tile_at(self.config, self.operands, self.line, query_tile, head)
        count, at_last = tile.span.count, Boolean(head == self.last_head)
        is_cut = at_last | Boolean(head == self.first_head)
        if self.pieces is None:
            found = read_vector(self.words, select_integer(at_last, LAST, FIRST))
        else:
            found = [select_integer(at_last, last, first) for first, last in zip(*self.pieces, strict=True)]
        uncut = KeptPiece(0, 0, WHOLE + SOME, 0)
        kept = KeptPiece(*(select_integer(is_cut, *each) for each in zip(found, uncut, strict=True)))
        whole = Boolean(kept.marks % SOME == WHOLE)
        first = cutlass.min(kept.first, count)
        last = select_integer(whole, count, cutlass.min(kept.first + kept.count, count))
        state = state_of(place_of(self.config, self.line).number, Boolean(kept.first == 0))
        others = kept.others % LATER, kept.others // LATER
        return tile.cut(Piece(first, last - first, whole, state, *others, kept=Boolean(kept.marks >= SOME)))


def kept_chunk(config, operands, chunks: Chunks, round_) -> KeptChunk:
    """Read this CTA's chunk of a round. A scheduler warp reads the operand, once the launch before has ended, and also
    prefetches the numbers of the pages that the CTA reads first; other warps read what ``copy_cuts`` has copied."""
    if config.scheduler.copies_cuts:
        first_head, last_head, *_ = read_vector(chunks.cursors, HEADS)
        return KeptChunk(config, operands, chunks.line, chunks.cursors, first_head, last_head, None)
    cta, _, _ = cute.arch.block_idx()
    line, words = chunks.line, operands.cuts[cta, round_, None]
    (first_head, last_head, *_), *pieces = (read_vector(words, number) for number in (HEADS, FIRST, LAST))
    request = cutlass.max(cutlass.min(last_head // line.heads, line.requests - 1), 0)
    prefetch_pages(config, operands, request)
    return KeptChunk(config, operands, line, words, first_head, last_head, tuple(pieces))


@cute.jit
def copy_cuts(operands, chunks):
    """Copy the words of this CTA's only chunk to shared memory. By the whole CTA, once the launch before has ended; a
    barrier has to follow."""
    cta, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    if thread < KEPT_WORDS:
        chunks.cursors[thread] = operands.cuts[cta, 0, thread]


def read_vector(words: cute.Tensor, number) -> list:
    """The words of a vector."""
    vector = cute.make_rmem_tensor(VECTOR, Int32)
    cute.autovec_copy(cute.local_tile(words, (VECTOR,), (number,)), vector)
    return [vector[i] for i in range(VECTOR)]


def prefetch_cuts(operands) -> None:
    """Prefetch the words of this CTA's first chunk."""
    cta, _, _ = cute.arch.block_idx()
    prefetch_line(operands.cuts[cta, 0, None].iterator.toint())
