"""Capture of a CUDA graph: work is recorded, and undone at the end, because a device does not execute it before replay.

It is executed nevertheless, so that what operators return has its shape, and so that errors come where they arise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import cutlass  # noqa: F401  (as a whole first: tests/test_layers.py)
import torch
from cutlass.cute import runtime as cute_runtime

from warpspec.sim.host_tensor import SOURCE


class Capture:
    """The calls of a graph that is being captured, and the memory that they wrote, as it was before.

    Memory that was allocated during the capture keeps what was written: on a device it holds nothing of use. So does
    what a kernel reaches through pointers.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self._own: dict[int, torch.Tensor] = {}  # allocated during the capture, by address
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # address: (the memory, its contents)

    def record(self, call: Callable[[], None], made: Iterable[torch.Tensor] = ()) -> None:
        """Record a call. made: tensors that it returned."""
        self.calls.append(call)
        for memory in map(_memory_of, made):
            if memory.data_ptr() not in self._before:
                self._own[memory.data_ptr()] = memory

    def keep(self, written: Iterable[torch.Tensor]) -> None:
        """Keep the contents of tensors that a call may write."""
        for memory in map(_memory_of, written):
            address = memory.data_ptr()
            if address not in self._own and address not in self._before:
                self._before[address] = memory, memory.clone()

    def undo(self) -> None:
        """Give the memory its contents back."""
        for memory, contents in self._before.values():
            memory.copy_(contents)
        self._before.clear()
        self._own.clear()


def tensors_among(arguments: object) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a compiled function: torch's own, or behind the DSL's."""
    if type(arguments) is cute_runtime.TensorAdapter:
        arguments = arguments._arg
    arguments = getattr(arguments, SOURCE, arguments)
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for value in arguments:
            yield from tensors_among(value)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's whole storage, in place."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
