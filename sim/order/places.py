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
def lane_numbers(mask: int, times: int) -> np.ndarray:
    """The lanes in a mask, each so often. Read-only."""
    return np.repeat(np.array(lanes(mask), np.int64), times)


_PLACES: dict[tuple[int, int], tuple[np.ndarray, slice | np.ndarray, int, int]] = {}


def units_of(chunks: np.ndarray, per: int) -> tuple[slice | np.ndarray, int, int]:
    """(units as an index, lowest chunk, highest) of chunks of `per` units; chunks: numbers in an array that does not
    change."""
    held = _PLACES.get((id(chunks), per))
    if held is None or held[0] is not chunks:
        low, high = int(chunks.min()), int(chunks.max())
        where: slice | np.ndarray = slice(low * per, (high + 1) * per)
        if chunks.size < high - low + 1 or np.unique(chunks).size < high - low + 1:
            where = (chunks.reshape(-1, 1) * per + np.arange(per)).reshape(-1)
        if len(_PLACES) > 4096:
            _PLACES.clear()
        held = _PLACES[id(chunks), per] = (chunks, where, low, high)
    return held[1:]


@cache
def _steps(count: int, nbytes: int) -> bytes:
    return (np.arange(count, dtype=np.uint64) * np.uint64(nbytes)).tobytes()


def consecutive(addresses: np.ndarray, nbytes: int) -> bool:
    """Whether lanes access `nbytes` each one behind the other. addresses: of 64 bits."""
    count = len(addresses)
    if addresses.item(-1) - addresses.item(0) != (count - 1) * nbytes:
        return False
    return count < 3 or (addresses - addresses[0]).tobytes() == _steps(count, nbytes)


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
    result.touched = shadow.touched
    flat = shadow.cells
    steps = tuple(stride * flat.itemsize for stride in strides)
    result.cells = np.ndarray(shape, flat.dtype, buffer=flat, offset=first * flat.itemsize, strides=steps)
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
