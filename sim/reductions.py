"""Reductions into global memory that a share of a launch keeps back, so that shares run on several cores.

The order in which CTAs reduce into one place is open, and float sums depend on it. A share therefore notes its
reductions; when all shares have ended they are applied, those of the first share first. Results do not depend on the
number of cores, and the same seed gives the same bits. A share that would see memory it has noted reductions of (it
loads or stores there) stops with `SeenReductions`, and the launch runs again in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from warpspec.sim.memory import Allocation, GlobalMemory
from warpspec.sim.tma import reduction


class SeenReductions(Exception):
    """A share of a launch uses memory that it has reduced into: its clusters cannot run apart from the others."""


@dataclass(frozen=True)
class Kept:
    """Reductions of one instruction. at: address of each lane's bytes, uint64 [n], or of a view's first byte, with the
    view's shape and strides. data: uint8 [n, bytes], or of the view's shape."""

    operation: str
    element: str
    at: np.ndarray | int
    data: np.ndarray
    strides: tuple[int, ...] = ()

    def apply(self, gmem: GlobalMemory) -> None:
        meet = reduction.combine(self.operation, self.element)
        if isinstance(self.at, int):
            span = sum((n - 1) * s for n, s in zip(self.data.shape, self.strides, strict=True)) + 1
            flat = gmem.view(self.at, span, write=True)
            meet(np.lib.stride_tricks.as_strided(flat, self.data.shape, self.strides), self.data)
            return
        nbytes = self.data.shape[1]
        low, high = int(self.at.min()), int(self.at.max())
        home = gmem.find(low)
        if len(np.unique(self.at)) == len(self.at) and home is not None and high + nbytes <= home.end:
            index = (self.at - np.uint64(home.address)).astype(np.intp)[:, None] + np.arange(nbytes)
            cells = home.array[index]
            meet(cells, self.data)
            home.array[index] = cells
            return
        for address, data in zip(self.at.tolist(), self.data, strict=True):
            meet(gmem.view(address, nbytes, write=True), data)


class Reductions:
    """What one share keeps back. ranges: the table by which its native code checks accesses (`GlobalMemory.ranges`)."""

    def __init__(self, gmem: GlobalMemory, ranges: np.ndarray):
        self.gmem, self.ranges = gmem, ranges
        self.kept: list[Kept] = []
        self.reduced: set[Allocation] = set()

    def __enter__(self) -> None:
        self.gmem.on_view = self._see

    def __exit__(self, *_: object) -> None:
        self.gmem.on_view = None

    def _see(self, allocation: Allocation) -> None:
        if allocation in self.reduced:
            raise SeenReductions

    def meet(self, operation: str, element: str) -> Callable[[np.ndarray, np.ndarray], None]:
        """Note a reduction of a source into a view of global memory, as `reduction.combine` would do it."""
        reduction.combine(operation, element)  # refuses what the ISA does not have

        def note(destination: np.ndarray, source: np.ndarray) -> None:
            at = destination.__array_interface__["data"][0]
            self._withdraw(at)
            data = np.broadcast_to(source, destination.shape).copy()
            self.kept.append(Kept(operation, element, at, data, destination.strides))

        return note

    def lanes(self, operation: str, element: str, addresses: np.ndarray, data: np.ndarray) -> None:
        """Note reductions of lanes: their bytes, uint8 [n, bytes], into the places at their addresses, uint64 [n]."""
        reduction.combine(operation, element)
        with self.gmem.viewed_by(reductions=True):
            for address in addresses.tolist():
                self.gmem.view(address, data.shape[1], write=True)
                self._withdraw(address)
        self.kept.append(Kept(operation, element, addresses, data))

    def _withdraw(self, address: int) -> None:
        """Let every other access to the allocation stop the share."""
        home = self.gmem.find(address)
        if home is None or home in self.reduced:
            return
        self.reduced.add(home)
        row = np.flatnonzero(self.ranges[:, 0] == np.uint64(home.address))
        self.ranges[row, 1] = home.address

    def holds(self, address: int) -> bool:
        """Whether an address is one whose memory has been reduced into."""
        return self.gmem.find(address) in self.reduced
