"""Tensors in the caller's memory (torch, NumPy or CuTe), and whether they fit a compiled signature."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import cutlass  # noqa: F401  (as a whole first: tests/test_layers.py)
import numpy as np
import torch
from cutlass.cute import runtime as cute_runtime

from warpspec.sim.errors import HostError
from warpspec.sim.memory import HostRegion
from warpspec.sim.signature import ELEMENT_BITS, Extent, PointerType, Slot, TensorType

BYTE_BITS = 8
SOURCE = "_warpspec_source"  # attribute of a CuTe tensor, if known: the torch tensor it was made from
device_of_memory = torch._C.TensorBase.device.__get__  # also while tensors claim to be on a simulated device
TORCH_ELEMENTS = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e5m2: "f8E5M2",
    torch.float8_e8m0fnu: "f8E8M0FNU",
    torch.float4_e2m1fn_x2: "f4E2M1FN",
    torch.bool: "i8",
    torch.int8: "i8",
    torch.uint8: "i8",
    torch.int16: "i16",
    torch.uint16: "i16",
    torch.int32: "i32",
    torch.uint32: "i32",
    torch.int64: "i64",
    torch.uint64: "i64",
}
NUMPY_ELEMENTS = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bool": "i8",
    **{f"{sign}int{bits}": f"i{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
CUTE_ELEMENTS = {
    "Float64": "f64",
    "Float32": "f32",
    "TFloat32": "tf32",
    "Float16": "f16",
    "BFloat16": "bf16",
    "Boolean": "i8",
    **{f"{sign}int{bits}".capitalize(): f"i{bits}" for sign in ("", "u") for bits in (4, 8, 16, 32, 64)},
    **{f"Float{e[1:]}": e for e in ELEMENT_BITS if e[:2] in ("f4", "f6", "f8")},
}


@dataclass
class HostTensor:
    """A tensor in the caller's memory. Shape and stride in elements, address and storage in bytes."""

    address: int
    element: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: int | None
    keep: object
    packed: bool = False  # torch's packed sub-byte dtype, or bytes that may hold one: not yet unpacked
    dynamic: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # a CuTe tensor's own marks

    def __str__(self) -> str:
        return f"tensor of {self.element}, shape {self.shape}, stride {self.stride}"

    def unpacked(self) -> HostTensor:
        """Two 4-bit elements per byte: the contiguous dimension and every other stride double."""
        contiguous = [i for i, s in enumerate(self.stride) if s == 1]
        if not contiguous:
            raise HostError("a packed 4-bit tensor needs a dimension of stride 1")
        packed = max(contiguous, key=lambda i: (self.shape[i] > 1, i))
        shape = tuple(n * 2 if i == packed else n for i, n in enumerate(self.shape))
        stride = tuple(1 if i == packed else s * 2 for i, s in enumerate(self.stride))
        return dataclasses.replace(self, element="f4E2M1FN", shape=shape, stride=stride, packed=False)

    def region(self, name: str) -> HostRegion:
        """The bytes from the first to the last element."""
        bits = ELEMENT_BITS[self.element]
        low = high = self.address
        if all(self.shape):
            reach = [(n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)]
            low += sum(r for r in reach if r < 0) * bits // BYTE_BITS
            high += -(-(sum(r for r in reach if r > 0) + 1) * bits // BYTE_BITS)
        return HostRegion(low, high, name, self.storage, holds_pointers=self.element == "i64", keep=self.keep)


def is_tensor(value: object) -> bool:
    """Whether `host_tensor` describes it. (A CuTe runtime tensor claims another class.)"""
    cute = (cute_runtime._Tensor, cute_runtime.TensorAdapter)
    return isinstance(value, (torch.Tensor, np.ndarray)) or type(value) in cute


def host_tensor(value: object, name: str) -> HostTensor:
    """Describe a torch tensor, a NumPy array or a CuTe runtime tensor in CPU memory."""
    if type(value) is cute_runtime.TensorAdapter:
        value = value._arg
    if isinstance(value, torch.Tensor):
        device = device_of_memory(value)
        if device.type != "cpu" or value.layout != torch.strided:
            kind = device if device.type != "cpu" else value.layout
            raise HostError(f"argument `{name}`: a {kind} tensor; the simulator takes strided CPU tensors")
        if value.is_neg():  # of what is in memory, the kernel would see the negative
            raise HostError(f"argument `{name}`: a negated view; resolve_neg() makes a tensor of it")
        if value.dtype not in TORCH_ELEMENTS:
            raise HostError(f"argument `{name}`: tensors of {value.dtype} are not supported")
        value = value.detach()
        element = TORCH_ELEMENTS[value.dtype]
        storage = value.untyped_storage().data_ptr()
        address = value.data_ptr() or storage
        packed = ELEMENT_BITS[element] < BYTE_BITS or value.dtype in (torch.uint8, torch.int8)
        return HostTensor(address, element, tuple(value.shape), value.stride(), storage, value, packed)
    if isinstance(value, np.ndarray):
        if value.dtype.name not in NUMPY_ELEMENTS or not value.dtype.isnative:
            raise HostError(f"argument `{name}`: arrays of {value.dtype} are not supported")
        if any(s % value.itemsize for s in value.strides):
            raise HostError(f"argument `{name}`: strides {value.strides} are not whole elements")
        stride = tuple(s // value.itemsize for s in value.strides)
        packed = value.dtype.name in ("uint8", "int8")
        element = NUMPY_ELEMENTS[value.dtype.name]
        return HostTensor(value.ctypes.data, element, value.shape, stride, None, value, packed)
    element = CUTE_ELEMENTS.get(value.element_type.__name__)
    if element is None:
        raise HostError(f"argument `{name}`: tensors of {value.element_type} are not supported")
    marks = (tuple(value.dynamic_shapes_mask), tuple(value.dynamic_strides_mask))
    shape, stride = tuple(value.shape), tuple(value.stride)
    source = getattr(value, SOURCE, None)
    storage = source.untyped_storage().data_ptr() if isinstance(source, torch.Tensor) else None
    return HostTensor(value.data_ptr, element, shape, stride, storage, value, dynamic=marks)


def fit_tensor(tensor: HostTensor, slot: Slot, name: str) -> tuple[HostTensor, TensorType | PointerType]:
    """`tensor` as the slot's element type, and the slot's type. HostError if it does not fit.

    A pointer slot takes any tensor, for its address.
    """
    wanted = slot.type
    if isinstance(wanted, PointerType):
        return tensor, wanted
    if wanted is None:
        if tensor.packed and ELEMENT_BITS[tensor.element] < BYTE_BITS:
            tensor = tensor.unpacked()
        return tensor, _infer_type(tensor, slot, name)
    if not isinstance(wanted, TensorType):
        raise HostError(f"argument `{name}`: {tensor}; the compiled signature wants {wanted}")

    def refuse(reason: str) -> NoReturn:
        raise HostError(f"argument `{name}`: {tensor}; the compiled signature wants {wanted}: {reason}")

    bits = ELEMENT_BITS[wanted.element]
    if tensor.packed and bits == 4:
        tensor = tensor.unpacked()
    storage_only = tensor.packed and bits == BYTE_BITS  # fp8 kept as uint8
    if (
        tensor.element != wanted.element
        and not storage_only
        and (tensor.element, wanted.element) != ("f32", "tf32")
    ):
        refuse("element type")
    tensor = dataclasses.replace(tensor, element=wanted.element)
    if len(tensor.shape) != len(wanted.shape):
        refuse(f"{len(tensor.shape)} dimensions, not {len(wanted.shape)}")
    for i, (size, extent) in enumerate(zip(tensor.shape, wanted.shape, strict=True)):
        _fit_extent(size, extent, f"size {size} of dimension {i}", refuse)
    for i, (step, extent) in enumerate(zip(tensor.stride, wanted.stride, strict=True)):
        if extent.value is None or tensor.shape[i] > 1:  # a compiled-in stride of one element is never used
            _fit_extent(step, extent, f"stride {step} of dimension {i}", refuse)
    return tensor, wanted


def _fit_extent(value: int, extent: Extent, what: str, refuse: Callable[[str], NoReturn]) -> None:
    if extent.value is not None:
        if value != extent.value:
            refuse(f"{what} is compiled in as {extent.value}")
    elif value % extent.divisibility:
        refuse(f"{what} is not divisible by {extent.divisibility}")
    elif not -(1 << extent.width - 1) <= value < 1 << extent.width - 1:
        refuse(f"{what} does not fit {extent.width} bits")


def _infer_type(tensor: HostTensor, slot: Slot, name: str) -> TensorType:
    """Infer which sizes and strides are dynamic from the slot's layout alone, if the compilation was not recorded."""
    if slot.dynamic is None:
        raise HostError(f"argument `{name}`: {tensor}; the compiled signature wants {slot}")
    rank = len(tensor.shape)
    leading = [i for i, s in enumerate(tensor.stride) if s == 1]
    lead = max(leading, key=lambda i: (tensor.shape[i] > 1, i)) if leading else None
    every, none = (1,) * rank, (0,) * rank
    choices = [(none, none), (every, every), (every, tuple(int(i != lead) for i in range(rank)))]
    if tensor.dynamic is not None:
        choices.insert(0, tensor.dynamic)
    for marks in choices:
        if (sum(marks[0]), sum(marks[1])) == slot.dynamic:
            widths = iter([int(kind[1:]) for kind in slot.kinds[1:]])
            shape, stride = (
                tuple(
                    Extent(None, next(widths)) if m else Extent(n) for m, n in zip(mark, sizes, strict=True)
                )
                for mark, sizes in zip(marks, (tensor.shape, tensor.stride), strict=True)
            )
            return TensorType(tensor.element, 1, shape, stride)
    raise HostError(
        f"argument `{name}`: {tensor}; the compiled function takes {slot.dynamic[0]} dynamic sizes and "
        f"{slot.dynamic[1]} dynamic strides here, and which ones is not known: import warpspec.sim before "
        "calling cute.compile, or pass a CuTe tensor marked as the one it was compiled with"
    )
