"""Checks memory that a call writes to: no element occurs twice in an output, and no other tensor shares its addresses.

Address ranges are compared first, which is cheap. If they intersect, the tensors may still be interleaved views
(columns of one buffer, heads of one projection), and their strides decide. Storages are not compared, because two
storages can be the same memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping

import torch

from warpspec.common.repeated import PLAIN_TENSORS


def check_output(
    name: str,
    out: torch.Tensor,
    inputs: Mapping[str, torch.Tensor | None],
    *,
    in_place: Collection[str] = (),
) -> None:
    """Raise ValueError if an element of ``out`` occurs twice in memory, or overlaps ``inputs`` (``check_apart``)."""
    check_elements(name, out)
    check_apart({name: out}, inputs, in_place=in_place)


def check_elements(name: str, out: torch.Tensor) -> None:
    """Raise ValueError unless each stride of ``out`` is larger than what the dimensions of smaller strides span."""
    if out.is_contiguous() or out.numel() == 0:
        return
    span = 0  # elements spanned by the dimensions so far
    for size, step in sorted(zip(out.shape, out.stride(), strict=True), key=lambda dim: dim[1]):
        if size > 1:
            if step <= span:
                raise ValueError(
                    f"{name}: elements must not overlap each other, got strides {tuple(out.stride())}"
                )
            span += (size - 1) * step


def check_apart(
    outputs: Mapping[str, torch.Tensor | None],
    inputs: Mapping[str, torch.Tensor | None],
    *,
    in_place: Collection[str] = (),
) -> None:
    """Raise ValueError if one of ``outputs`` shares an address with one of ``inputs`` or another output, by name, or is
    a negated view.

    in_place: names of the inputs that an output may be, element for element. None and tensors without memory (fake,
    empty, on the meta device) overlap nothing, and no tensor does while torch.compile traces.
    """
    if torch.compiler.is_compiling():
        return
    ranges = [(name, *_range(tensor)) for name, tensor in inputs.items() if type(tensor) in PLAIN_TENSORS]
    for name, out in outputs.items():
        if type(out) not in PLAIN_TENSORS:
            continue
        refuse_negated(name, out)
        _, first, end = _range(out)
        for other, tensor, begin, stop in ranges:
            if begin < end and first < stop and _share_addresses(out, tensor):
                _refuse(name, out, other, tensor, in_place)
        ranges.append((name, out, first, end))


def note_written(*tensors: torch.Tensor | None) -> None:
    """Tell autograd that a call has written these tensors, as torch's operators do: backward() then raises if it needs
    what was there before. For calls that bypass torch's dispatcher."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def refuse_negated(name: str, out: torch.Tensor) -> None:
    """Raise ValueError for a view whose elements are the negatives of what is in memory, which kernels would not
    negate. While torch.compile traces, none is known to be one."""
    if not torch.compiler.is_compiling() and out.is_neg():
        raise ValueError(f"{name}: must not be a negated view (of torch._neg_view, or z.conj().imag)")


def _range(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(tensor, first address, end of the last); for tensors without memory, a range that intersects nothing."""
    size = span_bytes(tensor)
    if size == 0 or tensor.is_meta:
        return tensor, sys.maxsize, 0
    first = tensor.data_ptr()
    return tensor, first, first + size


def _refuse(
    name: str, out: torch.Tensor, other: str, tensor: torch.Tensor, in_place: Collection[str]
) -> None:
    """Raise for an output and a tensor that share an address, unless the output may be that tensor and is."""
    if other not in in_place:
        raise ValueError(
            f"{name}: must not overlap another argument's memory, got one that shares addresses with {other}"
        )
    if not is_same(out, tensor):
        raise ValueError(
            f"{name}: must be {other} itself or not share memory with it, got one that overlaps {other}"
        )


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and (a.stride() == b.stride() or _steps(a) == _steps(b))
    )


def overlap(a: torch.Tensor, a_bytes: int, b: torch.Tensor, b_bytes: int) -> bool:
    """Whether the address ranges of two tensors intersect. a_bytes, b_bytes: their sizes (``span_bytes``)."""
    first, other = a.data_ptr(), b.data_ptr()
    return a_bytes > 0 and b_bytes > 0 and first < other + b_bytes and other < first + a_bytes


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last; 0 if it has none."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a meaningful address; not while it is traced, nor where torch.func wraps it."""
    if torch.compiler.is_compiling() or not torch._C._has_storage(tensor):
        return False
    return type(tensor) in PLAIN_TENSORS and (tensor.is_cpu or tensor.is_cuda) and tensor.numel() > 0


def _share_addresses(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors whose ranges intersect share an address, or may share one.

    Split the dimensions of a tensor by the size of their strides. Dimensions with small strides span a block, and
    dimensions with large strides move the block by multiples of these strides. Choose a pitch that divides the large
    strides of both tensors. Modulo the pitch, all blocks of a tensor are in one place; if the places of the two tensors
    do not overlap, neither do the tensors.
    Columns of one buffer are an example, with the row as pitch. This is the GCD test of dependence analysis. All
    choices of which strides are small are tried.
    """
    steps = [_steps(tensor) for tensor in (a, b)]
    offset = b.data_ptr() - a.data_ptr()
    for cut in {step for dims in steps for _, step in dims}:
        pitch = math.gcd(*(step for dims in steps for _, step in dims if step >= cut))
        a_block, b_block = (
            tensor.element_size() + sum((size - 1) * step for size, step in dims if step < cut)
            for tensor, dims in zip((a, b), steps, strict=True)
        )
        begin = offset % pitch
        if a_block <= begin and begin + b_block <= pitch:
            return False
    return True


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride in bytes) of the dimensions that change a tensor's addresses."""
    width = tensor.element_size()
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, step * width) for size, step in dims if size > 1 and step > 0]
