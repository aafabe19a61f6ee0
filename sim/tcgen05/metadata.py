"""Sparsity metadata of tcgen05.mma.sp in tensor memory. PTX ISA: "Sparse Matrices", "Sparsity selector".

The ISA shows where each row's bits stand in figures only. For 128 rows a CTA and for the weight-stationary shapes,
CUTLASS's `tmem_e_frg` (include/cute/atom/mma_traits_sm100_frag.hpp) says the same in strides: with 16- and 32-bit
elements 16 lanes of one column hold 16 rows, lane 8 h + r the half h of K of rows r (low 16 bits) and r + 8 (high
ones), and the selector chooses one column of two; with narrower elements a lane holds its row in two columns.
"""

from __future__ import annotations

import numpy as np

from warpspec.sim.errors import TmemFault
from warpspec.sim.tcgen05.instruction_descriptor import PACKED_KINDS, SELECTORS, InstructionDescriptor
from warpspec.sim.tcgen05.memory import Tmem, address_parts

COLUMNS = 2  # to which the address of metadata is aligned
PER_WORD = 8  # fours of bits


def granularity(d: InstructionDescriptor) -> str:
    """Stored elements of how many."""
    return "4:8" if d.kind in PACKED_KINDS else "1:2" if d.kind == "tf32" else "2:4"


def columns_of(d: InstructionDescriptor, address: int) -> tuple[int, int]:
    """(first column, number of columns) of an instruction's metadata.

    Raises TmemFault for an address that is not aligned.
    """
    lane, column = address_parts(address)
    if lane or column % COLUMNS:
        raise TmemFault(
            f"sparsity metadata at lane {lane}, column {column}: they start at lane 0 and an even column"
        )
    return (column + d.selector, 1) if d.kind in SELECTORS else (column, COLUMNS)


def fours(d: InstructionDescriptor, tmem: Tmem, address: int, first: int, rows: int) -> np.ndarray:
    """uint8[rows, n]: each row's fours of metadata bits, in lanes from `first` on."""
    column, count = columns_of(d, address)
    tmem.require(column, count, "tcgen05.mma.sp, sparsity metadata,")
    words = tmem.data[first : first + rows, column : column + count]
    found = (words[..., None] >> (4 * np.arange(PER_WORD, dtype=np.uint32)) & 15).astype(np.uint8)
    if d.kind not in SELECTORS:
        return found.reshape(rows, -1)
    # [block of 16 rows, half of K, row of 8, half of the rows, fours]
    parts = found.reshape(rows // 16, 2, 8, 2, PER_WORD // 2)
    return parts.transpose(0, 3, 2, 1, 4).reshape(rows, -1)
