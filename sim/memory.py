"""Global memory of the simulated device.

Every allocation is an anonymous shared mapping of its own, with a guard zone on either side, so that worker
processes forked later see the same bytes. A simulated global address is the host address of its byte;
`GlobalMemory.view` is the checked access, and `GlobalMemory.ranges` the table with which generated code makes the same
check.

The caller's tensors are staged: the bytes a tensor can reach are copied in before the run, and back after it if they
have changed.
Views that overlap in the caller's memory share one allocation.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from warpspec.sim.errors import HostError, MemoryFault

WINDOW_SHIFT = 56  # a generic address: window << WINDOW_SHIFT | address in the window
SHARED_WINDOW = 1 << WINDOW_SHIFT  # generic address of shared memory: SHARED_WINDOW + shared address
LOCAL_WINDOW = 2 << WINDOW_SHIFT  # generic address of local memory: LOCAL_WINDOW + local address
CTA_RANK_SHIFT = 24  # shared address: (CTA rank in the cluster << CTA_RANK_SHIFT) | offset
SHARED_BASE_OFFSET = 1024  # the first bytes of a CTA's shared memory are reserved for the system

DEVICE_ALIGNMENT = 256  # bytes, of every allocation the CUDA runtime makes
# Bytes, of torch's CPU allocations: up to here a host address reveals the offset in its storage.
HOST_ALIGNMENT = 64
GUARD_BYTES = 4096
GUARD_BYTE = 0xA5
POISON_BYTE = 0xFF  # device allocations start as NaN in every floating-point format
POINTER_BYTES = 8

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def in_shared_window(address: int) -> bool:
    """Whether a generic address is one of shared memory."""
    return address >> WINDOW_SHIFT == SHARED_WINDOW >> WINDOW_SHIFT


def in_local_window(address: int) -> bool:
    """Whether a generic address is one of local memory."""
    return address >> WINDOW_SHIFT == LOCAL_WINDOW >> WINDOW_SHIFT


@dataclass(eq=False)
class Allocation:
    """A range of global memory: `address` to `address + nbytes`, `name` as it appears in diagnoses."""

    address: int
    nbytes: int
    name: str
    writable: bool
    array: np.ndarray = field(repr=False)  # uint8 [nbytes]
    _guards: tuple[np.ndarray, np.ndarray] = field(repr=False)

    @property
    def end(self) -> int:
        return self.address + self.nbytes


@dataclass(frozen=True)
class HostRegion:
    """Caller's bytes `low` to `high` (host addresses) that an argument can reach.

    storage: host address at which the tensor's storage begins, None if not known. holds_pointers: translate its 8-byte
    words that point into a staged region, when copying in and out. keep: object that keeps it alive.
    """

    low: int
    high: int
    name: str
    storage: int | None = None
    holds_pointers: bool = False
    keep: object = field(default=None, repr=False, compare=False)


@dataclass(eq=False)
class _Staged:
    """Overlapping host regions and their allocation."""

    low: int
    high: int
    regions: list[HostRegion]
    allocation: Allocation

    @property
    def read_only(self) -> bool:
        """Whether the caller's memory must not be written, as that of a file that is mapped for reading."""
        arrays = [region.keep for region in self.regions]
        return all(isinstance(array, np.ndarray) and not array.flags.writeable for array in arrays)

    def is_changed(self) -> bool:
        """Whether the allocation differs from the caller's memory."""
        return _memcmp(self.low, self.allocation.address, self.high - self.low) != 0


_originals: list[tuple[int, bytes]] | None = None


@contextmanager
def keeping_originals() -> Iterator[list[tuple[int, bytes]]]:
    """A context that gives (address, bytes) of what the runs inside it overwrite in the caller's memory."""
    global _originals
    before, _originals = _originals, []
    try:
        yield _originals
    finally:
        _originals = before


def put_back(originals: Iterable[tuple[int, bytes]]) -> None:
    """Restore what `keeping_originals` gave. Its owners must be alive."""
    for address, data in originals:
        ctypes.memmove(address, data, len(data))


class GlobalMemory:
    """Allocations of one run of a host function. Not thread safe; forked processes may use it at once."""

    def __init__(self) -> None:
        self._allocations: list[Allocation] = []
        self._lows: list[int] = []
        self._freed: list[tuple[int, int, str]] = []
        self._staged: list[_Staged] = []
        self._ranges: np.ndarray | None = None
        # Called with (address, shape, strides) of boxes that TMA copies, to check their order.
        self.watch = None
        self.on_view = None  # called with each allocation of which a view is given, but for reductions
        self.version = 0  # incremented with every change of the set of allocations

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Live allocations by ascending address."""
        return tuple(self._allocations)

    @property
    def ranges(self) -> np.ndarray:
        """uint64 [n, 3], C-contiguous, ascending: first address, one past the last, 1 if writable."""
        if self._ranges is None:
            rows = [(a.address, a.end, int(a.writable)) for a in self._allocations if a.nbytes]
            self._ranges = np.array(rows, dtype=np.uint64).reshape(-1, 3)
        return self._ranges

    def allocate(
        self, nbytes: int, name: str, *, offset: int = 0, writable: bool = True, data: bytes | None = None
    ) -> Allocation:
        """A new allocation whose address is `offset` modulo DEVICE_ALIGNMENT.

        Holds `data` (at most nbytes) followed by poison; all poison without it.
        """
        if nbytes < 0:
            raise ValueError(f"allocation of {nbytes} bytes")
        if data is not None and len(data) > nbytes:
            raise ValueError(f"{len(data)} bytes of data for an allocation of {nbytes}")
        lead = GUARD_BYTES + offset % DEVICE_ALIGNMENT
        mapping = mmap.mmap(-1, lead + nbytes + GUARD_BYTES)  # page aligned, shared between forked processes
        whole = np.frombuffer(mapping, dtype=np.uint8)
        array = whole[lead : lead + nbytes]
        guards = (whole[:lead], whole[lead + nbytes :])
        for guard in guards:
            guard[:] = GUARD_BYTE
        filled = 0 if data is None else len(data)
        if filled:
            array[:filled] = np.frombuffer(data, dtype=np.uint8)
        array[filled:] = POISON_BYTE
        allocation = Allocation(whole.ctypes.data + lead, nbytes, name, writable, array, guards)
        at = bisect_right(self._lows, allocation.address)
        self._allocations.insert(at, allocation)
        self._lows.insert(at, allocation.address)
        self._changed()
        return allocation

    def free(self, address: int) -> None:
        """Release the allocation that begins at `address`; MemoryFault if none does."""
        at = bisect_right(self._lows, address) - 1
        if at < 0 or self._lows[at] != address:
            raise MemoryFault(
                f"free of {address:#x}, which is not the start of an allocation: {self._nearest(address)}"
            )
        allocation = self._allocations.pop(at)
        del self._lows[at]
        self._freed.append((allocation.address, allocation.end, allocation.name))
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._ranges = None

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds the byte at `address`."""
        at = bisect_right(self._lows, address) - 1
        if at >= 0 and address < self._allocations[at].end:
            return self._allocations[at]
        return None

    def view(self, address: int, nbytes: int, write: bool = False) -> np.ndarray:
        """uint8 [nbytes] over the bytes at `address`. MemoryFault unless they lie in one allocation,
        and in a writable one if `write`."""
        address = int(address)
        at = bisect_right(self._lows, address) - 1
        if at >= 0:
            allocation = self._allocations[at]
            offset = address - allocation.address
            if offset + nbytes <= allocation.nbytes and (allocation.writable or not write):
                if self.on_view is not None:
                    self.on_view(allocation)
                return allocation.array[offset : offset + nbytes]
        raise MemoryFault(self.describe(address, nbytes, write))

    @contextmanager
    def viewed_by(self, reductions: bool) -> Iterator[None]:
        """Views that are given meanwhile are for reductions, or not."""
        before = self.on_view
        self.on_view = None if reductions else before
        try:
            yield
        finally:
            self.on_view = before

    def snapshot(self) -> list[tuple[Allocation, np.ndarray]]:
        """Copies of what may be written, for `restore`."""
        return [(a, a.array.copy()) for a in self._allocations if a.writable]

    @staticmethod
    def restore(snapshot: list[tuple[Allocation, np.ndarray]]) -> None:
        """Give memory the contents that it had at a snapshot."""
        for allocation, contents in snapshot:
            allocation.array[:] = contents

    def describe(self, address: int, nbytes: int, write: bool = False) -> str:
        """Why an access faults, in words: the nearest allocation and how far off it is."""
        access = f"{nbytes}-byte {'write' if write else 'read'} at {address:#x}"
        if SHARED_WINDOW <= address < LOCAL_WINDOW:
            return f"{access}: shared memory, not global"
        if LOCAL_WINDOW <= address < LOCAL_WINDOW + SHARED_WINDOW:
            return f"{access}: local memory, not global"
        inside = self.find(address)
        if inside is not None:
            excess = address + nbytes - inside.end
            if excess <= 0:
                return f"{access}: {inside.name} is read-only"
            return (
                f"{access}: the last {excess} bytes are past the end of {inside.name} ({inside.nbytes} bytes)"
            )
        for low, high, name in self._freed:
            if low <= address < high:
                return f"{access}: inside {name}, which was freed"
        return f"{access}: {self._nearest(address)}"

    def _nearest(self, address: int) -> str:
        if not self._allocations:
            return "nothing is allocated"
        if address < mmap.PAGESIZE:
            return "null pointer"
        best, text = None, ""
        at = bisect_right(self._lows, address) - 1
        for allocation in self._allocations[max(at, 0) : at + 2]:
            if address >= allocation.end:
                distance, side = address - allocation.end, "past the end"
            elif address < allocation.address:
                distance, side = allocation.address - address, "before the start"
            else:
                return f"inside {allocation.name} at byte {address - allocation.address}"
            if best is None or distance < best:
                best, text = (
                    distance,
                    f"{distance} bytes {side} of {allocation.name} ({allocation.nbytes} bytes)",
                )
        return text

    def check_guards(self) -> None:
        """Raise MemoryFault if an unchecked access wrote outside an allocation."""
        for allocation in self._allocations:
            for guard, side in zip(allocation._guards, ("before", "after"), strict=True):
                if (guard != GUARD_BYTE).any():
                    raise MemoryFault(
                        f"the guard zone {side} {allocation.name} was overwritten: a simulator error"
                    )

    def stage(self, regions: Iterable[HostRegion]) -> None:
        """Copy the caller's bytes in. One allocation for regions that overlap; call once, with all of them.

        An allocation keeps the offset of its first byte in the tensor's storage modulo DEVICE_ALIGNMENT, as
        device storages are aligned to that.
        """
        ordered = sorted(regions, key=lambda r: (r.low, r.high))
        groups: list[list[HostRegion]] = []
        end = -1
        for region in ordered:
            if groups and region.low < end:
                groups[-1].append(region)
            else:
                groups.append([region])
            end = max(end, region.high)
        for group in groups:
            low, high = group[0].low, max(r.high for r in group)
            storage = next((r.storage for r in group if r.storage is not None), None)
            offset = low % HOST_ALIGNMENT if storage is None else low - storage
            names = list(dict.fromkeys(r.name for r in group))
            name = f"argument {names[0]}" if len(names) == 1 else f"arguments {', '.join(names)}"
            allocation = self.allocate(high - low, name, offset=offset)
            if high > low:
                ctypes.memmove(allocation.address, low, high - low)
            self._staged.append(_Staged(low, high, group, allocation))
        self._translate(to_device=True)

    def device_address(self, host_address: int) -> int | None:
        """Simulated address of a staged byte of the caller's memory; None if it was not staged.

        The ends of a region (past its last byte, the start of an empty one) count if no region holds them.
        """
        edge = None
        for staged in self._staged:
            if staged.low <= host_address < staged.high:
                return staged.allocation.address + (host_address - staged.low)
            if host_address == staged.low:
                edge = staged.allocation.address
            elif host_address == staged.high and edge is None:
                edge = staged.allocation.end
        return edge

    def host_address(self, allocation: Allocation) -> int | None:
        """The caller's memory behind an allocation; None if there is none."""
        return next((staged.low for staged in self._staged if staged.allocation is allocation), None)

    def copy_back(self) -> None:
        """Write what has changed back to the caller's memory. Raises HostError if that is read-only, unless another
        error is on its way."""
        self._translate(to_device=False)
        changed = [staged for staged in self._staged if staged.is_changed()]
        for staged in changed:
            size = staged.high - staged.low
            if staged.read_only:
                continue
            if _originals is not None:
                _originals.append((staged.low, ctypes.string_at(staged.low, size)))
            ctypes.memmove(staged.low, staged.allocation.address, size)
        self._translate(to_device=True)
        kept = ", ".join(staged.allocation.name for staged in changed if staged.read_only)
        if kept and sys.exception() is None:
            raise HostError(f"{kept}: the array is read-only, and a kernel wrote to it")

    def _translate(self, to_device: bool) -> None:
        """Rewrite pointers kept in memory (arrays of addresses, as grouped kernels take them)."""
        live = [s for s in self._staged if s.high > s.low]
        host = sorted((s.low, s.high, s.allocation.address) for s in live)
        device = sorted((a, a + (high - low), low) for low, high, a in host)
        table = host if to_device else device
        if not table:
            return
        lows, highs, targets = (np.array(column, dtype=np.uint64) for column in zip(*table, strict=True))
        for staged in live:
            for region in staged.regions:
                if region.holds_pointers:
                    offset = region.low - staged.low
                    words = staged.allocation.array[offset : offset + (region.high - region.low)]
                    _translate_words(words, lows, highs, targets)


def _translate_words(data: np.ndarray, lows: np.ndarray, highs: np.ndarray, targets: np.ndarray) -> None:
    """Move each 8-byte word of uint8 `data` that lies in [lows[i], highs[i]) by targets[i] - lows[i]."""
    words = data[: data.size // POINTER_BYTES * POINTER_BYTES].view(np.uint64)
    at = np.searchsorted(lows, words, side="right").astype(np.int64) - 1
    safe = np.maximum(at, 0)
    hit = (at >= 0) & (words < highs[safe])
    words[hit] = words[hit] - lows[safe[hit]] + targets[safe[hit]]
