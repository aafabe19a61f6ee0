"""Sparse A of mma.sp and wgmma.mma_async.sp: half of each row is zero, metadata say which half.

A row of A is stored without its zeros. Of four adjacent elements two are kept, and two 2-bit indices say where they
belong; of two adjacent tf32 elements one is kept, and four bits say which. PTX ISA 9.7.14.6.1 and 9.7.15.6.1 ("Sparse
matrix storage"). Those figures do not say where the metadata of each row stand; the comments of CUTLASS's
include/cutlass/arch/mma_sparse_sm89.h do, for m16n8k32 of 16 bits and m16n8k64 of 8 bits. An H100 agrees for all
shapes (tests/silicon).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from warpspec.sim.errors import BadDescriptor

ROWS = 16  # rows of A that a warp has
QUAD = 4  # threads
PER_WORD = 8  # fours of metadata bits a register
FOURS_OF_TF32 = {0b0100: 0, 0b1110: 1}  # the position that they name of two elements
EQUAL = (0b0000, 0b0101, 0b1010, 0b1111)  # both indices the same: undefined


def contributing(width: int, k: int) -> int:
    """Threads of each four that hold metadata, for elements of so many bits: the sparsity selector says which ones."""
    return k // (8 if width == 32 else 16)


def fours(words: np.ndarray, selector: int, width: int, k: int) -> np.ndarray:
    """uint8[16, n]: each row's fours of metadata bits, of a warp's registers uint32[32].

    Raises BadDescriptor for a selector that names no such threads.
    """
    threads = contributing(width, k)
    if selector not in range(QUAD // threads):
        raise BadDescriptor(
            f"sparsity selector {selector}; with K = {k} of {width}-bit elements it may be 0 to {QUAD // threads - 1}"
        )
    words = np.ascontiguousarray(words).reshape(-1, QUAD)[:, selector * threads : (selector + 1) * threads]
    found = (words[..., None] >> (4 * np.arange(PER_WORD, dtype=np.uint32)) & 15).astype(np.uint8)
    groups = len(words)
    if width == 8:  # [group, column half, row half, 8 fours]
        return found.reshape(groups, -1, 2, PER_WORD).transpose(2, 0, 1, 3).reshape(ROWS, -1)
    # [group, column half, row half, 4 fours]
    return found.reshape(groups, threads, 2, PER_WORD // 2).transpose(2, 0, 1, 3).reshape(ROWS, -1)


@lru_cache(maxsize=256)
def _columns(bits: bytes, width: int) -> np.ndarray:
    """intp[16, stored]: the column of each stored element, of the rows' fours of metadata bits."""
    marks = np.frombuffer(bits, np.uint8).reshape(ROWS, -1)
    number = np.arange(marks.shape[1])
    if width == 32:
        strange = ~np.isin(marks, list(FOURS_OF_TF32))
        columns = 2 * number + (marks == 0b1110)
    else:
        strange = np.isin(marks, EQUAL)
        pairs = np.stack([marks & 3, marks >> 2], axis=2)
        columns = (4 * number[:, None] + pairs).reshape(ROWS, -1)
    if strange.any():
        row, at = (int(i) for i in np.argwhere(strange)[0])
        raise BadDescriptor(
            f"sparsity metadata {int(marks[row, at]):#06b} of row {row}: no meaning is defined"
        )
    columns.setflags(write=False)
    return columns


def dense(stored: np.ndarray, marks: np.ndarray, width: int, k: int) -> np.ndarray:
    """float32[16, k] of the elements that are stored, float32[16, stored]."""
    full = np.zeros((ROWS, k), np.float32)
    np.put_along_axis(full, _columns(marks.tobytes(), width).astype(np.intp), stored, axis=1)
    return full
