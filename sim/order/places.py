"""Places of memory: in words, and as indices of shadow memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

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


@dataclass(frozen=True, slots=True)
class LaneShape:
    """The units that lanes access, from the unit of the first lane's address on. low: the lowest, counted from that
    one; span: units from the lowest to the highest; units: each lane's units counted from the lowest, None where they
    are all of the span, each once; lanes: the lane of each of them, or of each of the span."""

    low: int
    span: int
    units: np.ndarray | None
    lanes: np.ndarray

    def at(self, first: int) -> slice | np.ndarray:
        """The units as an index, where the first lane's begin with `first`."""
        low = first + self.low
        return slice(low, low + self.span) if self.units is None else self.units + low


def lane_shape(addresses: np.ndarray, nbytes: int, unit: int, mask: int) -> LaneShape | None:
    """The units that lanes (those of the mask, 0: it does not matter) access `nbytes` each at; None where these are no
    whole units. addresses: of 64 bits, of the first lane first."""
    if nbytes % unit or addresses.item(0) % unit:
        return None
    return _lane_shape((addresses - addresses[0]).tobytes(), nbytes, unit, mask)


@lru_cache(maxsize=1 << 12)
def _lane_shape(steps: bytes, nbytes: int, unit: int, mask: int) -> LaneShape | None:
    behind_first = np.frombuffer(steps, np.int64)
    if (behind_first % unit).any():
        return None
    per = nbytes // unit
    units = (behind_first[:, None] // unit + np.arange(per)).reshape(-1)
    executing = lane_numbers(mask, per) if mask else np.zeros(units.size, np.int64)
    low = int(units.min())
    span = int(units.max()) + 1 - low
    if units.size == span and np.unique(units).size == span:
        return LaneShape(low, span, None, executing[np.argsort(units)])
    return LaneShape(low, span, units - low, executing)


def of_lanes(values: np.ndarray, mask: int) -> np.ndarray:
    """Values, of 32, that belong to lanes of a mask."""
    first = (mask & -mask).bit_length() - 1
    run = mask >> first
    if run & run + 1 == 0:
        return values[first : first + run.bit_length()]
    return values[lanes(mask)]


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
