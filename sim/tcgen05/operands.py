"""Matrix operands of tcgen05.mma as float32 arrays: from shared memory, from tensor memory, and scale
factors.

PTX ISA: "Packing formats of elements in Tensor and Shared memory", "Block Scaling".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from warpspec.sim import formats
from warpspec.sim.errors import BadDescriptor
from warpspec.sim.tcgen05 import smem_descriptor
from warpspec.sim.tcgen05.instruction_descriptor import PACKED_KINDS, WORDS_PER_OPERAND_ROW
from warpspec.sim.tcgen05.memory import PARTITION_LANES
from warpspec.sim.tcgen05.smem_descriptor import CHUNK_BYTES, SWIZZLE_128B_32B

OPERAND_ROW_BYTES = WORDS_PER_OPERAND_ROW * 4
OPERAND_ROW_CHUNKS = OPERAND_ROW_BYTES // CHUNK_BYTES
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
TF32_MASK = np.uint32(0xFFFFE000)

# 4- and 6-bit operands of .kind::f8f6f4 and .kind::mxf8f6f4: in shared memory 16 elements are packed at the
# start of 16 bytes; in tensor memory each has a byte of its own and stands in the middle of it, at this bit.
CONTAINER_SHIFT = {"e2m1": 2, "e2m3": 1, "e3m2": 1}
PADDED_BYTES_USED = {"e2m1": 8, "e2m3": 12, "e3m2": 12}


@dataclass(frozen=True, slots=True)
class SharedOperand:
    """A matrix operand of consecutive MMAs in shared memory. name: A or B. descriptor: the first one's. rows: along M
    or N. chunks: see `operand_chunks`."""

    name: str
    descriptor: int
    rows: int
    mn_major: bool
    chunks: np.ndarray


@lru_cache(maxsize=1)
def _nibble_pairs() -> np.ndarray:
    """complex64[256]: both e2m1 values of a byte, low nibble first, moved as one 8-byte item."""
    values = formats.decode(formats.unpack_nibbles(np.arange(256, dtype=np.uint8)), formats.E2M1)
    return values.view(np.complex64)


def decode_elements(raw: np.ndarray, fmt: str) -> np.ndarray:
    """float32 of whole-byte elements; `raw` is any array whose last axis is contiguous bytes of elements."""
    if fmt == "bf16":
        return np.left_shift(raw.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    if fmt == "f16":
        return raw.view(np.float16).astype(np.float32)
    if fmt == "tf32":
        return (raw.view(np.uint32) & TF32_MASK).view(np.float32)
    if fmt in ("e4m3", "e5m2"):
        return formats.table(formats.FORMATS[fmt]).take(raw.view(np.uint8))
    return raw.view(np.int8 if fmt == "s8" else np.uint8).astype(np.float32)


def decode_smem(chunks: np.ndarray, fmt: str, kind: str) -> np.ndarray:
    """float32[..., elements] of gathered chunks [..., chunks] (see smem_descriptor.gather)."""
    if fmt not in PADDED_BYTES_USED:
        return decode_elements(chunks, fmt)
    if kind in PACKED_KINDS:
        return _nibble_pairs().take(chunks.view(np.uint8)).view(np.float32)
    padded = chunks.view(np.uint8).reshape(*chunks.shape, CHUNK_BYTES)[..., : PADDED_BYTES_USED[fmt]]
    codes = formats.unpack_nibbles(padded) if fmt == "e2m1" else formats.unpack_sextets(padded)
    values = formats.table(formats.FORMATS[fmt]).take(codes)
    return values.reshape(*chunks.shape[:-1], -1)


def decode_tmem(words: np.ndarray, fmt: str, kind: str) -> np.ndarray:
    """float32[rows, elements] of tensor-memory words uint32[rows, words]: operand A."""
    words = np.ascontiguousarray(words)
    if fmt not in CONTAINER_SHIFT:
        return decode_elements(words, fmt)
    if kind in PACKED_KINDS:
        return _nibble_pairs().take(words.view(np.uint8)).view(np.float32)
    codes = words.view(np.uint8) >> CONTAINER_SHIFT[fmt]
    return formats.decode(codes & ((1 << formats.FORMATS[fmt].bits) - 1), formats.FORMATS[fmt])


@lru_cache(maxsize=1 << 10)
def operand_chunks(
    descriptors: tuple[int, ...],
    rows: int,
    fmt: str,
    k: int,
    mn_major: bool,
    row_chunks: int = OPERAND_ROW_CHUNKS,
) -> np.ndarray:
    """Chunk indices of the operands of consecutive MMAs, side by side along K.

    K-major: intp[rows, chunks of all K]; MN-major: intp[all K, chunks of rows]. row_chunks: of one K-major row.
    """
    if not mn_major:
        parts = [smem_descriptor.k_major_chunks(d, rows, row_chunks) for d in descriptors]
        return np.concatenate(parts, axis=1)
    for bits in descriptors:
        if (smem_descriptor.decode(bits).swizzle is SWIZZLE_128B_32B) != (fmt == "tf32"):
            raise BadDescriptor(
                "MN-major operands use 128B swizzling with 32B atomicity exactly when they are 32 bits wide"
            )
    row_bytes = rows * ELEMENT_BYTES[fmt]
    if row_bytes % CHUNK_BYTES:
        raise BadDescriptor(f"an MN-major {fmt} operand of {rows} rows does not fill 16-byte chunks")
    parts = [smem_descriptor.mn_major_chunks(d, k, row_bytes // CHUNK_BYTES) for d in descriptors]
    return np.concatenate(parts, axis=0)


def smem_operand(
    smem: np.ndarray,
    descriptors: tuple[int, ...],
    rows: int,
    fmt: str,
    kind: str,
    k: int,
    mn_major: bool,
    row_chunks: int = OPERAND_ROW_CHUNKS,
) -> np.ndarray:
    """float32[rows, len(descriptors) * k] from uint8 shared memory; a transposed view when stored MN-
    major."""
    index = operand_chunks(descriptors, rows, fmt, k, mn_major, row_chunks)
    values = decode_smem(smem_descriptor.gather(smem, index), fmt, kind)
    return values.T if mn_major else values


def scale_factors(
    words: np.ndarray, first_byte: int, per_row: int, fmt: str, row_words: int = 1
) -> np.ndarray:
    """Scale factors in each 32-lane partition of tensor memory: float32[4, 32 * columns, per_row].

    words: uint32[128, columns], or [128, columns, row_words] where a row has several words. Row r of a scale matrix
    stands in lane r % 32 and column r // 32, its factors along K in the bytes from `first_byte` (the scale factor id)
    on; the kernel writes the same to all four partitions.
    """
    columns = words.shape[1]
    codes = words.view(np.uint8).reshape(-1, PARTITION_LANES, columns, 4 * row_words)[
        ..., first_byte : first_byte + per_row
    ]
    codes = codes.transpose(0, 2, 1, 3).reshape(-1, columns * PARTITION_LANES, per_row)
    return formats.table(formats.FORMATS[fmt]).take(codes)
