"""Box copies between global memory and shared memory in tiled, gather4 and scatter4 modes.

A copy has two halves, so that the caller decides when each happens: `load_box` / `store_box` move a box
between global memory and a plain array in box order; `write_shared` / `read_shared` place that array in
shared memory.
Coordinates are signed; elements outside the tensor are filled on loads and skipped on stores.

PTX ISA 5.5.3 (Tiled Mode), 9.7.9.27 (Tensor copy).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from warpspec.sim.errors import BadDescriptor, MemoryFault, UnsupportedInstruction
from warpspec.sim.tma.descriptor import PADDED_BOX, Interleave, Swizzle, TensorMap
from warpspec.sim.tma.layout import PERIOD, chunk_map

ADDRESS_SPACE = 1 << 64
GATHER_ROWS = 4
GROUP = 16  # elements a padded sub-byte type spreads over 16 bytes
PADDING = 0xFF  # what the uninitialised padding of sub-byte types holds: an unlikely value
F32_MAGNITUDE = np.uint32(0x7FFFFFFF)
F32_INFINITY = np.uint32(0x7F800000)
TF32_NAN = np.uint32(0x7FFFE000)
TF32_DROPPED_BITS = 13
SHARED_ALIGN = 128  # bytes
# Bytes: where a box may begin in dimension 0 (an H200 raises "illegal instruction" elsewhere).
INNER_ALIGN = 16


class GlobalMemory(Protocol):
    """The interface to global memory that this module needs."""

    watch: Callable | None

    def view(self, address: int, nbytes: int, write: bool = False) -> np.ndarray:
        """uint8 view of [address, address + nbytes); raises MemoryFault unless inside one allocation."""


# How a store combines: takes (destination, source) uint8 arrays of equal shape, last dimension contiguous.
Combine = Callable[[np.ndarray, np.ndarray], None]


def assign(destination: np.ndarray, source: np.ndarray) -> None:
    destination[...] = source


def transfer_bytes(tensor_map: TensorMap, boxes: int = 1) -> int:
    """Bytes that complete-tx counts for a load: the data copied, without the padding of sub-byte types."""
    return boxes * tensor_map.copied_bytes


def shared_bytes(tensor_map: TensorMap, boxes: int = 1) -> int:
    """Bytes of shared memory that boxes take up, gaps after narrow rows included."""
    return boxes * tensor_map.rows * tensor_map.row_pitch


def box_bytes(tensor_map: TensorMap, boxes: int = 1) -> int:
    """Bytes of boxes in box order, without gaps."""
    return boxes * tensor_map.rows * tensor_map.row_bytes


def _inner_bytes(tensor_map: TensorMap, elements: int) -> int:
    """Bytes of contiguous elements in global memory; raises where they are no whole number of bytes."""
    bits = elements * tensor_map.element.bits
    if bits % 8:
        raise BadDescriptor(f"{elements} {tensor_map.element.name} elements are no whole number of bytes")
    return bits // 8


def _check_coordinates(tensor_map: TensorMap, coords: tuple[int, ...], load: bool) -> None:
    if tensor_map.interleave != Interleave.NONE:
        raise UnsupportedInstruction(f"interleaved tensor map: {tensor_map.describe()}")
    if len(coords) != tensor_map.rank:
        raise BadDescriptor(f"{len(coords)} coordinates for {tensor_map.describe()}")
    if coords[0] * tensor_map.element.bits // 8 % INNER_ALIGN:
        what = f"inner coordinate {coords[0]} is not on a {INNER_ALIGN}-byte boundary"
        raise MemoryFault(f"{what}: {tensor_map.describe()}")
    if tensor_map.element.padded and coords[0] % PADDED_BOX:
        raise BadDescriptor(f"first coordinate {coords[0]} is not a multiple of 128: {tensor_map.describe()}")
    if tensor_map.element.name == "b4x16_p64" and not load:
        raise UnsupportedInstruction("tensor store of b4x16_p64 elements, which the ISA does not have")
    if not load and min(coords) < 0:
        raise BadDescriptor(f"tensor store at negative coordinates {coords}: {tensor_map.describe()}")


def _inside(tensor_map: TensorMap, coords: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """Per dimension, the half-open range of box positions inside the tensor; None if nothing is."""
    ranges = []
    steps = (1, *tensor_map.element_strides[1:])
    for start, count, step, dim in zip(coords, tensor_map.box_elements, steps, tensor_map.dims, strict=True):
        low = 0 if start >= 0 else (-start + step - 1) // step
        high = count if start + (count - 1) * step < dim else (dim - start + step - 1) // step
        if low >= high:
            return None
        ranges.append((low, high))
    return ranges


def _for_each_view(
    gmem: GlobalMemory,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: np.ndarray,
    write: bool,
    action: Callable[[np.ndarray, np.ndarray], None],
) -> None:
    """Call action(global view, box part) for a strided range of global memory, in one piece where possible.

    shape and strides are in bytes, outermost first, and the last dimension is contiguous. A range that no
    single allocation holds (a batch stride between two tensors), or one that writes the same bytes twice, is
    cut along its outermost dimension.
    """
    address %= ADDRESS_SPACE
    span = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    splittable = len(shape) > 1
    overlapping = write and any(s == 0 and n > 1 for n, s in zip(shape, strides, strict=True))
    if not (overlapping and splittable):
        try:
            flat = gmem.view(address, span, write)
        except MemoryFault:
            if not splittable:
                raise
        else:
            if gmem.watch is not None:
                gmem.watch(address, shape, strides)
            action(np.ndarray(shape, np.uint8, buffer=flat, strides=strides), box)
            return
    for i in range(shape[0]):
        _for_each_view(gmem, address + i * strides[0], shape[1:], strides[1:], box[i], write, action)


def _visit(
    tensor_map: TensorMap,
    coords: tuple[int, ...],
    gmem: GlobalMemory,
    box: np.ndarray,
    ranges: list[tuple[int, int]],
    write: bool,
    action: Callable[[np.ndarray, np.ndarray], None],
) -> None:
    """Call action(global view, box part) over the part of a box inside the tensor.

    box: uint8 [n_last, ..., n_1, bytes of the inner row in global memory].
    """
    inner_start = _inner_bytes(tensor_map, coords[0] + ranges[0][0])
    inner_stop = _inner_bytes(tensor_map, coords[0] + ranges[0][1])
    address = tensor_map.address + inner_start
    shape, strides = [], []
    part = []
    for dimension in range(tensor_map.rank - 1, 0, -1):
        low, high = ranges[dimension]
        step, stride = tensor_map.element_strides[dimension], tensor_map.strides[dimension - 1]
        address += (coords[dimension] + low * step) * stride
        shape.append(high - low)
        strides.append(step * stride)
        part.append(slice(low, high))
    offset = _inner_bytes(tensor_map, ranges[0][0])
    part.append(slice(offset, offset + inner_stop - inner_start))
    shape.append(inner_stop - inner_start)
    strides.append(1)
    try:
        _for_each_view(gmem, address, tuple(shape), tuple(strides), box[tuple(part)], write, action)
    except MemoryFault as fault:
        what = f"tensor copy at {coords} of {tensor_map.describe()}"
        raise MemoryFault(f"{fault.message}\n    {what}") from fault


def _row_shape(tensor_map: TensorMap) -> tuple[int, ...]:
    """Shape of a box as uint8, outermost dimension first, inner row in bytes of global memory."""
    return tensor_map.box_view[0]


def _whole(tensor_map: TensorMap, coords: tuple[int, ...], gmem: GlobalMemory) -> np.ndarray | None:
    """A box in global memory if all of it lies inside the tensor and in one allocation, [n_last, ..., n_1, bytes]."""
    for start, reach, size in zip(coords, tensor_map.reach, tensor_map.dims, strict=True):
        if start < 0 or start + reach > size:
            return None
    inner = coords[0] * tensor_map.element.bits
    if inner % 8:
        return None
    address = tensor_map.address + inner // 8
    for start, stride in zip(coords[1:], tensor_map.strides, strict=False):
        address += start * stride
    shape, strides, span = tensor_map.box_view
    try:
        flat = gmem.view(address, span)
    except MemoryFault:
        return None
    if gmem.watch is not None:
        gmem.watch(address, shape, strides)
    return np.ndarray(shape, np.uint8, buffer=flat, strides=strides)


def load_box(tensor_map: TensorMap, coords: tuple[int, ...], gmem: GlobalMemory) -> np.ndarray:
    """Read the box at signed coordinates (dimension 0 first). Returns uint8 [box_bytes], in box order."""
    _check_coordinates(tensor_map, coords, load=True)
    element = tensor_map.element
    if not element.padded and element.name not in READS:
        whole = _whole(tensor_map, coords, gmem)
        if whole is not None:
            return whole.copy().reshape(-1)
    shape = _row_shape(tensor_map)
    ranges = _inside(tensor_map, coords)
    full = ranges is not None and all(
        span == (0, count) for span, count in zip(ranges, tensor_map.box_elements, strict=True)
    )
    box = np.empty(shape, np.uint8) if full else _filled(tensor_map, shape)
    if ranges is not None:
        _visit(tensor_map, coords, gmem, box, ranges, False, READS.get(element.name, _read))
    if element.padded:
        return _pad(tensor_map, box)
    return box.reshape(-1)


def _read(view: np.ndarray, part: np.ndarray) -> None:
    part[...] = view


def _read_tf32(view: np.ndarray, part: np.ndarray) -> None:
    """Loads of tf32 round f32 to nearest even. The out-of-bounds fill is not rounded."""
    bits = view.view(np.uint32)
    rounded = bits + np.uint32(0xFFF) + (bits >> np.uint32(TF32_DROPPED_BITS) & np.uint32(1))
    rounded &= np.uint32(0xFFFFFFFF << TF32_DROPPED_BITS & 0xFFFFFFFF)
    part.view(np.uint32)[...] = np.where(bits & F32_MAGNITUDE > F32_INFINITY, TF32_NAN, rounded)


# How loads take their elements, where they are not copied as they are. `.ftz` flushes in reductions only.
READS = {"tf32": _read_tf32, "tf32.ftz": _read_tf32}


def _filled(tensor_map: TensorMap, shape: tuple[int, ...]) -> np.ndarray:
    if not tensor_map.nan_fill:
        return np.zeros(shape, np.uint8)
    element = np.frombuffer(tensor_map.element.nan.to_bytes(tensor_map.element.bits // 8, "little"), np.uint8)
    return np.tile(element, math.prod(shape) // element.size).reshape(shape)


def _pad(tensor_map: TensorMap, box: np.ndarray) -> np.ndarray:
    """Spread each group of 16 packed elements over 16 bytes (.b4x16_p64, .b6x16_p32)."""
    packed = GROUP * tensor_map.element.bits // 8
    spread = np.full((box.size // packed, GROUP), PADDING, np.uint8)
    spread[:, :packed] = box.reshape(-1, packed)
    return spread.reshape(-1)


def _pack_sextets(data: np.ndarray) -> np.ndarray:
    """.b6p2x16: drop the two high bits of each byte and pack the rest, 16 elements into 12 bytes."""
    quads = (data & 0x3F).reshape(-1, 4).astype(np.uint32)
    words = quads[:, 0] | quads[:, 1] << 6 | quads[:, 2] << 12 | quads[:, 3] << 18
    return words.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1)


def store_box(
    tensor_map: TensorMap,
    coords: tuple[int, ...],
    data: np.ndarray,
    gmem: GlobalMemory,
    combine: Combine = assign,
) -> int:
    """Write a box (uint8 [box_bytes], box order) to global memory, skipping what lies outside the tensor.

    `combine` is how source and destination meet: assignment, or a reduction. Returns the bytes written.
    """
    _check_coordinates(tensor_map, coords, load=False)
    ranges = _inside(tensor_map, coords)
    if ranges is None:
        return 0
    # Stores are cut off at whole 16 bytes in dimension 0: the end of a row in between is overwritten (H200).
    per_chunk = INNER_ALIGN * 8 // tensor_map.element.bits
    ranges[0] = (0, min(-(-ranges[0][1] // per_chunk) * per_chunk, tensor_map.box[0]))
    if tensor_map.element.padded:
        data = _pack_sextets(data)
    box = data.reshape(_row_shape(tensor_map))
    _visit(tensor_map, coords, gmem, box, ranges, True, combine)
    return math.prod(high - low for low, high in ranges) * tensor_map.element.bits // 8


def _check_rows(tensor_map: TensorMap, rows: tuple[int, ...]) -> None:
    if tensor_map.rank != 2:
        raise BadDescriptor(f"gather4 and scatter4 need a tensor map of rank 2: {tensor_map.describe()}")
    if tensor_map.box[1] != 1:
        raise BadDescriptor(f"gather4 and scatter4 need a box of 1 in dimension 1: {tensor_map.describe()}")
    if len(rows) != GATHER_ROWS:
        raise BadDescriptor(f"gather4 and scatter4 take a column and {GATHER_ROWS} rows, not {len(rows)}")


def load_rows(tensor_map: TensorMap, column: int, rows: tuple[int, ...], gmem: GlobalMemory) -> np.ndarray:
    """.tile::gather4: four rows of a rank-2 tensor from `column` on. Returns uint8 in box order."""
    _check_rows(tensor_map, rows)
    return np.concatenate([load_box(tensor_map, (column, row), gmem) for row in rows])


def store_rows(
    tensor_map: TensorMap,
    column: int,
    rows: tuple[int, ...],
    data: np.ndarray,
    gmem: GlobalMemory,
    combine: Combine = assign,
) -> int:
    """.tile::scatter4: the inverse of `load_rows`. Returns the bytes written."""
    _check_rows(tensor_map, rows)
    parts = data.reshape(GATHER_ROWS, -1)
    written = 0
    for row, part in zip(rows, parts, strict=True):
        written += store_box(tensor_map, (column, row), part, gmem, combine)
    return written


def _chunks(
    tensor_map: TensorMap, smem: np.ndarray, offset: int, boxes: int
) -> tuple[np.ndarray, np.ndarray | slice]:
    """Shared memory as an array of chunks and the chunks that boxes at `offset` occupy, in box order."""
    nbytes = shared_bytes(tensor_map, boxes)
    if offset % SHARED_ALIGN:
        raise MemoryFault(f"shared address {offset:#x} of a tensor copy is not {SHARED_ALIGN}-byte aligned")
    if offset + nbytes > smem.size:
        raise MemoryFault(f"{nbytes} bytes at {offset:#x} run past the end of shared memory, {smem.size:#x}")
    if tensor_map.swizzle == Swizzle.NONE:
        return smem, slice(offset, offset + nbytes)
    phase = offset % PERIOD
    found = tensor_map.places.get((phase, boxes))
    if found is None:
        shape = (tensor_map.row_bytes, tensor_map.row_pitch, boxes * tensor_map.rows)
        found = chunk_map(tensor_map.swizzle, tensor_map.atomicity, phase, *shape)
        tensor_map.places[phase, boxes] = found
    chunks, size = found
    base = offset - phase
    end = base + (nbytes + phase + 127) // 128 * 128
    # complex128 stands for "16 bytes": numpy moves it without looking inside.
    end = min(end, smem.size // 16 * 16)  # shared memory may end inside a chunk that no box reaches
    return smem[base:end].view(np.uint64 if size == 8 else np.complex128), chunks


def write_shared(tensor_map: TensorMap, smem: np.ndarray, offset: int, data: np.ndarray) -> None:
    """Place a box (uint8, box order) at byte `offset` of a CTA's shared memory (uint8), swizzled."""
    array, where = _chunks(tensor_map, smem, offset, data.size // box_bytes(tensor_map))
    array[where] = data.view(array.dtype)


def read_shared(tensor_map: TensorMap, smem: np.ndarray, offset: int, boxes: int = 1) -> np.ndarray:
    """Take a box at byte `offset` of a CTA's shared memory. Returns a copy, uint8, in box order."""
    array, where = _chunks(tensor_map, smem, offset, boxes)
    return array[where].copy().view(np.uint8)
