"""Shared memory of a kernel, laid out as its configuration lists it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from warpspec.common.memory import Region

ELEMENTS = {"uint8": Uint8, "int32": Int32, "uint32": Uint32, "float32": Float32, "int64": Int64}


def allocate(regions: tuple[Region, ...]):
    """Allocate the regions, in order. The result has an attribute for each, by name, with ``data_ptr()``."""
    fields = {}
    for region in regions:
        kind = cute.struct.MemRange[ELEMENTS[region.element], region.count]
        fields[region.name] = cute.struct.Align[kind, region.alignment] if region.alignment else kind
    storage = cute.struct(type("Storage", (), {"__annotations__": fields}))
    return cutlass.memory.SmemAllocator().allocate(storage)
