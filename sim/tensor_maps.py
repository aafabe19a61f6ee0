"""`sim.tensor_map`: a tensor map of a tensor in the caller's memory, as cuTensorMapEncodeTiled makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from warpspec.sim.errors import HostError
from warpspec.sim.host_tensor import BYTE_BITS, HostTensor, host_tensor, is_tensor
from warpspec.sim.signature import ELEMENT_BITS
from warpspec.sim.tma.descriptor import (
    ELEMENT_BY_NAME,
    ElementType,
    Interleave,
    Swizzle,
    SwizzleAtomicity,
    TensorMap,
    check,
    encode,
)

SWIZZLES = {0: Swizzle.NONE} | {mode.span: mode for mode in Swizzle if mode}  # key: bytes of the span
INTERLEAVES = {0: Interleave.NONE, 16: Interleave.BYTES_16, 32: Interleave.BYTES_32}
ATOMICITIES = {"16": SwizzleAtomicity.BYTES_16, "32": SwizzleAtomicity.BYTES_32,
               "32+flip8": SwizzleAtomicity.BYTES_32_FLIP_8, "64": SwizzleAtomicity.BYTES_64}  # fmt: skip
ELEMENT_OF = {"i8": "u8", "i16": "u16", "i32": "s32", "i64": "s64", "f4E2M1FN": "b4x16"}


@dataclass(frozen=True)
class TensorMapOf:
    """A tensor map and the tensor that it describes. `tensor_map` makes it."""

    tensor: HostTensor
    source: object  # the caller's tensor
    map: TensorMap  # a tensor map with address 0

    def encoded(self, address: int) -> bytes:
        """The 128 bytes of the map of a tensor that begins at a device address. Raises BadDescriptor."""
        return encode(check(replace(self.map, address=address)))


def tensor_map(
    view: object,
    box: Sequence[int],
    *,
    swizzle: int = 0,
    element: str | None = None,
    interleave: int = 0,
    element_strides: Sequence[int] | None = None,
    nan_fill: bool = False,
    atomicity: str = "16",
) -> TensorMapOf:
    """A tensor map for `sim.launch`'s arguments.

    view: CPU torch tensor or NumPy array of 1 to 5 dimensions, the last one contiguous; its sizes and strides become
    the map's. box: elements that a copy moves, in the order of view's dimensions (the driver takes them the other way
    round). swizzle: bytes, 0 (none), 32, 64, 96 or 128. element: the element type as `tensormap.replace` spells it
    (u8, f16, bf16, f32, tf32, b4x16, b4x16_p64, b6x16_p32, ...); by default that of view's dtype. interleave: 0, 16 or
    32 bytes. element_strides: as box, 1 everywhere by default. nan_fill: elements out of bounds are NaN, not 0.
    atomicity: of a 128-byte swizzle, "16", "32", "32+flip8" or "64".

    Raises HostError for an argument out of range, BadDescriptor for what cuTensorMapEncodeTiled refuses.
    """
    if not is_tensor(view):
        raise HostError(
            f"tensor_map: view is a {type(view).__name__}; a torch tensor or NumPy array is needed"
        )
    tensor = whole_elements(host_tensor(view, "view"))
    rank = len(tensor.shape)
    steps = (1,) * rank if element_strides is None else tuple(element_strides)
    for name, value in (("box", box), ("element_strides", steps)):
        if not isinstance(value, Sequence) or any(not isinstance(n, int | np.integer) for n in value):
            raise HostError(f"tensor_map: {name} is {value!r}; an int for each dimension is needed")
        if len(value) != rank:
            raise HostError(f"tensor_map: {name} {tuple(value)} has {len(value)} entries; view has {rank}")
    for name, value, allowed in (
        ("swizzle", swizzle, SWIZZLES),
        ("interleave", interleave, INTERLEAVES),
        ("atomicity", atomicity, ATOMICITIES),
    ):
        if value not in allowed:
            raise HostError(f"tensor_map: {name} is {value!r}; {', '.join(map(repr, allowed))} are allowed")
    if rank and tensor.stride[-1] != 1 and tensor.shape[-1] != 1:
        raise HostError(f"tensor_map: view's last dimension has stride {tensor.stride[-1]}; 1 is needed")
    kind = _element(element, tensor)
    bits = ELEMENT_BITS[tensor.element]
    dims = [*tensor.shape]
    if dims:
        dims[-1] = dims[-1] * bits // kind.bits
    made = TensorMap(
        address=0,
        element=kind,
        dims=tuple(reversed(dims)),
        strides=tuple(step * bits // BYTE_BITS for step in reversed(tensor.stride[:-1])),
        box=tuple(map(int, reversed(box))),
        element_strides=tuple(map(int, reversed(steps))),
        interleave=INTERLEAVES[interleave],
        swizzle=SWIZZLES[swizzle],
        atomicity=ATOMICITIES[atomicity],
        nan_fill=bool(nan_fill),
    )
    return TensorMapOf(tensor, view, check(made))


def whole_elements(tensor: HostTensor) -> HostTensor:
    """A tensor of 4-bit elements that torch keeps two a byte, by element."""
    return tensor.unpacked() if ELEMENT_BITS[tensor.element] < BYTE_BITS and tensor.packed else tensor


def _element(name: str | None, tensor: HostTensor) -> ElementType:
    """The element type by name, or the one that fits a tensor's elements."""
    if name is None:
        own = ELEMENT_OF.get(tensor.element, tensor.element)
        name = own if own in ELEMENT_BY_NAME else "u8"
    found = ELEMENT_BY_NAME.get(name)
    if found is None:
        raise HostError(f"tensor_map: element is {name!r}; {', '.join(ELEMENT_BY_NAME)} are allowed")
    bits = ELEMENT_BITS[tensor.element]
    if bits != found.bits and not (bits == BYTE_BITS and found.bits < BYTE_BITS):
        raise HostError(f"tensor_map: element {name} has {found.bits} bits, view's elements have {bits}")
    return found
