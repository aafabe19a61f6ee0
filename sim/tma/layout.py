"""The places of a box's chunks in shared memory: the swizzles.

A swizzle permutes chunks of shared memory by address: bits 7 and up of the shared address (the 128-byte line)
are XORed into the chunk bits below. It is a function of the absolute address, not of the offset in the box.
PTX ISA 5.5.7 (Swizzling Modes).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from warpspec.sim.tma.descriptor import Swizzle, SwizzleAtomicity

CHUNK = 16  # bytes: every swizzle but the 8-byte flip moves multiples of this
HALF_CHUNK = 8
LINE_SHIFT = 7  # a shared-memory line is 128 bytes
PERIOD = 1024  # bytes after which every swizzle repeats

# (swizzle, atomicity) -> (line bits taken, bit position they are XORed into).
XOR_BITS = {
    (Swizzle.BYTES_32, SwizzleAtomicity.BYTES_16): (1, 4),
    (Swizzle.BYTES_96, SwizzleAtomicity.BYTES_16): (1, 4),
    (Swizzle.BYTES_64, SwizzleAtomicity.BYTES_16): (2, 4),
    (Swizzle.BYTES_128, SwizzleAtomicity.BYTES_16): (3, 4),
    (Swizzle.BYTES_128, SwizzleAtomicity.BYTES_32): (2, 5),
    (Swizzle.BYTES_128, SwizzleAtomicity.BYTES_32_FLIP_8): (2, 5),
    (Swizzle.BYTES_128, SwizzleAtomicity.BYTES_64): (1, 6),
}


def swizzled(address: np.ndarray | int, swizzle: Swizzle, atomicity: SwizzleAtomicity) -> np.ndarray | int:
    """The shared address at which hardware keeps what an unswizzled box would have at `address` (bytes)."""
    if swizzle == Swizzle.NONE:
        return address
    bits, position = XOR_BITS[swizzle, atomicity]
    line = address >> LINE_SHIFT
    result = address ^ (line & (1 << bits) - 1) << position
    if atomicity == SwizzleAtomicity.BYTES_32_FLIP_8:
        result = result ^ (line & 1) << 3
    return result


@lru_cache(maxsize=512)
def chunk_map(
    swizzle: Swizzle, atomicity: SwizzleAtomicity, phase: int, row_bytes: int, row_pitch: int, rows: int
) -> tuple[np.ndarray, int]:
    """The place of each chunk of a box that lies at an address with `address % PERIOD == phase`.

    Returns (map, chunk bytes): chunk i of the box lies at chunk map[i], counted from address - phase.
    """
    size = HALF_CHUNK if atomicity == SwizzleAtomicity.BYTES_32_FLIP_8 else CHUNK
    linear = phase + row_pitch * np.arange(rows)[:, None] + size * np.arange(row_bytes // size)
    return swizzled(linear.reshape(-1), swizzle, atomicity) // size, size
