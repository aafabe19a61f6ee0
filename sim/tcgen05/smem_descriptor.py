"""Shared-memory matrix descriptors of tcgen05.mma and tcgen05.cp, and where they put each 16-byte chunk.

Shared memory is addressed in chunks of 16 bytes: the unit of every layout and of every swizzle. A K-major
operand is [rows, chunks along K]; an MN-major one is [k, chunks along MN]. PTX ISA: "Matrix Descriptors",
"Strides", "Shared Memory Layout and Swizzling".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from warpspec.sim.errors import BadDescriptor, MemoryFault

CHUNK_BYTES = 16
ADDRESS_MASK = 0x3FFFF  # descriptors hold 18-bit addresses, without their 4 low bits
VERSION = 1  # bits 46-48
ROWS_PER_ATOM = 8


@dataclass(frozen=True, slots=True)
class Swizzle:
    """`width` bytes of the contiguous dimension in one atom; address bits [unit, unit+bits) ^= bits [7,
    7+bits)."""

    name: str
    width: int
    unit_bit: int
    bits: int


SWIZZLES = {
    0: Swizzle("none", 16, 4, 0),
    1: Swizzle("128B with 32B atomicity", 128, 5, 2),
    2: Swizzle("128B", 128, 4, 3),
    4: Swizzle("64B", 64, 4, 2),
    6: Swizzle("32B", 32, 4, 1),
}
NO_SWIZZLE = SWIZZLES[0]
SWIZZLE_128B_32B = SWIZZLES[1]
PATTERN_ROW_BIT = 7  # the swizzle's row number starts at this address bit: rows of 128 bytes


@dataclass(frozen=True, slots=True)
class SmemDescriptor:
    """Fields of the 64-bit descriptor; addresses and offsets in bytes within the CTA's shared memory.

    absolute: leading_offset is an address, of where a row of K goes on after its 128 bytes (sm_103a, for K = 96).
    """

    start: int
    leading_offset: int
    stride_offset: int
    base_offset: int
    swizzle: Swizzle
    absolute: bool = False


@lru_cache(maxsize=1 << 14)
def decode(bits: int) -> SmemDescriptor:
    """Decode a 64-bit descriptor. Raises BadDescriptor for reserved or unsupported encodings."""
    version = bits >> 46 & 0x7
    if version != VERSION:
        raise BadDescriptor(
            f"shared-memory descriptor 0x{bits:016x}: bits 46-48 are {version}, not {VERSION}"
        )
    mode = bits >> 61
    if mode not in SWIZZLES:
        raise BadDescriptor(f"shared-memory descriptor 0x{bits:016x}: {mode} is no swizzle mode")
    if bits >> 53 & 0xFF:
        raise BadDescriptor(f"shared-memory descriptor 0x{bits:016x}: bits 53-60 must be 0")
    absolute = bool(bits >> 52 & 1)
    if absolute and (SWIZZLES[mode] is not SWIZZLES[2] or bits >> 49 & 7):
        raise BadDescriptor(
            f"shared-memory descriptor 0x{bits:016x}: an absolute leading-dimension address goes with 128B swizzling "
            "and base offset 0"
        )
    return SmemDescriptor(
        start=(bits & 0x3FFF) << 4,
        leading_offset=(bits >> 16 & 0x3FFF) << 4,
        stride_offset=(bits >> 32 & 0x3FFF) << 4,
        base_offset=bits >> 49 & 0x7,
        swizzle=SWIZZLES[mode],
        absolute=absolute,
    )


def encode(
    start: int,
    leading_offset: int,
    stride_offset: int,
    swizzle_mode: int,
    base_offset: int = 0,
    absolute: bool = False,
) -> int:
    """The 64-bit descriptor of these fields (for tests and hand-written kernels)."""
    return (
        (start & ADDRESS_MASK) >> 4
        | (leading_offset & ADDRESS_MASK) >> 4 << 16
        | (stride_offset & ADDRESS_MASK) >> 4 << 32
        | VERSION << 46
        | base_offset << 49
        | absolute << 52
        | swizzle_mode << 61
    )


@lru_cache(maxsize=1 << 11)
def k_major_chunks(bits: int, rows: int, chunks: int) -> np.ndarray:
    """intp[rows, chunks]: the index of the 16-byte chunk that holds each row's chunk along K. Read-only."""
    d = decode(bits)
    if d.swizzle is SWIZZLE_128B_32B:
        raise BadDescriptor("a K-major operand with 128B swizzling of 32B atomicity is not supported")
    if d.swizzle is not NO_SWIZZLE and chunks * CHUNK_BYTES > d.swizzle.width:
        raise BadDescriptor(
            f"{chunks * CHUNK_BYTES} bytes of K do not fit into an atom with {d.swizzle.name} swizzling"
        )
    row = np.arange(rows)[:, None]
    chunk = np.arange(chunks)[None, :]
    along_k = d.leading_offset if d.swizzle is NO_SWIZZLE else CHUNK_BYTES
    address = row % ROWS_PER_ATOM * d.swizzle.width + row // ROWS_PER_ATOM * d.stride_offset + chunk * along_k
    if d.absolute:
        into_row = d.start % d.swizzle.width + chunk * CHUNK_BYTES
        address = np.where(into_row < d.swizzle.width, address, address + _behind(d))
    return _physical_chunks(d, address)


def _behind(d: SmemDescriptor) -> int:
    """The distance from where a row of K would continue after its 128 bytes to where it does continue."""
    rows = d.swizzle.width
    return d.leading_offset // rows * rows - d.start // rows * rows - rows


@lru_cache(maxsize=1 << 11)
def mn_major_chunks(bits: int, k: int, chunks: int) -> np.ndarray:
    """intp[k, chunks]: the index of the 16-byte chunk that holds each k's chunk along M or N. Read-only."""
    d = decode(bits)
    if d.absolute:
        raise BadDescriptor("an MN-major operand cannot have an absolute leading-dimension address")
    step = np.arange(k)[:, None]
    chunk = np.arange(chunks)[None, :]
    if d.swizzle is NO_SWIZZLE:
        address = (
            chunk * d.stride_offset
            + step % ROWS_PER_ATOM * CHUNK_BYTES
            + step // ROWS_PER_ATOM * d.leading_offset
        )
    else:
        depth = 4 if d.swizzle is SWIZZLE_128B_32B else ROWS_PER_ATOM
        per_atom = d.swizzle.width // CHUNK_BYTES
        address = (
            chunk % per_atom * CHUNK_BYTES
            + chunk // per_atom * d.leading_offset
            + step % depth * d.swizzle.width
            + step // depth * d.stride_offset
        )
    return _physical_chunks(d, address)


def _physical_chunks(d: SmemDescriptor, relative: np.ndarray) -> np.ndarray:
    address = (d.start + relative) & ADDRESS_MASK
    pattern_row = (address >> PATTERN_ROW_BIT) - d.base_offset
    address ^= (pattern_row & ((1 << d.swizzle.bits) - 1)) << d.swizzle.unit_bit
    index = (address // CHUNK_BYTES).astype(np.intp)
    index.setflags(write=False)
    return index


def gather(smem: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The chunks at `index` from uint8 shared memory, as complex128[index.shape]: 16 opaque bytes each.

    complex128 is numpy's one 16-byte scalar type with a fast gather; `.view()` gives the elements.
    """
    usable = smem.size // CHUNK_BYTES * CHUNK_BYTES
    try:
        return smem[:usable].view(np.complex128).take(index)
    except IndexError:
        last = (int(index.max()) + 1) * CHUNK_BYTES
        raise MemoryFault(
            f"a matrix descriptor reaches shared-memory byte {last - 1}; the CTA has {smem.size} bytes"
        ) from None
