"""The arguments of the host part of a compiled CuTe DSL function: types from MLIR, memory layout from LLVM.

The lowered module inside a compiled function says how many argument slots there are and how each lies in
memory. Its element types, static sizes and divisibilities are known only if `warpspec.common.argument_types` was
imported before the compilation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from warpspec.common.host_function import HostFunction
from warpspec.sim.errors import HostError

# Bits of an element, by MLIR name.
ELEMENT_BITS = {
    "f4E2M1FN": 4,
    "i4": 4,
    "f6E2M3FN": 6,
    "f6E3M2FN": 6,
    "f8E4M3": 8,
    "f8E4M3FN": 8,
    "f8E5M2": 8,
    "f8E8M0FNU": 8,
    "f8E4M3B11FNUZ": 8,
    "i1": 8,
    "i8": 8,
    "i16": 16,
    "f16": 16,
    "bf16": 16,
    "i32": 32,
    "f32": 32,
    "tf32": 32,
    "i64": 64,
    "f64": 64,
}


@dataclass(frozen=True)
class Extent:
    """One entry of a shape or stride: its compiled-in `value`, or None, width in bits and divisibility."""

    value: int | None
    width: int = 32
    divisibility: int = 1

    def __str__(self) -> str:
        if self.value is not None:
            return str(self.value)
        return "?" if self.divisibility == 1 else f"?{{divisible by {self.divisibility}}}"


@dataclass(frozen=True)
class TensorType:
    """A tensor slot. element: MLIR name; align: bytes; strides in elements."""

    element: str
    align: int
    shape: tuple[Extent, ...]
    stride: tuple[Extent, ...]

    def __str__(self) -> str:
        shape, stride = (", ".join(map(str, extents)) for extents in (self.shape, self.stride))
        return f"tensor of {self.element}, shape ({shape}), stride ({stride}), {self.align}-byte aligned"


@dataclass(frozen=True)
class PointerType:
    element: str
    align: int

    def __str__(self) -> str:
        return f"pointer to {self.element}, {self.align}-byte aligned"


@dataclass(frozen=True)
class StreamType:
    def __str__(self) -> str:
        return "CUDA stream"


@dataclass(frozen=True)
class ScalarType:
    """Anything else, by its MLIR text."""

    text: str

    def __str__(self) -> str:
        return self.text


ArgumentType = TensorType | PointerType | StreamType | ScalarType


@dataclass(frozen=True)
class Leaf:
    """A scalar inside an argument slot: LLVM type and byte offset."""

    kind: str
    offset: int


@dataclass(frozen=True)
class Slot:
    """One argument of the host function: its layout, and its type where the compilation was recorded.

    dynamic: how many sizes and how many strides a tensor's slot holds; None if the layout is not a tensor's.
    """

    nbytes: int
    leaves: tuple[Leaf, ...]
    type: ArgumentType | None
    dynamic: tuple[int, int] | None

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(leaf.kind for leaf in self.leaves)

    def __str__(self) -> str:
        return str(self.type) if self.type is not None else f"LLVM ({', '.join(self.kinds)})"


_MEMREF = re.compile(r'!cute\.memref<(?P<element>\w+), \w+(?:, align<(?P<align>\d+)>)?, "(?P<layout>[^"]*)">')
_POINTER = re.compile(r"!cute\.ptr<(?P<element>\w+), \w+(?:, align<(?P<align>\d+)>)?>")
_EXTENT = re.compile(r"(?P<value>\d+)|\?(?:\{(?P<attributes>[^}]*)\})?")
_FLAT_LAYOUT = re.compile(r"\((?P<shape>[^()]*)\):\((?P<stride>[^()]*)\)")


def parse_argument_type(text: str) -> ArgumentType:
    """The MLIR type of a host argument; a layout that is not flat comes back as a ScalarType."""
    memref = _MEMREF.fullmatch(text)
    if memref:
        layout = _FLAT_LAYOUT.fullmatch(memref["layout"])
        if layout and memref["element"] in ELEMENT_BITS:
            align = int(memref["align"] or max(1, ELEMENT_BITS[memref["element"]] // 8))
            return TensorType(memref["element"], align, _extents(layout["shape"]), _extents(layout["stride"]))
    pointer = _POINTER.fullmatch(text)
    if pointer:
        align = int(pointer["align"] or max(1, ELEMENT_BITS.get(pointer["element"], 8) // 8))
        return PointerType(pointer["element"], align)
    if text == "!cuda.stream":
        return StreamType()
    return ScalarType(text)


def _extents(text: str) -> tuple[Extent, ...]:
    extents = []
    for match in _EXTENT.finditer(text):
        if match["value"] is not None:
            extents.append(Extent(int(match["value"])))
        else:
            attributes = match["attributes"] or ""
            divisibility = re.search(r"div=(\d+)", attributes)
            width = re.search(r"i(\d+)", attributes)
            extents.append(
                Extent(None, int(width[1]) if width else 32, int(divisibility[1]) if divisibility else 1)
            )
    return tuple(extents)


def slots(host: HostFunction) -> tuple[Slot, ...]:
    """The argument slots of a host function, in order."""
    layouts = _llvm_inputs(host.function_type)
    recorded = host.argument_types
    types = [parse_argument_type(t) for t in recorded] if recorded is not None else [None] * len(layouts)
    if len(types) != len(layouts):
        raise HostError(
            f"{host.name}: {len(types)} argument types recorded, {len(layouts)} argument slots compiled"
        )
    return tuple(
        Slot(layout.size, tuple(layout.leaves), kind, layout.tensor_counts())
        for layout, kind in zip(layouts, types, strict=True)
    )


@dataclass
class _Layout:
    size: int
    align: int
    leaves: list[Leaf]
    members: list[_Layout] = field(default_factory=list)  # members of a struct

    def tensor_counts(self) -> tuple[int, int] | None:
        """A tensor is struct<(ptr, struct<(sizes, strides)>)>."""
        if len(self.members) != 2 or self.leaves[0].kind != "ptr" or len(self.members[1].members) != 2:
            return None
        sizes, strides = self.members[1].members
        return len(sizes.leaves), len(strides.leaves)


_TOKEN = re.compile(r"\s*(struct|array|vector|packed|ptr|bf16|[fi]\d+|\d+|\S)")
_SCALAR_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}
_POINTER_BYTES = 8


def _llvm_inputs(function_type: str) -> list[_Layout]:
    """x86-64 layouts of the inputs in `!llvm.func<i32 (struct<(ptr<1>, i32)>, f32)>`."""
    start = function_type.index("(")
    tokens = _TOKEN.findall(function_type[start:])
    tokens.reverse()  # consumed from the end
    _expect(tokens, "(")
    inputs = []
    while tokens[-1] != ")":
        inputs.append(_llvm_type(tokens))
        if tokens[-1] == ",":
            tokens.pop()
    return inputs


def _expect(tokens: list[str], token: str) -> None:
    found = tokens.pop()
    if found != token:
        raise HostError(f"LLVM type: expected {token!r}, found {found!r}")


def _llvm_type(tokens: list[str]) -> _Layout:
    token = tokens.pop()
    if token in _SCALAR_BYTES:
        size = _SCALAR_BYTES[token]
        return _Layout(size, size, [Leaf(token, 0)])
    if token == "ptr":
        if tokens[-1] == "<":
            del tokens[-3:]
        return _Layout(_POINTER_BYTES, _POINTER_BYTES, [Leaf("ptr", 0)])
    if token in ("array", "vector"):
        _expect(tokens, "<")
        count = int(tokens.pop())
        _expect(tokens, "x")
        element = _llvm_type(tokens)
        _expect(tokens, ">")
        leaves = [Leaf(e.kind, e.offset + i * element.size) for i in range(count) for e in element.leaves]
        size = count * element.size
        return _Layout(size, size if token == "vector" else element.align, leaves)
    if token == "struct":
        _expect(tokens, "<")
        packed = tokens[-1] == "packed"
        if packed:
            tokens.pop()
        _expect(tokens, "(")
        size, align = 0, 1
        leaves: list[Leaf] = []
        members: list[_Layout] = []
        while tokens[-1] != ")":
            member = _llvm_type(tokens)
            if tokens[-1] == ",":
                tokens.pop()
            if not packed:
                size = -(-size // member.align) * member.align
                align = max(align, member.align)
            leaves += [Leaf(leaf.kind, leaf.offset + size) for leaf in member.leaves]
            size += member.size
            members.append(member)
        _expect(tokens, ")")
        _expect(tokens, ">")
        return _Layout(-(-size // align) * align, align, leaves, members)
    raise HostError(f"LLVM type {token!r} in a host argument is not supported")
