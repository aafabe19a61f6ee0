"""Sparse matrices A: half of each row is zero and not stored, and metadata say which half.

Two of four adjacent elements are kept, and two 2-bit indices say where they belong; one of two adjacent tf32 elements
is kept, and four bits say which; two of the four pairs of eight adjacent 4-bit elements (.kind::mxf4) are kept.
PTX ISA 9.7.14.6.1 and 9.7.15.6.1 ("Sparse matrix storage"), 9.7.16.10.8 ("Sparse Matrices").
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from warpspec.sim.errors import BadDescriptor

PLACES_OF_ONE = {0b0100: 0, 0b1110: 1}  # the position, of two elements, that four bits of metadata name
EQUAL = (0b0000, 0b0101, 0b1010, 0b1111)  # both indices the same: undefined
GROUPS = {"1:2": 2, "2:4": 4, "4:8": 8}  # elements of K that four bits of metadata describe


@lru_cache(maxsize=256)
def _columns(bits: bytes, rows: int, granularity: str) -> np.ndarray:
    """intp[rows, stored]: the column of each stored element, of the rows' fours of metadata bits."""
    marks = np.frombuffer(bits, np.uint8).reshape(rows, -1)
    number = np.arange(marks.shape[1])
    if granularity == "1:2":
        strange = ~np.isin(marks, list(PLACES_OF_ONE))
        columns = 2 * number + (marks == 0b1110)
    else:
        strange = np.isin(marks, EQUAL)
        columns = 4 * number[:, None] + np.stack([marks & 3, marks >> 2], axis=2)
        if granularity == "4:8":
            columns = np.stack([2 * columns, 2 * columns + 1], axis=3)
    if strange.any():
        row, at = (int(i) for i in np.argwhere(strange)[0])
        raise BadDescriptor(
            f"sparsity metadata {int(marks[row, at]):#06b} of row {row}: no meaning is defined"
        )
    columns = columns.reshape(rows, -1).astype(np.intp)
    columns.setflags(write=False)
    return columns


def dense(stored: np.ndarray, marks: np.ndarray, granularity: str) -> np.ndarray:
    """float32[rows, K] of the elements that are stored, float32[rows, K / 2], and their metadata uint8[rows, n], four
    bits each.

    Raises BadDescriptor for bits that have no meaning.
    """
    full = np.zeros((len(stored), marks.shape[1] * GROUPS[granularity]), np.float32)
    np.put_along_axis(full, _columns(marks.tobytes(), len(stored), granularity), stored, axis=1)
    return full
