"""Tensor memory access as pure logic: descriptors, swizzles, box copies and reductions, without a machine."""

from warpspec.sim.tma.copy import (
    load_box,
    load_rows,
    read_shared,
    store_box,
    store_rows,
    write_shared,
)
from warpspec.sim.tma.descriptor import (
    DESCRIPTOR_BYTES,
    ElementType,
    Interleave,
    Swizzle,
    SwizzleAtomicity,
    TensorMap,
    decode,
    encode,
    replace_field,
)

__all__ = [
    "DESCRIPTOR_BYTES",
    "ElementType",
    "Interleave",
    "Swizzle",
    "SwizzleAtomicity",
    "TensorMap",
    "decode",
    "encode",
    "load_box",
    "load_rows",
    "read_shared",
    "replace_field",
    "store_box",
    "store_rows",
    "write_shared",
]
