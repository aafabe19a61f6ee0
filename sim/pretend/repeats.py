"""Calls that repeat an earlier one on the same bytes: benchmarks warm up and time a kernel hundreds of times.

A run is determined by its arguments, the bytes that they reach and the seed. So a call whose tensors, wherever they
lie, have the shapes, strides and contents of an earlier call's gets that call's results, and counts as a call like any
other. Not remembered: the first call of its kind, kernels that print, read a timer or have variables of their own,
calls that reach memory through addresses, and calls with arguments of a kind that is not listed here.
"""

from __future__ import annotations

import ctypes
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import cutlass  # noqa: F401  (as a whole first: tests/test_layers.py)
import torch
from cutlass.base_dsl.typing import Numeric
from cutlass.cute import runtime as cute_runtime

from warpspec.sim.clocks.record import Recording
from warpspec.sim.host import HostModule
from warpspec.sim.host_tensor import SOURCE
from warpspec.sim.memory import HOST_ALIGNMENT, put_back
from warpspec.sim.report import SimReport

MOST_BYTES = 1 << 27  # kept of all calls
OWN_STATE = re.compile(
    r"vprintf|%globaltimer|^\s*\.(?:visible|weak|extern|common)?\s*\.?global\s", re.MULTILINE
)


class Unknown(Exception):
    """An argument that may be anything."""


@dataclass(frozen=True)
class Tensors:
    """The tensors of a call. addresses: of their first elements. form: what else determines the call."""

    addresses: tuple[int, ...]
    form: tuple


@dataclass
class Remembered:
    """A call's effect. places: (tensor, bytes before its first element, bytes there before the call, and after it)."""

    places: list[tuple[int, int, bytes, bytes]]
    report: SimReport

    @property
    def size(self) -> int:
        return sum(len(before) + len(after) for _, _, before, after in self.places)


class Repeats:
    """What calls did, by what they were given; the least recently used go first."""

    def __init__(self) -> None:
        self._calls: OrderedDict[tuple, list[Remembered]] = OrderedDict()
        self._kept: dict[int, object] = {}
        self._bytes = 0

    def find(self, compiled: object, given: Tensors) -> SimReport | None:
        """Give the tensors the results of a call that had these contents, and return its report; None if there is no
        such call."""
        key = id(compiled), given.form
        for call in self._calls.get(key, ()):
            places = [(given.addresses[at] - low, before, after) for at, low, before, after in call.places]
            if all(ctypes.string_at(address, len(before)) == before for address, before, _ in places):
                put_back((address, after) for address, _, after in places)
                self._calls.move_to_end(key)
                return call.report
        return None

    def expects(self, compiled: object, given: Tensors) -> bool:
        """Whether to remember a call: whether there was one of its kind before."""
        key = id(compiled), given.form
        if key in self._calls:
            return True
        self._calls[key] = []
        self._kept[id(compiled)] = compiled  # alive, so that no other has its id
        return False

    def add(
        self, compiled: object, given: Tensors, originals: list[tuple[int, bytes]], report: SimReport
    ) -> None:
        """Remember a call that was run. originals: what it was given, as `memory.keeping_originals` has it."""
        if OWN_STATE.search(HostModule.of(compiled).ptx):
            return
        places = []
        for address, before in originals:
            inside = [
                at
                for at, first in enumerate(given.addresses)
                if address <= first < address + max(len(before), 1)
            ]
            if not inside:
                return  # reached through an address
            after = ctypes.string_at(address, len(before))
            places.append((inside[0], given.addresses[inside[0]] - address, before, after))
        call = Remembered(places, report)
        self._bytes += call.size
        self._calls[id(compiled), given.form].append(call)
        while self._bytes > MOST_BYTES:
            _, dropped = self._calls.popitem(last=False)
            self._bytes -= sum(call.size for call in dropped)


def tensors_of(args: tuple, kwargs: dict, recording: Recording | None = None) -> Tensors | None:
    """The tensors among the arguments of a call; None if what else there is is not known to determine it.

    recording: the active one, which decides what part of the call is run, and whether it leaves traces.
    """
    addresses: list[int] = []
    storages: dict[int, int] = {}
    try:
        form = (*_form(args, addresses, storages), *_form(tuple(sorted(kwargs.items())), addresses, storages))
    except Unknown:
        return None
    return Tensors(tuple(addresses), (recording, *form))


def _form(value: object, addresses: list[int], storages: dict[int, int]) -> Iterator[object]:
    """What determines a call of an argument, besides the bytes that it reaches."""
    if type(value) is cute_runtime.TensorAdapter:
        value = value._arg
    if isinstance(value, torch.Tensor):
        storage, address = value.untyped_storage().data_ptr(), value.data_ptr()
        yield value.dtype, tuple(value.shape), value.stride()
    elif type(value) is cute_runtime._Tensor:
        source, address = getattr(value, SOURCE, None), value.data_ptr
        known = isinstance(source, torch.Tensor)
        storage = source.untyped_storage().data_ptr() if known else address // HOST_ALIGNMENT * HOST_ALIGNMENT
        yield str(value.element_type), tuple(value.shape), tuple(value.stride)
        yield tuple(value.dynamic_shapes_mask), tuple(value.dynamic_strides_mask)
    elif value is None or isinstance(value, bool | int | float | str):
        yield type(value), repr(value)
        return
    elif isinstance(value, Numeric) and isinstance(value.value, bool | int | float):
        yield type(value), repr(value.value)
        return
    elif isinstance(value, tuple | list):
        yield type(value), len(value)
        for item in value:
            yield from _form(item, addresses, storages)
        return
    elif type(value).__name__ == "CUstream":
        return
    else:
        raise Unknown
    # Tensors that share memory do so in the other call, too, and each is aligned as there.
    yield storages.setdefault(storage, len(storages)), address - storage
    addresses.append(address)
