"""What the TMA tests share: a memory, random tensor maps, and tiled loads as plain Python loops."""

import itertools
import random

import numpy as np

from warpspec.sim.errors import MemoryFault
from warpspec.sim.tma import Swizzle, SwizzleAtomicity, TensorMap, layout
from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME, ELEMENT_TYPES

BASE = 0x7F00_0000_0000
PLAIN = [e for e in ELEMENT_TYPES if e.bits >= 8]
SWIZZLES = [(Swizzle.NONE, SwizzleAtomicity.BYTES_16), *layout.XOR_BITS]


class Memory:
    """One allocation of random bytes at BASE."""

    watch = None

    def __init__(self, nbytes: int, seed: int = 0):
        self.data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)

    def view(self, address, nbytes, write=False):
        offset = address - BASE
        if offset < 0 or offset + nbytes > self.data.size:
            raise MemoryFault(f"{nbytes} bytes at {address:#x}")
        return self.data[offset : offset + nbytes]


def swizzle_by_words(address: int, swizzle: Swizzle, atomicity: SwizzleAtomicity) -> int:
    """The ISA's tables, cell by cell: a row of 128 bytes has 8 cells of 16 bytes."""
    row, cell, byte = address // 128, address // 16 % 8, address % 16
    if swizzle in (Swizzle.BYTES_32, Swizzle.BYTES_96):
        cell = [cell, cell + 1 - 2 * (cell % 2)][row % 2]
    elif swizzle == Swizzle.BYTES_64:
        cell = cell // 4 * 4 + (cell % 4 ^ row % 4)
    elif swizzle == Swizzle.BYTES_128 and atomicity == SwizzleAtomicity.BYTES_16:
        cell = cell ^ row % 8
    elif swizzle == Swizzle.BYTES_128 and atomicity == SwizzleAtomicity.BYTES_64:
        cell = (cell + 4 * (row % 2)) % 8
    elif swizzle == Swizzle.BYTES_128:
        cell = (cell // 2 ^ row % 4) * 2 + cell % 2
        if atomicity == SwizzleAtomicity.BYTES_32_FLIP_8 and row % 2:
            byte = (byte + 8) % 16
    return row * 128 + cell * 16 + byte


def converted(element: str, value: bytes) -> bytes:
    """What a load makes of one element."""
    if element in ("tf32", "tf32.ftz"):
        bits = int.from_bytes(value, "little")
        low, kept = bits & 0x1FFF, bits & ~0x1FFF
        if bits & 0x7FFFFFFF > 0x7F800000:
            kept = 0x7FFFE000
        elif low > 0x1000 or (low == 0x1000 and kept & 0x2000):
            kept += 0x2000
        bits = kept
        value = bits.to_bytes(4, "little")
    return value


def load_by_loops(t: TensorMap, coords, memory: Memory, smem: np.ndarray, offset: int) -> None:
    """The definition of a tiled load, one element at a time (whole-byte elements)."""
    size = t.element.bits // 8
    fill = (t.element.nan if t.nan_fill else 0).to_bytes(size, "little")
    steps = (1, *t.element_strides[1:])
    counts = [-(-box // step) for box, step in zip(t.box, steps, strict=True)]
    for number, position in enumerate(itertools.product(*(range(n) for n in reversed(counts)))):
        index = [c + p * s for c, p, s in zip(coords, reversed(position), steps, strict=True)]
        if all(0 <= i < dim for i, dim in zip(index, t.dims, strict=True)):
            at = index[0] * size + sum(i * s for i, s in zip(index[1:], t.strides, strict=True))
            value = converted(t.element.name, memory.view(t.address + at, size).tobytes())
        else:
            value = fill
        # A swizzle puts rows its span apart, however narrow they are.
        row, column = divmod(number * size, t.box[0] * size)
        at = offset + row * (t.swizzle.span or t.box[0] * size) + column
        for k, byte in enumerate(value):
            smem[swizzle_by_words(at + k, t.swizzle, t.atomicity)] = byte


def random_map(rng: random.Random, rank: int, swizzle, atomicity, element=None, strided=True) -> TensorMap:
    """A valid tensor map whose tensor lies in a Memory of 1 MiB."""
    element = element or rng.choice(PLAIN)
    size = element.bits // 8
    span = swizzle.span or 256
    row = 16 * rng.randint(1, span // 16)
    while row % size or row // size > 256:
        row = 16 * rng.randint(1, span // 16)
    dims = (rng.randint(1, 300 // size + 1), *(rng.randint(1, 6) for _ in range(rank - 1)))
    strides, pitch = [], dims[0] * size
    for dim in dims[1:]:
        pitch = -(-pitch // 16) * 16 + 16 * rng.randint(0, 2)
        strides.append(pitch)
        pitch *= dim
    return TensorMap(
        address=BASE + 16 * rng.randint(0, 8),
        element=element,
        dims=dims,
        strides=tuple(strides),
        box=(row // size, *(rng.randint(1, 6) for _ in range(rank - 1))),
        element_strides=tuple(rng.randint(1, 3) if strided else 1 for _ in range(rank)),
        swizzle=swizzle,
        atomicity=atomicity,
        nan_fill=element.nan is not None and rng.random() < 0.5,
        l2_promotion=rng.randrange(4),
    )


def random_coordinates(rng: random.Random, t: TensorMap, low: int = -4) -> tuple[int, ...]:
    """Coordinates that hang over either end of some dimensions; the inner one on a 16-byte boundary."""
    coords = [rng.randint(max(low, -b), d + 1) for d, b in zip(t.dims, t.box, strict=True)]
    per_chunk = 128 // t.element.bits
    coords[0] = max(coords[0] // per_chunk, -1 if low < 0 else 0) * per_chunk
    return tuple(coords)


def valid_map() -> TensorMap:
    """fp16 [64, 64] at BASE, box 8 x 64, 128-byte swizzle."""
    return TensorMap(
        BASE, ELEMENT_BY_NAME["f16"], (64, 64), (128,), (64, 8), (1, 1), swizzle=Swizzle.BYTES_128
    )
