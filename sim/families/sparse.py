"""Metadata of mma.sp's and wgmma.mma_async.sp's sparse A in registers.

The figures of PTX ISA 9.7.14.6.1 and 9.7.15.6.1 do not say where the metadata of each row stand; the comments of
CUTLASS's include/cutlass/arch/mma_sparse_sm89.h do, for m16n8k32 of 16 bits and m16n8k64 of 8 bits. An H100 agrees for
all shapes (tests/silicon).
"""

from __future__ import annotations

import numpy as np

from warpspec.sim import sparsity
from warpspec.sim.errors import BadDescriptor

ROWS = 16  # rows of A that a warp has
QUAD = 4  # threads
PER_WORD = 8  # fours of metadata bits a register


def contributing(width: int, k: int) -> int:
    """Threads of each four that hold metadata, for elements of this many bits: the sparsity selector says which
    ones."""
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


def dense(stored: np.ndarray, marks: np.ndarray, width: int) -> np.ndarray:
    """float32[16, K] of the elements of this many bits that are stored, float32[16, K / 2]."""
    return sparsity.dense(stored, marks, "1:2" if width == 32 else "2:4")
