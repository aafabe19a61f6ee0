"""Tensors that a kernel reaches through addresses: pointer arguments, and addresses kept in int64 tensors.

On a GPU an address is enough. The simulator stages the memory behind it and must know its extent, so it looks for the
live tensor whose storage contains the address.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from warpspec.sim.host_tensor import device_of_memory
from warpspec.sim.memory import POINTER_BYTES, HostRegion

TABLE_WORDS = 1 << 16  # int64 tensors with more elements are not searched for addresses
LOWEST_ADDRESS, HIGHEST_ADDRESS = 1 << 16, 1 << 47  # user space on x86-64 Linux
TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


def behind(pointers: Mapping[str, int], known: Sequence[HostRegion]) -> list[HostRegion]:
    """Regions of the live CPU tensors and arrays that contain these addresses and are not covered by `known`.

    pointers: addresses by argument name. 64-bit integers in `known`, and in regions found, are searched for addresses,
    too. An address that lies in no tensor is left out.
    """
    pending = {address: f"`{name}`" for name, address in pointers.items()}
    for region in known:
        pending.update(dict.fromkeys(_addresses_in(region), region.name))
    covered = _Spans((r.low, r.high) for r in known)
    found: list[HostRegion] = []
    storages: _Storages | None = None
    while pending:
        address = next(iter(pending))
        source = pending.pop(address)
        if address in covered:
            continue
        storages = storages or _Storages()
        region = storages.find(address, source)
        if region is None:
            continue
        found.append(region)
        covered = _Spans((r.low, r.high) for r in (*known, *found))
        pending.update(dict.fromkeys(_addresses_in(region), region.name))
    return found


def _addresses_in(region: HostRegion) -> list[int]:
    """Distinct 64-bit words of a table of integers that are addresses mapped in this process."""
    count = (region.high - region.low) // POINTER_BYTES
    if not region.holds_pointers or not 0 < count <= TABLE_WORDS:
        return []
    words = np.unique(np.array((ctypes.c_uint64 * count).from_address(region.low), np.uint64))
    words = words[(words >= LOWEST_ADDRESS) & (words < HIGHEST_ADDRESS)].tolist()
    if not words:
        return []
    mapped = _mapped()
    return [word for word in words if word in mapped]


class _Spans:
    """A set of address ranges [low, high), to test whether addresses lie in one."""

    def __init__(self, spans: Iterable[tuple[int, int]]):
        self.lows: list[int] = []
        self.highs: list[int] = []
        for low, high in sorted(spans):
            if self.highs and low <= self.highs[-1]:
                self.highs[-1] = max(self.highs[-1], high)
            else:
                self.lows.append(low)
                self.highs.append(high)

    def __contains__(self, address: int) -> bool:
        at = bisect_right(self.lows, address) - 1
        return at >= 0 and address < self.highs[at]


def _mapped() -> _Spans:
    """The memory that this process has mapped writable (proc(5), /proc/pid/maps)."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, modes, *_ = line.split()
        low, high = (int(part, 16) for part in extent.split("-"))
        if modes.startswith("rw"):
            spans.append((low, high))
    return _Spans(spans)


class _Storages:
    """Live storages of CPU tensors and arrays, searched for when first needed."""

    def __init__(self) -> None:
        self.objects = gc.get_objects()
        self.tensors = [
            t for t in self.objects if type(t) in TENSOR_TYPES and device_of_memory(t).type == "cpu"
        ]
        self.arrays: list[np.ndarray] | None = None

    def find(self, address: int, source: str) -> HostRegion | None:
        """The storage that holds an address; None if no live tensor or array has it."""
        for tensor in self.tensors:
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            low = storage.data_ptr()
            if low <= address < low + storage.nbytes():
                wide = tensor.dtype in (torch.int64, torch.uint64)
                return HostRegion(low, low + storage.nbytes(), f"{source}'s target", low, wide, tensor)
        if self.arrays is None:
            self.arrays = _arrays(self.objects)
        for array in self.arrays:
            low, high = np.lib.array_utils.byte_bounds(array)
            if low <= address < high:
                wide = array.dtype.kind in "iu" and array.itemsize == POINTER_BYTES
                return HostRegion(low, high, f"{source}'s target", None, wide, array)
        return None


def _arrays(objects: Sequence[object]) -> list[np.ndarray]:
    """NumPy arrays, which the garbage collector does not list: what objects and calling frames refer to."""
    found = {id(o): o for o in gc.get_referents(*objects) if type(o) is np.ndarray}
    frame = sys._getframe()
    while frame is not None:
        found.update((id(o), o) for o in frame.f_locals.values() if type(o) is np.ndarray)
        frame = frame.f_back
    return sorted(found.values(), key=lambda a: -a.nbytes)
