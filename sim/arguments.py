"""Python arguments of a compiled host function -> staged tensors and packed argument slots.

Arguments are flattened as the DSL flattens them when it compiles: one slot for each tensor, pointer, scalar
and stream; tuples, lists and dataclasses by element; None, constexpr fields and the Python numbers of a
NamedTuple or of a shape annotation take no slot.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import numbers
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import cuda.bindings.driver as cuda_driver
import cuda.bindings.runtime as cuda_runtime
import numpy as np
import torch
from cutlass import cute
from cutlass.base_dsl.runtime.jit_arg_adapters import is_constexpr_field
from cutlass.base_dsl.typing import Numeric, NumericMeta
from cutlass.cute import runtime as cute_runtime
from cutlass.cutlass_dsl.cutlass import is_cute_algebra_type

from warpspec.sim.errors import HostError
from warpspec.sim.host_tensor import HostTensor, fit_tensor, host_tensor, is_tensor
from warpspec.sim.memory import GlobalMemory
from warpspec.sim.reachable import behind
from warpspec.sim.signature import PointerType, Slot, TensorType

FLOAT_FORMATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
POINTER_BITS = 64
WANTS = "the compiled signature wants"


@dataclass(frozen=True)
class Value:
    """One argument slot's Python value; `name` is its path, such as `params.q` or `tensors[1]`."""

    name: str
    value: object


def flatten(
    name: str, value: object, annotation: object = None, *, by_field: bool = False
) -> Iterator[Value]:
    """The slots that `value` fills, in order. by_field: result of `_of_fields` for a NamedTuple's Python numbers."""
    annotation = _strip_optional(annotation)
    if takes_stream(annotation):
        yield Value(name, _Handle.of_stream(value, name))
    elif value is None:
        return
    elif isinstance(annotation, NumericMeta) or is_tensor(value) or _is_pointer(value):
        yield Value(name, value)
    elif _is_stream(value):
        yield Value(name, _Handle.of_stream(value, name))
    elif isinstance(value, (cuda_driver.CUevent, cuda_runtime.cudaEvent_t)):
        yield Value(name, _Handle(value))
    elif isinstance(value, cute_runtime._FakeTensor):
        raise HostError(f"argument `{name}`: a fake tensor has no data; pass a CPU tensor")
    elif annotation is not None and is_cute_algebra_type(annotation):
        yield from _flatten_static_numbers(name, value)
    elif isinstance(value, (bool, numbers.Number, np.generic, Numeric)):
        yield Value(name, value)
    elif type(value) in (list, tuple):
        for i, element in enumerate(value):
            yield from flatten(f"{name}[{i}]", element, by_field=by_field)
    elif isinstance(value, tuple) and by_field:
        yield from _of_fields(name, value)
    elif isinstance(value, tuple):
        yield from _flatten_static_numbers(name, value)
    elif isinstance(value, type):
        return  # fixed when it was compiled
    elif hasattr(value, "__c_pointers__"):
        for i, pointer in enumerate(value.__c_pointers__()):
            yield Value(f"{name} (slot {i})", _Opaque(int(getattr(pointer, "value", pointer)), value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if not is_constexpr_field(field, value):
                of_field = getattr(value, field.name)
                yield from flatten(f"{name}.{field.name}", of_field, field.type, by_field=by_field)
    else:
        raise HostError(f"argument `{name}`: {type(value).__name__} is not a type the simulator can pass")


def _flatten_static_numbers(name: str, value: object) -> Iterator[Value]:
    """Inside a shape, a stride or a NamedTuple a Python number is a compile-time constant."""
    if isinstance(value, (bool, int, float)):
        return
    if isinstance(value, tuple | list):
        fields = getattr(value, "_fields", None)
        for i, element in enumerate(value):
            yield from _flatten_static_numbers(f"{name}.{fields[i]}" if fields else f"{name}[{i}]", element)
    else:
        yield from flatten(name, value)


def _of_fields(name: str, value: tuple) -> Iterator[Value]:
    """A NamedTuple in which a Python number fills a slot if its field may be a DSL number, a pointer or a tensor; the
    number is then the value, or the address of the data."""
    try:
        hints = typing.get_type_hints(type(value))
    except (NameError, TypeError):  # unresolvable annotations
        hints = {}
    for field, element in zip(type(value)._fields, value, strict=True):
        of_field = hints.get(field)
        typed = any(
            isinstance(kind, NumericMeta) or kind in (cute.Pointer, cute.Tensor)
            for kind in typing.get_args(of_field) or (of_field,)
        )
        if isinstance(element, (bool, int, float)) and typed:
            yield Value(f"{name}.{field}", element)
        elif hasattr(type(element), "_fields"):
            yield from _of_fields(f"{name}.{field}", element)
        else:
            yield from _flatten_static_numbers(f"{name}.{field}", element)


@dataclass(frozen=True)
class _Opaque:
    """A slot packed by an object of the caller's own type (`__c_pointers__`)."""

    address: int
    owner: object

    def pointers(self, slot: Slot) -> dict[int, int]:
        """The slot's pointers: host address by offset in it."""
        return {
            leaf.offset: ctypes.c_uint64.from_address(self.address + leaf.offset).value
            for leaf in slot.leaves
            if leaf.kind == "ptr"
        }


class _Handle:
    """The integer value of a stream's or an event's handle; 0 for None."""

    def __init__(self, value: object):
        self.value = 0 if value is None else int(value)

    @classmethod
    def of_stream(cls, stream: object, name: str) -> _Handle:
        """The handle of a stream of torch's or CUDA's, of an int or None. HostError for anything else."""
        stream = getattr(stream, "cuda_stream", stream)  # torch.cuda.Stream
        if stream is not None and not isinstance(stream, int) and not _is_stream(stream):
            raise HostError(
                f"argument `{name}`: {type(stream).__name__} is not a CUDA stream, an int or None"
            )
        return cls(stream)


def takes_stream(annotation: object) -> bool:
    """Whether a parameter's annotation is a CUDA stream type."""
    annotation = _strip_optional(annotation)
    return inspect.isclass(annotation) and issubclass(
        annotation, (cuda_driver.CUstream, cuda_runtime.cudaStream_t)
    )


def _strip_optional(annotation: object) -> object:
    arguments = [a for a in typing.get_args(annotation) if a is not type(None)]
    if len(arguments) == 1 and type(None) in typing.get_args(annotation):
        return arguments[0]
    return annotation


def _is_stream(value: object) -> bool:
    return isinstance(value, (cuda_driver.CUstream, cuda_runtime.cudaStream_t)) or hasattr(
        value, "cuda_stream"
    )


def _is_pointer(value: object) -> bool:
    return type(value) is cute_runtime._Pointer or isinstance(value, (ctypes.c_void_p, ctypes._Pointer))


class PackedArguments:
    """The `void **` that the host function's C entry takes, with the tensors behind it staged in `memory`.

    slots: the function's argument slots; values: the flattened arguments; reachable: more CPU tensors to
    stage, besides those that pointer arguments and the addresses in int64 tensors lead to.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        values: Sequence[Value],
        memory: GlobalMemory,
        reachable: Sequence[object],
    ):
        if len(values) != len(slots):
            got = ", ".join(v.name for v in values) or "none"
            wanted = "; ".join(map(str, slots)) or "none"
            raise HostError(
                f"the arguments fill {len(values)} slots ({got}); "
                f"the compiled signature has {len(slots)}: {wanted}"
            )
        self._memory = memory
        tensors: dict[int, tuple[HostTensor, TensorType | PointerType]] = {}
        regions = []
        for i, (slot, value) in enumerate(zip(slots, values, strict=True)):
            if is_tensor(value.value):
                tensors[i] = fit_tensor(host_tensor(value.value, value.name), slot, value.name)
                regions.append(tensors[i][0].region(f"`{value.name}`"))
        for i, tensor in enumerate(reachable):
            regions.append(host_tensor(tensor, f"memory[{i}]").region(f"`memory[{i}]`"))
        pointers: dict[str, int] = {}
        for slot, value in zip(slots, values, strict=True):
            if isinstance(value.value, _Opaque):
                found = value.value.pointers(slot)
                pointers |= {f"{value.name} byte {at}": address for at, address in found.items()}
            elif slot.kinds == ("ptr",) and not isinstance(value.value, _Handle):
                pointers[value.name] = _address(value.value) or 0
        regions += behind({name: address for name, address in pointers.items() if address}, regions)
        memory.stage(regions)
        self._keep: list[object] = [regions]
        self.pointers: list[int] = []
        for i, (slot, value) in enumerate(zip(slots, values, strict=True)):
            if isinstance(value.value, _Opaque):
                buffer = self._repack(value.value, slot)
                self._keep += (value.value, buffer)
                self.pointers.append(ctypes.addressof(buffer))
                continue
            if i in tensors:
                leaves: Sequence[object] = self._tensor_leaves(*tensors[i], value.name)
            elif isinstance(slot.type, TensorType):
                raise HostError(f"argument `{value.name}`: {plain(value.value)}; {WANTS} {slot}")
            elif isinstance(value.value, _Handle):
                leaves = [value.value.value]
            elif slot.kinds == ("ptr",):
                leaves = [self._pointer(value.value, slot, value.name)]
            else:
                leaves = [value.value]
            buffer = ctypes.create_string_buffer(_pack(slot, leaves, value), max(slot.nbytes, 1))
            self._keep.append(buffer)
            self.pointers.append(ctypes.addressof(buffer))

    def _repack(self, value: _Opaque, slot: Slot) -> ctypes.Array:
        """The object's own bytes, with pointers into staged memory replaced by device addresses."""
        data = bytearray(ctypes.string_at(value.address, slot.nbytes))
        for at, host in value.pointers(slot).items():
            device = self._memory.device_address(host)
            if device is not None:
                data[at : at + POINTER_BITS // 8] = device.to_bytes(POINTER_BITS // 8, "little")
        return ctypes.create_string_buffer(bytes(data), max(slot.nbytes, 1))

    def _tensor_leaves(self, tensor: HostTensor, kind: TensorType | PointerType, name: str) -> list[int]:
        """Address, dynamic sizes and dynamic strides of a staged tensor."""
        address = self._memory.device_address(tensor.address)
        assert address is not None, "every tensor argument is staged"
        if address % kind.align:
            raise HostError(f"argument `{name}`: begins {address % kind.align} bytes off; {WANTS} {kind}")
        if isinstance(kind, PointerType):
            return [address]
        sizes = [n for n, extent in zip(tensor.shape, kind.shape, strict=True) if extent.value is None]
        steps = [s for s, extent in zip(tensor.stride, kind.stride, strict=True) if extent.value is None]
        return [address, *sizes, *steps]

    def _pointer(self, value: object, slot: Slot, name: str) -> int:
        """Device address for an address in the caller's memory."""
        host = _address(value)
        if host is None:
            raise HostError(f"argument `{name}`: {plain(value)}; {WANTS} {slot}")
        if host == 0:
            return 0
        address = self._memory.device_address(host)
        if address is None:
            raise HostError(
                f"argument `{name}`: address {host:#x} is in none of the tensors given, nor in a live CPU "
                "tensor or array"
            )
        if isinstance(slot.type, PointerType) and address % slot.type.align:
            raise HostError(
                f"argument `{name}`: begins {address % slot.type.align} bytes off; {WANTS} {slot}"
            )
        return address


def _address(value: object) -> int | None:
    """The host address of a pointer argument, None if the value is no pointer or has none."""
    if type(value) is cute_runtime._Pointer:
        return int(value._pointer)
    if isinstance(value, (ctypes.c_void_p, ctypes._Pointer)):
        return ctypes.cast(value, ctypes.c_void_p).value or 0
    return value if isinstance(value, int) else None


def _pack(slot: Slot, leaves: Sequence[object], value: Value) -> bytes:
    """Bytes of a slot from the values of its leaves."""
    if len(leaves) != len(slot.leaves):
        raise HostError(f"argument `{value.name}`: {plain(value.value)}; {WANTS} {slot}")
    data = bytearray(slot.nbytes)
    for leaf, content in zip(slot.leaves, leaves, strict=True):
        packed = pack_scalar(leaf.kind, content)
        if packed is None:
            raise HostError(f"argument `{value.name}`: {plain(value.value)}; {WANTS} {slot}")
        data[leaf.offset : leaf.offset + len(packed)] = packed
    return bytes(data)


def pack_scalar(kind: str, value: object) -> bytes | None:
    """Little-endian bytes of a Python, NumPy or DSL number as LLVM type `kind`; None if it does not fit.

    Integers may be given signed or unsigned; floats are rounded to nearest even.
    """
    if isinstance(value, Numeric):
        value = value.value
    if not isinstance(value, (bool, numbers.Real, np.generic)):
        return None
    if kind == "bf16" or kind in FLOAT_FORMATS:
        with np.errstate(over="ignore"):
            if kind == "bf16":
                return torch.tensor([float(value)]).bfloat16().view(torch.uint8).numpy().tobytes()
            return FLOAT_FORMATS[kind](value).tobytes()
    bits = POINTER_BITS if kind == "ptr" else int(kind[1:])
    lowest = 0 if bits == 1 else -(1 << bits - 1)
    if not isinstance(value, (bool, numbers.Integral, np.bool_)) or not lowest <= int(value) < 1 << bits:
        return None
    return (int(value) & (1 << bits) - 1).to_bytes(-(-bits // 8), "little")


def plain(value: object) -> str:
    """A value for a message: its type and, if short, its text."""
    if isinstance(value, Numeric):
        value = value.value
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) < 60 else type(value).__name__
