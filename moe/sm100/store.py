"""Write outputs through shared memory to global memory, each warp by itself.

A warp stages a segment of each of its tokens and then writes it along rows in vectors of 16 bytes (of 8 if the segment
is no longer); adjacent lanes write adjacent vectors. A tile may end between rows of different experts that share a
cache line, so stores are predicated by token; a TMA store would write all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint8, Uint32

from warpspec.common.hardware import WARP_THREADS, WORD_BYTES
from warpspec.common.nvfp4 import ATOM_BYTES, ATOM_COLUMNS, ATOM_LANES, NVFP4_BLOCK

CODE_BITS = 8  # bits of an e4m3 scale


class Result(NamedTuple):
    """Destination of the epilogue.

    vectors: Int32 (WORD, VECTOR, ROW) of the data [R, ...]. scales: uint8 [atoms, K atoms, 512] or None. columns:
    outputs of a row.
    """

    vectors: cute.Tensor
    scales: cute.Tensor | None
    columns: Int32

    @property
    def scale_columns(self):
        """Columns of scales, including padding."""
        return self.scales.shape[1] * ATOM_COLUMNS


def make_result(config, data: cute.Tensor, scales, columns) -> Result:
    """Make the destination in data, bf16 or uint8 [R, C], whose rows are a multiple of 16 bytes. Host side."""
    words = cute.make_tensor(
        cute.recast_ptr(data.iterator, dtype=Int32),
        cute.make_layout(
            (
                config.vector_words,
                data.shape[1] * data.element_type.width // (8 * WORD_BYTES * config.vector_words),
                data.shape[0],
            ),
            stride=(
                1,
                config.vector_words,
                cute.assume(
                    data.stride[0] * data.element_type.width // (8 * WORD_BYTES), divby=config.vector_words
                ),
            ),
        ),
    )
    return Result(words, scales, columns)


def warp_staging(config, base: cute.Pointer, warp, words: int) -> cute.Tensor:
    """This warp's staging as Int32 (WORD, GROUP, TOKEN), with ``words`` words a group."""
    pitch = config.staging_pitch // WORD_BYTES
    base = cute.recast_ptr(base, dtype=Int32)
    layout = cute.make_layout(
        (
            words,
            config.staging_pitch // WORD_BYTES // words,
            config.staging_tokens,
            len(config.epilogue_warps),
        ),
        stride=(1, words, pitch, config.staging_warp_bytes // WORD_BYTES),
    )
    return cute.make_tensor(base, layout)[None, None, None, warp]


@dataclass(frozen=True)
class Accumulator:
    """An accumulator from the point of view of the epilogue's threads.

    columns: its columns in tensor memory. empty, use: the channel that releases it, and the use count. tile: its
    record. rank: the CTA's rank in its pair.
    """

    columns: cute.Pointer
    empty: object
    use: Int32
    tile: tuple
    rank: Int32


@cute.jit
def write_segment(config: cutlass.Constexpr, staging, result, lane, first_row, rows, first_column):
    """Copy a staged segment to global memory; executed by the warp that staged it.

    staging: (WORD, VECTOR, TOKEN). first_row: row of the result of the first staged token. rows: how many tokens are
    staged. first_column: the segment's first output. What lies past a row's end is not written. The barrier at the end
    of ``Records.read`` keeps the next tile's segment from overwriting this one.
    """
    cute.arch.sync_warp()
    vectors = config.segment_vectors
    first_vector = first_column // config.vector_columns
    for step in cutlass.range_constexpr(-(-config.staging_tokens * vectors // WARP_THREADS)):
        index = step * WARP_THREADS + lane
        token, vector = index // vectors, index % vectors
        if (token < rows) & (first_vector + vector < cute.size(result.vectors, mode=[1])):
            registers = cute.make_rmem_tensor(config.vector_words, Int32)
            cute.autovec_copy(staging[None, vector, token], registers)
            cute.autovec_copy(registers, result.vectors[None, first_vector + vector, first_row + token])
    if cutlass.const_expr(config.segments > 1):
        cute.arch.sync_warp()


def scale_place(atom_row, column) -> tuple:
    """(K atom, byte) of the scale of row ``atom_row`` of an atom, in column ``column``."""
    line = atom_row % ATOM_LANES * (ATOM_BYTES // ATOM_LANES) + atom_row // ATOM_LANES * ATOM_COLUMNS
    return column // ATOM_COLUMNS, line + column % ATOM_COLUMNS


def has_scale(result, atom, column) -> Boolean:
    """Whether this scale exists in the result.

    An atom can be too high only if the offsets are wrong. Even then the kernel must not write outside the tensor.
    """
    return Boolean(column < result.scale_columns) & Boolean(atom < result.scales.shape[0])


@cute.jit
def write_scale(result, valid, atom, atom_row, column, code):
    """Write one e4m3 code. In the padding after the last block write 0; after the padding write nothing."""
    if valid & has_scale(result, atom, column):
        k_atom, byte = scale_place(atom_row, column)
        inside = column < cute.ceil_div(result.columns, NVFP4_BLOCK)
        result.scales[atom, k_atom, byte] = Uint8(cutlass.select_(inside, code, Uint32(0)))


@cute.jit
def write_scale_word(result, valid, atom, atom_row, column, codes):
    """``write_scale`` for four columns from ``column`` on, a multiple of four. codes: the first in the low byte."""
    if valid & has_scale(result, atom, column):
        k_atom, byte = scale_place(atom_row, column)
        inside = cute.ceil_div(result.columns, NVFP4_BLOCK) - column
        mask = (Int32(1) << inside * CODE_BITS) - 1
        codes = Int32(cutlass.select_(inside < ATOM_COLUMNS, codes & mask, codes))
        words = cute.recast_tensor(result.scales, Int32)
        words[atom, k_atom, byte // WORD_BYTES] = codes
