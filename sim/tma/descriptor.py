"""The 128-byte tensor map (CUtensorMap): its bit layout, its rules, and `tensormap.replace`.

NVIDIA documents the tensor map as opaque. The layout below was found by experiment: the code ptxas emits for
each `tensormap.replace` field names that field's bits, and descriptors built by CuTe DSL host code for varied
shapes, strides, boxes, types and swizzles decode with it. Only the first 64 bytes carry information.

    bytes     bits    field
    0x00-07           global address
    0x08-0b   0       im2col mode
              4-6     rank - 1
              7-10    element type            (ELEMENT_TYPES: the hardware's code)
              11-12   interleave layout
              13-14   swizzle mode            (0 none, 1 32B, 2 64B, 3 128B)
              15      out-of-bounds fill      (0 zeros, 1 NaN)
              16      tf32                    (with element type f32 or f32.ftz)
              17-18   L2 promotion            (performance only)
              19-20   swizzle atomicity       (0 16B, 1 32B, 2 32B with 8B flip, 3 64B)
              21      set for tensors of 128 KiB and more (performance only)
              22      96B swizzle
    0x0c-1b           strides of dimensions 1-4 in 16-byte units, low 32 bits each
    0x1c-1d           bits 32-35 of those strides, 4 bits each
    0x20-33           size - 1 of dimensions 0-4, 32 bits each
    0x34-36   0-14    element stride - 1 of dimensions 0-4, 3 bits each
    0x37-3b           box size - 1 of dimensions 0-4, 8 bits each

PTX ISA 5.5 (Tensors), 9.7.9.28 (tensormap.replace); CUDA driver API, cuTensorMapEncodeTiled (the rules).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache

import numpy as np

from warpspec.sim.errors import BadDescriptor, UnsupportedInstruction

DESCRIPTOR_BYTES = 128
ENCODED_BYTES = 64  # the rest is not looked at; CuTe DSL leaves it uninitialised
MAX_RANK = 5
MAX_BOX = 256
ADDRESS_MASK = (1 << 57) - 1
STRIDE_UNIT = 16
MAX_STRIDE = 1 << 40
PADDED_BOX = 128  # elements: the only inner box size of the padded sub-byte types
PADDED_ALIGN = 32  # bytes: address and strides of the padded sub-byte types

# Bit positions in the 32-bit word at 0x08.
RANK_SHIFT, ELEMENT_SHIFT, INTERLEAVE_SHIFT, SWIZZLE_SHIFT = 4, 7, 11, 13
FILL_SHIFT, TF32_SHIFT, L2_SHIFT, ATOMICITY_SHIFT, SWIZZLE_96B_SHIFT = 15, 16, 17, 19, 22
IM2COL = 0x1
CUTE_DSL_SETS = 0x2  # a bit that CuTe DSL sets and the driver does not; an H200 does not look at it


class Interleave(IntEnum):
    NONE = 0
    BYTES_16 = 1
    BYTES_32 = 2


class Swizzle(IntEnum):
    """`.swizzle_mode` of tensormap.replace."""

    NONE = 0
    BYTES_32 = 1
    BYTES_64 = 2
    BYTES_128 = 3
    BYTES_96 = 4

    @property
    def span(self) -> int | None:
        """Largest inner box in bytes, or None for no limit."""
        return (None, 32, 64, 128, 96)[self]


class SwizzleAtomicity(IntEnum):
    """`.swizzle_atomicity` of tensormap.replace: the chunk that a 128-byte swizzle keeps whole."""

    BYTES_16 = 0
    BYTES_32 = 1
    BYTES_32_FLIP_8 = 2
    BYTES_64 = 3


@dataclass(frozen=True)
class ElementType:
    """An element type of tensor maps, by its `.elemtype` value in tensormap.replace.

    bits: of one element in global memory. nan: the out-of-bounds NaN as a bit pattern, None for non-floats.
    padded: the copy to shared memory spreads a group of 16 elements over 16 bytes.
    """

    name: str
    code: int
    bits: int
    nan: int | None = None
    padded: bool = False

    @property
    def shared_bits(self) -> int:
        """Bits of one element in shared memory."""
        return 8 if self.padded else self.bits


ELEMENT_TYPES = (
    ElementType("u8", 0, 8),
    ElementType("u16", 1, 16),
    ElementType("u32", 2, 32),
    ElementType("s32", 3, 32),
    ElementType("u64", 4, 64),
    ElementType("s64", 5, 64),
    ElementType("f16", 6, 16, nan=0x7FF7),
    ElementType("f32", 7, 32, nan=0x7FF77FF7),
    ElementType("f32.ftz", 8, 32, nan=0x7FF77FF7),
    ElementType("f64", 9, 64, nan=0x7FF77FF77FF77FF7),
    ElementType("bf16", 10, 16, nan=0x7FF7),
    ElementType("tf32", 11, 32, nan=0x7FF77FF7),
    ElementType("tf32.ftz", 12, 32, nan=0x7FF77FF7),
    ElementType("b4x16", 13, 4),
    ElementType("b4x16_p64", 14, 4, padded=True),
    ElementType("b6x16_p32", 15, 6, padded=True),
)
ELEMENT_BY_NAME = {element.name: element for element in ELEMENT_TYPES}
# `.elemtype` value -> (4-bit code in the descriptor, tf32 bit or None where the bit is left as it is).
HARDWARE_ELEMENT = {code: (code, None) for code in range(11)} | {11: (7, 1), 12: (8, 1)}
HARDWARE_ELEMENT |= {13: (11, None), 14: (12, None), 15: (13, None)}
TF32_OF = {7: 11, 8: 12}
SUB_BYTE_OF = {11: 13, 12: 14, 13: 15}
# tensormap.replace: how many ordinals a field has, and how many values.
ORDINALS = {"global_dim": 5, "box_dim": 5, "element_stride": 5, "global_stride": 4}
CHOICES = {"elemtype": 16, "interleave_layout": 3, "swizzle_mode": 5, "swizzle_atomicity": 4, "fill_mode": 2}


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map. Dimension 0 is the contiguous one; `strides` are bytes of dimensions 1 and up."""

    address: int
    element: ElementType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: Interleave = Interleave.NONE
    swizzle: Swizzle = Swizzle.NONE
    atomicity: SwizzleAtomicity = SwizzleAtomicity.BYTES_16
    nan_fill: bool = False
    l2_promotion: int = 2

    @property
    def rank(self) -> int:
        return len(self.dims)

    @cached_property
    def box_elements(self) -> tuple[int, ...]:
        """Elements a copy moves in each dimension; the element stride of dimension 0 is ignored."""
        rest = zip(self.box[1:], self.element_strides[1:], strict=True)
        return (self.box[0], *(-(-size // step) for size, step in rest))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of the inner box dimension in shared memory."""
        return self.box[0] * self.element.shared_bits // 8

    @cached_property
    def row_pitch(self) -> int:
        """Bytes between box rows in shared memory: a swizzle puts narrow rows its span apart."""
        return self.swizzle.span or self.row_bytes

    @cached_property
    def rows(self) -> int:
        """Rows of a box: the elements of all dimensions but the inner one."""
        return math.prod(self.box_elements[1:])

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes of a box in global memory."""
        return math.prod(self.box_elements) * self.element.bits // 8

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Elements from the first to one past the last of a box, in each dimension."""
        steps = (1, *self.element_strides[1:])
        return tuple((n - 1) * step + 1 for n, step in zip(self.box_elements, steps, strict=True))

    @cached_property
    def box_view(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """A box in global memory as bytes, outermost dimension first: shape, strides, bytes from first to last."""
        rest = [step * stride for step, stride in zip(self.element_strides[1:], self.strides, strict=False)]
        inner = self.box[0] * self.element.bits // 8
        shape = (*reversed(self.box_elements[1:]), inner)
        strides = (*reversed(rest), 1)
        return shape, strides, 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))

    @cached_property
    def places(self) -> dict[tuple[int, int], tuple]:
        """Places of the chunks of boxes in shared memory, by (phase, boxes); see `layout.chunk_map`."""
        return {}

    def describe(self) -> str:
        """One line for error messages."""
        return (
            f"tensor map {self.element.name} at {self.address:#x}, dims {self.dims}, "
            f"strides {self.strides} B, box {self.box}, swizzle {self.swizzle.name}"
        )


def check(tensor_map: TensorMap) -> TensorMap:
    """Apply the rules of cuTensorMapEncodeTiled and of tensor copies; raises BadDescriptor."""
    t = tensor_map
    element = t.element
    align = PADDED_ALIGN if element.padded or t.interleave == Interleave.BYTES_32 else 16

    def require(condition: bool, text: str) -> None:
        if not condition:
            raise BadDescriptor(f"{text}: {t.describe()}")

    require(1 <= t.rank <= MAX_RANK, f"rank {t.rank} is not 1 to {MAX_RANK}")
    require(t.address % align == 0, f"global address is not a multiple of {align} bytes")
    for i, stride in enumerate(t.strides, 1):
        require(stride % align == 0, f"stride of dimension {i} is not a multiple of {align} bytes")
        require(0 <= stride < MAX_STRIDE, f"stride of dimension {i} is not below 2**40 bytes")
    for i, (dim, box, step) in enumerate(zip(t.dims, t.box, t.element_strides, strict=True)):
        require(1 <= dim <= 1 << 32, f"size of dimension {i} is not 1 to 2**32")
        require(1 <= box <= MAX_BOX, f"box size of dimension {i} is not 1 to {MAX_BOX}")
        require(1 <= step <= 8, f"element stride of dimension {i} is not 1 to 8")
    if t.interleave == Interleave.NONE:
        require(t.row_bytes * 8 == t.box[0] * element.shared_bits, "inner box is not a whole number of bytes")
        require(t.row_bytes % 16 == 0, f"inner box of {t.row_bytes} bytes is not a multiple of 16 bytes")
        span = t.swizzle.span
        require(
            span is None or t.row_bytes <= span, f"inner box of {t.row_bytes} B is wider than the swizzle"
        )
    else:
        require(t.rank >= 3, "an interleaved layout needs rank 3 or more")
    if t.swizzle != Swizzle.BYTES_128:
        require(
            t.atomicity == SwizzleAtomicity.BYTES_16, "only the 128-byte swizzle has an atomicity but 16B"
        )
    if element.padded:
        require(t.box[0] == PADDED_BOX, f"inner box of {element.name} is not {PADDED_BOX} elements")
        require(t.dims[0] % PADDED_BOX == 0, f"size of dimension 0 is not a multiple of {PADDED_BOX}")
        require(
            t.swizzle in (Swizzle.NONE, Swizzle.BYTES_128), f"{element.name} takes a 128-byte swizzle or none"
        )
        require(t.atomicity != SwizzleAtomicity.BYTES_32_FLIP_8, f"{element.name} takes no 8-byte flip")
    if element.name == "b4x16":
        require(t.dims[0] % 2 == 0, "size of dimension 0 is odd for 4-bit elements")
    if t.nan_fill:
        require(element.nan is not None, f"NaN fill of {element.name} elements")
    return t


def decode(raw: bytes | bytearray | memoryview | np.ndarray) -> TensorMap:
    """Decode and check a tensor map of 128 bytes (64 suffice). Raises BadDescriptor."""
    return _decode(bytes(raw[:ENCODED_BYTES]))


@lru_cache(maxsize=4096)
def _decode(raw: bytes) -> TensorMap:
    if len(raw) < ENCODED_BYTES:
        raise BadDescriptor(f"a tensor map has {DESCRIPTOR_BYTES} bytes, not {len(raw)}")
    (address, flags, *words) = struct.unpack("<QI13I", raw)
    low_strides, high_strides = words[0:4], words[4]
    sizes, steps_and_box0, box_rest = words[5:10], words[10], words[11]
    rank = (flags >> RANK_SHIFT & 7) + 1
    if not any(raw):
        raise BadDescriptor("tensor map is all zeros: it was never written")
    if rank > MAX_RANK:
        raise BadDescriptor(f"tensor map of rank {rank}")
    if flags & IM2COL:
        raise UnsupportedInstruction("tensor map in im2col mode")
    boxes = (steps_and_box0 >> 24, *(box_rest >> 8 * i & 0xFF for i in range(4)))
    atomicity = SwizzleAtomicity(flags >> ATOMICITY_SHIFT & 3)
    interleave = flags >> INTERLEAVE_SHIFT & 3
    if interleave == 3:
        raise BadDescriptor("tensor map with interleave layout 3")
    swizzle = Swizzle(flags >> SWIZZLE_SHIFT & 3)
    if flags >> SWIZZLE_96B_SHIFT & 1:
        swizzle = Swizzle.BYTES_96
    strides = [(low | (high_strides >> 4 * i & 0xF) << 32) * STRIDE_UNIT for i, low in enumerate(low_strides)]
    return check(
        TensorMap(
            address=address & ADDRESS_MASK,
            element=_decode_element(flags),
            dims=tuple(size + 1 for size in sizes[:rank]),
            strides=tuple(strides[: rank - 1]),
            box=tuple(size + 1 for size in boxes[:rank]),
            element_strides=tuple((steps_and_box0 >> 3 * i & 7) + 1 for i in range(rank)),
            interleave=Interleave(interleave),
            swizzle=swizzle,
            atomicity=atomicity,
            nan_fill=bool(flags >> FILL_SHIFT & 1),
            l2_promotion=flags >> L2_SHIFT & 3,
        )
    )


def _decode_element(flags: int) -> ElementType:
    code = flags >> ELEMENT_SHIFT & 0xF
    if code > max(SUB_BYTE_OF):
        raise BadDescriptor(f"tensor map with element type code {code}")
    if flags >> TF32_SHIFT & 1 and code in TF32_OF:
        return ELEMENT_TYPES[TF32_OF[code]]
    return ELEMENT_TYPES[SUB_BYTE_OF.get(code, code)]


def encode(tensor_map: TensorMap) -> bytes:
    """The 128 bytes of a tensor map. Nothing is checked: `decode` does that."""
    t = tensor_map
    code, tf32 = HARDWARE_ELEMENT[t.element.code]
    flags = (
        CUTE_DSL_SETS | (t.rank - 1) << RANK_SHIFT | code << ELEMENT_SHIFT | t.interleave << INTERLEAVE_SHIFT
    )
    flags |= int(t.nan_fill) << FILL_SHIFT | (tf32 or 0) << TF32_SHIFT | t.l2_promotion << L2_SHIFT
    flags |= t.atomicity << ATOMICITY_SHIFT
    flags |= 1 << SWIZZLE_96B_SHIFT if t.swizzle == Swizzle.BYTES_96 else t.swizzle << SWIZZLE_SHIFT
    raw = bytearray(DESCRIPTOR_BYTES)
    struct.pack_into("<QI", raw, 0, t.address, flags)
    for i in range(t.rank):
        replace_field(raw, "global_dim", i, t.dims[i])
        replace_field(raw, "box_dim", i, t.box[i])
        replace_field(raw, "element_stride", i, t.element_strides[i])
        if i:
            replace_field(raw, "global_stride", i - 1, t.strides[i - 1])
    return bytes(raw)


def replace_field(raw: bytearray | np.ndarray, field: str, ordinal: int, value: int) -> None:
    """`tensormap.replace.tile.<field>`: write a field of the tensor map held in `raw` (128 bytes, in place).

    `ordinal` counts from 0 and is ignored by fields that have none; `rank` takes the rank minus one.
    Raises BadDescriptor for a value or an ordinal that does not exist.
    """
    words = np.frombuffer(raw, dtype="<u4", count=DESCRIPTOR_BYTES // 4)

    def put(word: int, shift: int, bits: int, new: int) -> None:
        mask = (1 << bits) - 1 << shift
        words[word] = int(words[word]) & ~mask | new << shift & mask

    flags = 2
    limit = ORDINALS.get(field)
    if limit is not None and not 0 <= ordinal < limit:
        raise BadDescriptor(f"tensormap.replace .{field} of ordinal {ordinal}, there are {limit}")
    if field in CHOICES and not 0 <= value < CHOICES[field]:
        raise BadDescriptor(f"tensormap.replace .{field} with value {value}, below {CHOICES[field]} expected")

    match field:
        case "global_address":
            put(0, 0, 32, value & 0xFFFFFFFF)
            put(1, 0, 32, value >> 32)
        case "rank":
            put(flags, RANK_SHIFT, 3, value)
        case "global_dim":
            put(8 + ordinal, 0, 32, value - 1 & 0xFFFFFFFF)
        case "global_stride":
            put(3 + ordinal, 0, 32, value >> 4 & 0xFFFFFFFF)
            put(7, 4 * ordinal, 4, value >> 36)
        case "box_dim":
            word, shift = (13, 24) if ordinal == 0 else (14, 8 * (ordinal - 1))
            put(word, shift, 8, value - 1)
        case "element_stride":
            put(13, 3 * ordinal, 3, value - 1)
        case "elemtype":
            code, tf32 = HARDWARE_ELEMENT[value]
            put(flags, ELEMENT_SHIFT, 4, code)
            if tf32 is not None:
                put(flags, TF32_SHIFT, 1, tf32)
        case "interleave_layout":
            put(flags, INTERLEAVE_SHIFT, 2, value)
        case "swizzle_mode":
            put(flags, SWIZZLE_SHIFT, 2, 0 if value == Swizzle.BYTES_96 else value)
            put(flags, SWIZZLE_96B_SHIFT, 1, int(value == Swizzle.BYTES_96))
        case "swizzle_atomicity":
            put(flags, ATOMICITY_SHIFT, 2, value)
        case "fill_mode":
            put(flags, FILL_SHIFT, 1, value)
        case _:
            raise UnsupportedInstruction(f"tensormap.replace of field .{field}")
