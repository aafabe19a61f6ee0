"""Tensors on a device that is not there: torch says that they are on "cuda", and their bytes are in CPU memory.

Two modes do it while they are entered. `Placement` sees torch's functions as Python calls them: "cuda" in them becomes
"cpu", and what they return is marked. `Propagation` sees every operator, autograd's among them: what it makes of a
marked tensor is marked. The mark is an attribute of the storage, so views have it and gradients get it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch._ops import HigherOrderOperator, _compute_keyset
from torch.overrides import TorchFunctionMode
from torch.utils import _device as torch_device
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from warpspec.sim.pretend.capture import Capture

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
MARK = "_warpspec_on_device"  # attribute of storages
LIKE_SELF = ("as_tensor", "asarray")  # functions that may return their argument
DEVICE_METHODS = ("to", "cuda", "cpu")
PASSED_THROUGH = ("__get__", "__set__")  # attribute accesses, which modes see too

ALIGNMENT = 256  # bytes, of CUDA's allocations
DEVICE_TYPE = 8  # where a DLTensor has it: after its pointer
DLPACK_CPU, DLPACK_CUDA = 1, 2
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

_device = torch._C.TensorBase.device.__get__
_pretending = True  # whether marked tensors say that they are on the device


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage, or None for tensors without one (fake, batched, sparse)."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether a tensor counts as being on the device."""
    return getattr(storage_of(tensor), MARK, False)


def mark(value: object) -> object:
    """Put a tensor, or the tensors in a tuple or list, on the device. Returns the value."""
    if isinstance(value, torch.Tensor):
        storage = storage_of(value)
        if storage is not None:
            setattr(storage, MARK, True)
    elif isinstance(value, list | tuple):
        for item in value:
            mark(item)
    return value


def aligned(tensor: object) -> object:
    """Move a fresh tensor to a storage that begins at a multiple of ALIGNMENT, as CUDA's allocations do."""
    if not isinstance(tensor, torch.Tensor) or tensor.grad_fn is not None or tensor.layout != torch.strided:
        return tensor
    if torch._C._functorch.peek_interpreter_stack() is not None:  # inside vmap, grad
        return tensor
    storage = storage_of(tensor)
    if storage is None or not storage.nbytes() or storage.data_ptr() % ALIGNMENT == 0:
        return tensor
    buffer = np.empty(storage.nbytes() + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    content = torch.from_numpy(buffer[start : start + storage.nbytes()])
    content.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    moved = torch.empty(0, dtype=tensor.dtype)
    moved.set_(content.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return moved.requires_grad_() if tensor.requires_grad else moved


def tensors_in(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, including those in lists, tuples and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)


def names_cuda(value: object) -> bool:
    """Whether a device argument means the device: "cuda", "cuda:0", torch.device("cuda"), 0."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, int) and not isinstance(value, bool)


class Placement(TorchFunctionMode):
    """Takes "cuda" out of calls of torch's functions and marks what they return."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in PASSED_THROUGH:
            return function(*args, **kwargs)
        if isinstance(function, HigherOrderOperator):
            return self._operator(function, args, kwargs)
        if name in DEVICE_METHODS and args and isinstance(args[0], torch.Tensor):
            return self._move(name, function, args, dict(kwargs))
        device = kwargs.get("device")
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if device is None:
            default = torch_device.CURRENT_DEVICE
            if default is None or default.type != "cuda" or function not in _constructors():
                return function(*args, **kwargs)
            device = default
        if not names_cuda(device):
            result = function(*args, **kwargs)
            return self._off(result, args)
        result = function(*args, **kwargs | {"device": CPU})
        if not _pretending:
            return result
        if name in LIKE_SELF and isinstance(result, torch.Tensor) and not is_marked(result):
            result = result.clone()  # the caller goes on to use the original memory
        return mark(aligned(result))

    def _operator(self, function: HigherOrderOperator, args: tuple, kwargs: dict) -> object:
        """Call an operator that calls functions, such as flex_attention.

        They may name the device, too. Torch makes fake tensors of what they take, which must say where they are.
        """
        keys = _compute_keyset(args, kwargs, function.non_fallthrough_keys)
        with self, _true_devices():
            result = function.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)
        return mark(result) if any(map(is_marked, tensors_in((args, kwargs)))) else result

    @staticmethod
    def _off(result: object, args: tuple) -> object:
        """Unmark a new tensor that a call asked for on the CPU: `torch.empty_like(marked, device="cpu")`."""
        if isinstance(result, torch.Tensor) and is_marked(result):
            storage = storage_of(result)
            if all(storage_of(t)._cdata != storage._cdata for t in tensors_in(args) if storage_of(t)):
                setattr(storage, MARK, False)
        return result

    @staticmethod
    def _move(name: str, function: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
        """Replace `Tensor.to`, `.cuda` and `.cpu`: copy if the device changes."""
        tensor, *rest = args
        on_device = is_marked(tensor)
        if name == "cuda":
            return tensor if on_device else mark(_device_copy(tensor))
        if name == "cpu":
            return _host_copy(tensor) if on_device else function(tensor)
        target, options = _to(rest, kwargs)
        result = function(tensor, **options) if options else tensor
        if target is None or target == on_device:
            return result
        if target:
            fresh = result is not tensor and not _share(result, tensor)
            return mark(result if fresh else _device_copy(result))
        return _host_copy(result)


def _to(rest: list, kwargs: dict) -> tuple[bool | None, dict[str, object]]:
    """Parse the arguments of `Tensor.to`: whether they ask for the device (None: they name no device), and the rest."""
    target: bool | None = None
    options = {
        name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "other")
    }
    if kwargs.get("device") is not None:
        target = names_cuda(kwargs["device"])
    first = rest[0] if rest else kwargs.get("other")
    if isinstance(first, torch.Tensor):
        target = is_marked(first)
        options["dtype"] = first.dtype
    elif isinstance(first, torch.dtype):
        options["dtype"] = first
    elif first is not None:
        target = names_cuda(first)
    behind = rest[1:]
    if behind and not isinstance(behind[0], bool):  # (device, dtype, ...)
        options["dtype"] = behind.pop(0)
    if len(behind) > 1:  # non_blocking, copy
        options["copy"] = behind[1]
    return target, {name: value for name, value in options.items() if value is not None}


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    a, b = storage_of(one), storage_of(other)
    return a is not None and b is not None and a._cdata == b._cdata


def _device_copy(tensor: torch.Tensor) -> torch.Tensor:
    return aligned(tensor.clone(memory_format=torch.preserve_format))


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host."""
    copy = tensor.clone(memory_format=torch.preserve_format)
    storage = storage_of(copy)
    if storage is not None:
        setattr(storage, MARK, False)
    return copy


@functools.cache
def _constructors() -> frozenset[Callable]:
    return frozenset(torch_device._device_constructors())


class Propagation(TorchDispatchMode):
    """Marks what operators make of marked tensors; while a graph is captured, keeps them for its replays."""

    def __init__(self) -> None:
        super().__init__()
        self.capturing: Capture | None = None
        self.inside = False  # an operator that is recorded, whose own operators and kernels are not
        self.on_kernel: Callable[[], None] = lambda: None  # called when torch runs a kernel on the device

    supports_higher_order_operators = True  # flex_attention called without torch's compiler, say

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, seconds of it, for the first tensor."""
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        on_device, others = names_cuda(kwargs.get("device")), set()
        if on_device:  # asked for where `Placement` does not see it
            kwargs = kwargs | {"device": CPU}
        if self.recorder() is None:
            result = function(*args, **kwargs)
        else:
            result = self._record(function, args, kwargs)
        for tensor in tensors_in((args, kwargs)):
            storage = storage_of(tensor)
            if storage is None:
                continue
            if getattr(storage, MARK, False):
                on_device = True
            else:
                others.add(storage._cdata)
        if on_device:
            if not _without_kernel(function):
                self.on_kernel()
            for tensor in tensors_in(result):
                storage = storage_of(tensor)
                if storage is not None and storage._cdata not in others:
                    setattr(storage, MARK, True)
        return result

    def recorder(self) -> Capture | None:
        """What records a call that is made now, if anything."""
        return None if self.inside else self.capturing

    def _record(self, function: Callable, args: tuple, kwargs: dict) -> object:
        """Run an operator and record it."""
        capture = self.capturing
        schema = getattr(function, "_schema", None)  # not of higher-order operators, which write nothing
        if schema is not None and schema.is_mutable:
            with _disable_current_modes():
                capture.keep(t for t in tensors_in((args, kwargs)) if storage_of(t) is not None)
        self.inside = True
        try:
            result = function(*args, **kwargs)
        finally:
            self.inside = False
        with _disable_current_modes():
            made = _allocated(result, (args, kwargs))
            capture.record(functools.partial(_again, function, args, kwargs, result), made)
        return result


def _allocated(result: object, arguments: object) -> list[torch.Tensor]:
    """The tensors of an operator's result whose memory no argument has."""
    given = {storage._cdata for storage in map(storage_of, tensors_in(arguments)) if storage is not None}
    found = [(tensor, storage_of(tensor)) for tensor in tensors_in(result)]
    return [tensor for tensor, storage in found if storage is not None and storage._cdata not in given]


def _without_kernel(function: Callable) -> bool:
    """Whether an operator makes a view, or a tensor that it does not fill."""
    name = getattr(function, "__name__", "")
    return getattr(function, "is_view", False) or name.startswith(
        ("empty", "new_empty", "detach", "alias", "resize")
    )


def _again(function: Callable, args: tuple, kwargs: dict, result: object) -> None:
    """Run an operator again and store its results in the tensors that it returned the first time."""
    for old, new in zip(tensors_in(result), tensors_in(function(*args, **kwargs)), strict=True):
        if not _share(old, new):
            old.copy_(new)


@contextlib.contextmanager
def _true_devices() -> Iterator[None]:
    """A context in which tensors say where they are."""
    global _pretending
    before, _pretending = _pretending, False
    try:
        yield
    finally:
        _pretending = before


def _is_cuda(tensor: torch.Tensor) -> bool:
    return _pretending and is_marked(tensor)


def _get_device(tensor: torch.Tensor) -> torch.device:
    device = _device(tensor)
    return CUDA if device.type == "cpu" and _is_cuda(tensor) else device


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.UntypedStorage(storage.nbytes()).copy_(storage, False)
    setattr(copy, MARK, getattr(storage, MARK, False))
    return copy


def _dlpack(tensor: torch.Tensor, **_: object):
    """Export a tensor through DLPack; the capsule of a marked tensor names CUDA as its device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    if is_marked(tensor):
        ctypes.c_int32.from_address(_pointer_of(capsule, b"dltensor") + DEVICE_TYPE).value = DLPACK_CUDA
    return capsule


def _dlpack_device(tensor: torch.Tensor) -> tuple[int, int]:
    return (DLPACK_CUDA if is_marked(tensor) else DLPACK_CPU, 0)


def backward_in(placement: Placement, run_backward: Callable) -> Callable:
    """Autograd's engine, for which `backward` is one of torch's functions: Python code in it has the mode, too."""

    def run(*args: object, **kwargs: object) -> object:
        with placement:
            return run_backward(*args, **kwargs)

    return run


class Exported:
    """Hides everything of a tensor but its DLPack methods: TVM FFI would read a torch tensor's device directly."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __dlpack__(self, **_: object):
        return _dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _dlpack_device(self._tensor)


ATTRIBUTES = {  # attributes that replace those of torch.Tensor
    "device": property(_get_device),
    "is_cuda": property(_is_cuda),
    "is_cpu": property(lambda t: not _is_cuda(t)),
    "get_device": lambda t: 0 if _is_cuda(t) else -1,
    "pin_memory": lambda t, *_: t,
    "is_pinned": lambda t, *_: not is_marked(t),
    "__dlpack__": _dlpack,
    "__dlpack_device__": _dlpack_device,
    "record_stream": lambda t, *_: None,
}
