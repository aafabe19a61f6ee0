"""Places of memory: in words, and as indices of shadow memory."""

from __future__ import annotations

from functools import cache

import numpy as np

from warpspec.sim.lanes import lanes
from warpspec.sim.memory import (
    SHARED_BASE_OFFSET,
)
from warpspec.sim.order.shadow import Shadow
from warpspec.sim.order.state import GlobalShadow
from warpspec.sim.tcgen05.memory import LANES

SHARED, GLOBAL, TENSOR_MEMORY, TENSOR_MAPS = "shared memory", "global memory", "tensor memory", "tensor maps"


@cache
def lane_numbers(mask: int) -> np.ndarray:
    """The lanes in a mask, uint8. Read-only."""
    return np.array(lanes(mask), np.uint8)


_SPANS: dict[int, tuple[np.ndarray, tuple[int, int, bool]]] = {}


def span(chunks: np.ndarray) -> tuple[int, int, bool]:
    """(lowest, highest, whether all between are there) of an array of numbers that does not change."""
    held = _SPANS.get(id(chunks))
    if held is None or held[0] is not chunks:
        low, high = int(chunks.min()), int(chunks.max())
        dense = chunks.size >= high - low + 1 and np.unique(chunks).size == high - low + 1
        if len(_SPANS) > 4096:
            _SPANS.clear()
        held = _SPANS[id(chunks)] = (chunks, (low, high, dense))
    return held[1]


def runs(mask: int) -> list[tuple[int, int]]:
    """(first, length) of each run of set bits."""
    found, at = [], 0
    while mask >> at:
        if mask >> at & 1:
            stop = at
            while mask >> stop & 1:
                stop += 1
            found.append((at, stop - at))
            at = stop
        else:
            at += 1
    return found


def part(shadow: Shadow, view: tuple) -> Shadow:
    """The part of a flat shadow that (first unit, shape, strides in units) names, as views."""
    first, shape, strides = view
    result = Shadow.__new__(Shadow)
    for name in ("writes", "reads"):
        flat = getattr(shadow, name)
        steps = tuple(stride * flat.itemsize for stride in strides)
        setattr(
            result,
            name,
            np.ndarray(shape, flat.dtype, buffer=flat, offset=first * flat.itemsize, strides=steps),
        )
    return result


def shared_place(cta, offset: int, nbytes: int) -> str:
    """Bytes of a CTA's shared memory in words."""
    name = cta.names.place(offset) or f"byte {offset - SHARED_BASE_OFFSET} on"
    return f"offset {offset:#x} to {offset + nbytes - 1:#x} of CTA {cta.coords} ({name})"


def global_place(memory: GlobalShadow, address: int) -> str:
    """A byte of an allocation in words."""
    return f"{memory.allocation.name} from byte {address - memory.allocation.address} on"


def tensor_place(cta, where) -> str:
    """Lanes and columns of a CTA's tensor memory in words."""
    lanes_, columns = where
    if isinstance(columns, slice):
        shown = f"columns {columns.start} to {columns.stop - 1}"
    else:
        shown = f"columns {int(np.min(columns))} to {int(np.max(columns))}"
    if isinstance(lanes_, slice):
        start, stop = lanes_.start or 0, LANES if lanes_.stop is None else lanes_.stop
        return f"lanes {start} to {stop - 1}, {shown} of CTA {cta.coords}"
    return f"lanes {int(np.min(lanes_))} to {int(np.max(lanes_))}, {shown} of CTA {cta.coords}"
