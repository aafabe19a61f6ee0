"""Records who wrote each byte of the caller's tensors last, to find the store that left the first wrong element of a
result.

`with recording_stores() as stores:` notes every store to global memory of all runs inside, and
`stores.compare(tensor, expected)` names the first one, in time, whose value stayed and is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from warpspec.sim.errors import WrongResult, format_lanes
from warpspec.sim.lanes import FULL_MASK, lanes
from warpspec.sim.order.checker import OrderChecker
from warpspec.sim.order.findings import Access

TOLERANCES = {  # (relative, absolute) of torch.testing.assert_close
    torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}  # fmt: skip


@dataclass(frozen=True)
class Store:
    """A store of lanes of a warp, or of an asynchronous operation. kernel: its kernel. number: number of the launch,
    from 1.

    mask, addresses, nbytes: the lanes and where each writes how much; 0 and None where it is no store of lanes.
    base: difference between a device address and the caller's.
    """

    access: Access
    kernel: str
    number: int
    mask: int
    addresses: np.ndarray | None
    nbytes: int
    base: int

    def describe(self, address: int) -> str:
        """Format it. address: the caller's address of the element in question."""
        text = self.access.describe()
        if self.addresses is not None:
            first = self.addresses.astype(np.int64) - self.base
            those = [lane for lane, at in zip(lanes(self.mask), first.tolist(), strict=False)
                     if at <= address < at + self.nbytes]  # fmt: skip
            if len(self.addresses) == 1:
                those = lanes(self.mask)
            text = text.replace(" writes", f" lane {format_lanes(tuple(map(int, those)))} writes", 1)
        return f"{text}\n  in launch {self.number}, kernel {self.kernel}"


class Stores:
    """The stores of some runs. `recording_stores` makes it."""

    def __init__(self) -> None:
        self._stores: list[Store | None] = [None]
        self._last: dict[
            tuple[int, int], np.ndarray
        ] = {}  # numbers of stores, by (caller's address, bytes of a unit)
        self.launches = 0

    def note(self, host: int, unit: int, units: int, store: Store) -> tuple[np.ndarray, int]:
        """Record a store to the caller's memory at `host`, which has `units` units of `unit` bytes.

        Returns the array of the last store's number for each unit, which the caller changes, and this store's number.
        """
        last = self._last.get((host, unit))
        if last is None or len(last) < units:
            last = self._last[host, unit] = np.zeros(units, np.int32)
        self._stores.append(store)
        return last, len(self._stores) - 1

    def _number(self, address: int) -> int:
        """The number of the last store to a byte of the caller's; 0: there was none."""
        found = 0
        for (host, unit), last in self._last.items():
            if host <= address < host + unit * len(last):
                found = max(found, int(last[(address - host) // unit]))
        return found

    def compare(
        self,
        tensor: torch.Tensor,
        expected: torch.Tensor,
        *,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        """Raise WrongResult if a tensor is not as expected: the error names the earliest store that left a wrong
        element.

        tensor: CPU tensor that the runs wrote, any shape. expected: of the same shape; another dtype is converted.
        rtol, atol: elements may differ by atol + rtol * |expected|; by default as torch.testing.assert_close has them
        (two NaN are equal). ValueError for another shape.
        """
        if tensor.shape != expected.shape:
            raise ValueError(
                f"expected has shape {tuple(expected.shape)}; the tensor's is {tuple(tensor.shape)}"
            )
        default = TOLERANCES.get(tensor.dtype, (0.0, 0.0))
        rtol, atol = default[0] if rtol is None else rtol, default[1] if atol is None else atol
        got, wanted = _comparable(tensor), _comparable(expected.to(tensor.dtype))
        wrong = torch.nonzero(
            ~torch.isclose(got, wanted, rtol=rtol, atol=atol, equal_nan=True).reshape(got.shape)
        )
        if not len(wrong):
            return
        steps = torch.tensor(tensor.stride(), dtype=torch.int64) * tensor.element_size()
        addresses = (wrong * steps).sum(1) + tensor.data_ptr()
        numbers = [self._number(address) for address in addresses.tolist()]
        written = [(number, at) for at, number in enumerate(numbers) if number]
        at = min(written)[1] if written else 0
        index = tuple(wrong[at].tolist())
        text = (
            f"{len(wrong)} of {tensor.numel()} elements differ from what was expected; the first that was written, at "
            f"{index}, is {_shown(got[index])}, expected {_shown(wanted[index])}"
        )
        if written:
            text += f"\n  written by {self._stores[numbers[at]].describe(int(addresses[at]))}"
        if len(written) < len(wrong):
            missing = tuple(wrong[numbers.index(0)].tolist())
            text += f"\n  nothing wrote {len(wrong) - len(written)} of them, the first at {missing}"
        raise WrongResult(text)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as numbers that torch compares; bytes of formats that it cannot convert."""
    try:
        return tensor.double() if tensor.is_floating_point() else tensor
    except (RuntimeError, NotImplementedError):
        return tensor.view(torch.uint8)


def _shown(element: torch.Tensor) -> str:
    return str(element.item())


_active: Stores | None = None


def active() -> Stores | None:
    """The record to which current runs add their stores; None: there is none."""
    return _active


@contextmanager
def recording_stores() -> Iterator[Stores]:
    """A context in which runs record the last store to each byte of the caller's tensors.

    The warps of such a run execute on one core, about half as fast.
    """
    global _active
    before, _active = _active, Stores()
    try:
        yield _active
    finally:
        _active = before


class StoreRecorder(OrderChecker):
    """Notes the stores of one launch, and checks its memory order if `check` is set."""

    def __init__(self, program, gmem, overlap, stores: Stores, check: bool):
        super().__init__(program, gmem, overlap)
        self._stores, self._check = stores, check
        self._mask, self._addresses, self._nbytes = 0, None, 0

    def lane_access(self, w, ins, addresses, mask=FULL_MASK, strong=False) -> None:
        self._mask = mask
        super().lane_access(w, ins, addresses, mask, strong)
        self._mask = 0

    def global_rows(self, addresses, nbytes, access, clock) -> None:
        self._addresses, self._nbytes = addresses, nbytes
        super().global_rows(addresses, nbytes, access, clock)
        self._addresses = None

    def _touch_global(self, memory, where, access, clock, address, views=None) -> None:
        host = self.gmem.host_address(memory.allocation) if access.write else None
        if host is not None:
            addresses = None if self._addresses is None or not self._mask else self._addresses.copy()
            store = Store(
                access, self.program.name, self._stores.launches, self._mask, addresses, self._nbytes,
                memory.allocation.address - host,
            )  # fmt: skip
            lead = memory.allocation.address - memory.base
            last, number = self._stores.note(host - lead, memory.unit, memory.size, store)
            if views is not None:
                first, shape, strides = views
                steps = tuple(stride * last.itemsize for stride in strides)
                last = np.ndarray(shape, last.dtype, last, first * last.itemsize, steps)
            last[where] = number
        if self._check:
            super()._touch_global(memory, where, access, clock, address, views)

    def touch(self, shadow, where, access, clocks, memory, place, cta=None) -> None:
        if self._check:
            super().touch(shadow, where, access, clocks, memory, place, cta)

    def all_found(self) -> dict:
        return super().all_found() if self._check else {}

    def report(self, *arguments, **options) -> None:
        if self._check:
            super().report(*arguments, **options)

    def cta_exits(self, cta) -> None:
        if self._check:
            super().cta_exits(cta)
