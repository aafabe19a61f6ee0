"""tcgen05.cp: shared memory to tensor memory, with multicast to warps' lanes and decompression to 8-bit
containers.

PTX ISA: "tcgen05.cp", "Optional Decompression".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warpspec.sim import formats
from warpspec.sim.errors import TmemFault, UnsupportedInstruction
from warpspec.sim.tcgen05 import smem_descriptor
from warpspec.sim.tcgen05.memory import LANES, PARTITION_LANES, Tmem, address_parts
from warpspec.sim.tcgen05.operands import CONTAINER_SHIFT
from warpspec.sim.tcgen05.smem_descriptor import CHUNK_BYTES

WORDS_PER_CHUNK = CHUNK_BYTES // 4


@dataclass(frozen=True, slots=True)
class CopyShape:
    """`rows` x `chunks` of 16 bytes in shared memory; row r goes to the lanes of `lanes[r]` (rows x
    copies)."""

    rows: int
    chunks: int
    lanes: np.ndarray


def _shapes() -> dict[tuple[str, str], CopyShape]:
    row64, row32 = np.arange(64)[:, None], np.arange(32)[:, None]
    return {
        ("128x256b", ""): CopyShape(128, 2, np.arange(128)[:, None]),
        ("128x128b", ""): CopyShape(128, 1, np.arange(128)[:, None]),
        # one row into each warp's lanes; with the address at lane 31 it refills what tcgen05.shift left
        ("4x256b", ""): CopyShape(4, 2, np.arange(4)[:, None] * PARTITION_LANES),
        ("64x128b", "warpx2::02_13"): CopyShape(64, 1, row64 + np.array([0, 64])),
        ("64x128b", "warpx2::01_23"): CopyShape(64, 1, row64 % 32 + row64 // 32 * 64 + np.array([0, 32])),
        ("32x128b", "warpx4"): CopyShape(32, 1, row32 + np.arange(4) * PARTITION_LANES),
    }


SHAPES = _shapes()
# source format -> (format whose container position is used, bytes of 16 that hold data)
DECOMPRESSIONS = {"b4x16_p64": ("e2m1", 8), "b6x16_p32": ("e3m2", 12)}


def copy_shape(shape: str, multicast: str) -> CopyShape:
    """Raises UnsupportedInstruction for a pair the ISA does not have."""
    found = SHAPES.get((shape, multicast))
    if found is None:
        raise UnsupportedInstruction(f"tcgen05.cp with shape .{shape} and multicast {multicast or 'none'}")
    return found


def copy(
    smem: np.ndarray, tmem: Tmem, descriptor: int, address: int, shape: CopyShape, source_format: str = ""
) -> int:
    """Execute one tcgen05.cp in one CTA; returns the bytes read from shared memory."""
    index = smem_descriptor.k_major_chunks(descriptor, shape.rows, shape.chunks)
    chunks = smem_descriptor.gather(smem, index)
    words = decompress(chunks, source_format).view(np.uint32) if source_format else chunks.view(np.uint32)
    lane, column = address_parts(address)
    width = shape.chunks * WORDS_PER_CHUNK
    if lane + int(shape.lanes.max()) >= LANES:
        raise TmemFault(f"tcgen05.cp from lane {lane} reaches beyond lane {LANES - 1}")
    tmem.require(column, width, "tcgen05.cp")
    tmem.data[(shape.lanes + lane)[..., None], np.arange(column, column + width)] = words[:, None, :]
    return index.size * CHUNK_BYTES


def footprint(descriptor: int, address: int, shape: CopyShape) -> tuple[np.ndarray, tuple]:
    """(chunks of shared memory that a tcgen05.cp reads, index of tensor memory that it writes)."""
    lane, column = address_parts(address)
    columns = np.arange(column, column + shape.chunks * WORDS_PER_CHUNK)
    chunks = smem_descriptor.k_major_chunks(descriptor, shape.rows, shape.chunks)
    return chunks, ((shape.lanes + lane).reshape(-1, 1), columns)


def row_cells(address: int, shape: CopyShape, row: int) -> tuple:
    """The tensor-memory index that a row of shared memory is copied to."""
    lane, column = address_parts(address)
    return (shape.lanes[row] + lane).reshape(-1, 1), np.arange(
        column, column + shape.chunks * WORDS_PER_CHUNK
    )


def decompress(chunks: np.ndarray, source_format: str) -> np.ndarray:
    """uint8[rows, 16 * chunks]: each 4- or 6-bit element in the middle of a byte of its own."""
    fmt, used = DECOMPRESSIONS[source_format]
    packed = chunks.view(np.uint8).reshape(*chunks.shape, CHUNK_BYTES)[..., :used]
    codes = formats.unpack_nibbles(packed) if used == 8 else formats.unpack_sextets(packed)
    return (codes << CONTAINER_SHIFT[fmt]).reshape(len(chunks), -1)
