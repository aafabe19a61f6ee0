"""Python arguments of a kernel given as PTX -> staged tensors and the parameter buffer that the PTX declares."""

from __future__ import annotations

import ctypes
import numbers
import struct
from collections.abc import Sequence

import numpy as np
import torch

from warpspec.sim.errors import HostError
from warpspec.sim.host_tensor import host_tensor, is_tensor
from warpspec.sim.instruction import Param
from warpspec.sim.memory import POINTER_BYTES, GlobalMemory, HostRegion
from warpspec.sim.reachable import behind
from warpspec.sim.tensor_maps import TensorMapOf, whole_elements
from warpspec.sim.tma.descriptor import DESCRIPTOR_BYTES

MAP_ALIGN = 64  # bytes, of a tensor map
FLOATS = {
    "f32": "<f",
    "f64": "<d",
    "f16": "<e",
    "b32": "<f",
    "b64": "<d",
}  # what a Python float becomes, by type
WANTED = (
    "a tensor, a number, None (a null pointer), bytes, a NumPy scalar, a ctypes structure, a tensor map, or a "
    "tuple of these (a struct's fields) is needed"
)


class KernelArguments:
    """A kernel's arguments: `tensors` by name, `stage` copies them to a device memory and packs the parameters."""

    def __init__(self, kernel: str, params: Sequence[Param], args: Sequence[object]):
        if len(args) != len(params):
            wanted = ", ".join(f"{p.name} ({p.size} bytes)" for p in params) or "none"
            raise HostError(f"{kernel} takes {len(params)} arguments ({wanted}); {len(args)} are given")
        self.params, self.args = params, args
        self.tensors: dict[str, torch.Tensor] = {}
        self._regions: list[HostRegion] = []
        self._pointers: dict[str, int] = {}
        for i, (param, value) in enumerate(zip(params, args, strict=True)):
            self._find(f"args[{i}] ({param.name})", value)
            size = len(self._packed(f"args[{i}] ({param.name})", param, value, None))
            if size != param.size:
                raise HostError(
                    f"args[{i}] ({param.name}) fills {size} bytes; the PTX declares {param.size}"
                    f"{f' of .{param.kind}' if param.kind else ''}"
                )
        self._regions += behind({n: at for n, at in self._pointers.items() if at}, self._regions)

    def _find(self, name: str, value: object) -> None:
        """Note the tensors in an argument, and the addresses that structures hold."""
        if isinstance(value, TensorMapOf):
            self._regions.append(value.tensor.region(f"`{name}`"))
            self._keep(name, value.source)
        elif is_tensor(value):
            self._regions.append(whole_elements(host_tensor(value, name)).region(f"`{name}`"))
            self._keep(name, value)
        elif isinstance(value, ctypes.Structure):
            for at, address in _pointers_in(value).items():
                self._pointers[f"{name} byte {at}"] = address
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                self._find(f"{name}[{i}]", item)

    def _keep(self, name: str, value: object) -> None:
        if isinstance(value, np.ndarray) and value.dtype.hasobject is False and value.flags.writeable:
            value = torch.from_numpy(value)
        if isinstance(value, torch.Tensor):
            self.tensors[name] = value

    def stage(self, memory: GlobalMemory) -> bytes:
        """Copy the tensors into `memory`; returns the parameter buffer, each parameter at its offset."""
        memory.stage(self._regions)
        buffer = bytearray(max((p.offset + p.size for p in self.params), default=0))
        for i, (param, value) in enumerate(zip(self.params, self.args, strict=True)):
            data = self._packed(f"args[{i}] ({param.name})", param, value, memory)
            buffer[param.offset : param.offset + param.size] = data
        return bytes(buffer)

    def _packed(self, name: str, param: Param, value: object, memory: GlobalMemory | None) -> bytes:
        """The bytes of one argument; memory: None while only their number matters."""
        if isinstance(value, TensorMapOf):
            data = _encoded(value, memory)
            if param.size != POINTER_BYTES:
                return data
            # A pointer to a map in global memory.
            made = None if memory is None else memory.allocate(DESCRIPTOR_BYTES, f"map `{name}`", data=data)
            return struct.pack("<Q", 0 if made is None else made.address)
        if isinstance(value, bool | numbers.Integral) and not isinstance(value, np.generic):
            return _integer(name, param, int(value))
        if isinstance(value, float):
            return _floating(name, param, value)
        return self._fields(name, value, memory)[0]

    def _fields(self, name: str, value: object, memory: GlobalMemory | None) -> tuple[bytes, int]:
        """(bytes, alignment) of an argument that says its own size."""
        if value is None:
            return bytes(POINTER_BYTES), POINTER_BYTES
        if is_tensor(value):
            tensor = host_tensor(value, name)
            address = 0 if memory is None else memory.device_address(tensor.address)
            return struct.pack("<Q", address), POINTER_BYTES
        if isinstance(value, TensorMapOf):
            return _encoded(value, memory), MAP_ALIGN
        if isinstance(value, np.generic):
            return value.tobytes(), value.itemsize
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value), 1
        if isinstance(value, ctypes.Structure):
            return _structure(name, value, memory), ctypes.alignment(value)
        if isinstance(value, tuple):
            data, widest = bytearray(), 1
            for i, item in enumerate(value):
                piece, align = self._fields(f"{name}[{i}]", item, memory)
                data += bytes(-len(data) % align) + piece
                widest = max(widest, align)
            return bytes(data) + bytes(-len(data) % widest), widest
        raise HostError(f"{name} is {value!r:.60} ({type(value).__name__}); {WANTED}")


def _encoded(value: TensorMapOf, memory: GlobalMemory | None) -> bytes:
    if memory is None:
        return bytes(DESCRIPTOR_BYTES)
    return value.encoded(memory.device_address(value.tensor.address))


def _integer(name: str, param: Param, value: int) -> bytes:
    bits = 8 * param.size
    if param.kind in ("f32", "f64", "f16"):
        return _floating(name, param, float(value))
    if param.size not in (1, 2, 4, 8) or not -(1 << bits - 1) <= value < 1 << bits:
        raise HostError(f"{name} is {value}, which does not fit the {param.size} bytes that the PTX declares")
    return (value & (1 << bits) - 1).to_bytes(param.size, "little")


def _floating(name: str, param: Param, value: float) -> bytes:
    form = FLOATS.get(param.kind)
    if form is None or struct.calcsize(form) != param.size:
        raise HostError(
            f"{name} is the float {value}; the PTX declares {param.size} bytes of .{param.kind}: pass an int, a NumPy "
            "scalar or bytes"
        )
    return struct.pack(form, value)


def _pointers_in(value: ctypes.Structure, base: int = 0) -> dict[int, int]:
    """Addresses in a structure's c_void_p fields, by their offset in it."""
    found: dict[int, int] = {}
    for field, kind, *_ in value._fields_:
        at = base + getattr(type(value), field).offset
        held = getattr(value, field)
        if kind is ctypes.c_void_p:
            found[at] = held or 0
        elif isinstance(held, ctypes.Structure):
            found |= _pointers_in(held, at)
    return found


def _structure(name: str, value: ctypes.Structure, memory: GlobalMemory | None) -> bytes:
    """A structure's bytes with the host addresses in its c_void_p fields as device addresses."""
    data = bytearray(bytes(value))
    if memory is None:
        return bytes(data)
    for at, address in _pointers_in(value).items():
        if address:
            device = memory.device_address(address)
            if device is None:
                raise HostError(f"{name} byte {at}: address {address:#x} lies in no live CPU tensor or array")
            data[at : at + POINTER_BYTES] = struct.pack("<Q", device)
    return bytes(data)
