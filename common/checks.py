"""Checks of single arguments, which all packages share.

A check raises TypeError for another kind of object or dtype, and ValueError for another value. The message has the
argument's name, what is allowed and what was given. Checks write nothing. Values in tensors are looked at only by
``check_range`` and only on the CPU: on a GPU the host would have to wait for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from warpspec.common.backend import refuse_tangents
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.outputs import has_memory

ANY = -1  # stands for any extent in a shape
VOWELS = "AEION"  # how class names sound: "an NVFP4Experts"
LARGEST = sys.float_info.max
LONGEST = 200  # characters of a value in a message
INTEGER_DTYPES = (torch.int32, torch.int64)


def kind_of(value) -> str:
    """A value and its type, for messages."""
    shown = repr(value)
    if len(shown) > LONGEST:
        shown = shown[:LONGEST] + "..."
    return f"{shown} ({type(value).__name__})"


def shape_of(tensor: torch.Tensor) -> list[int]:
    """A tensor's shape, for messages."""
    return list(tensor.shape)


def check_kind(name: str, value, kinds: type | tuple[type, ...]) -> None:
    """Raise TypeError unless a value is of one of these classes."""
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        article = "an" if names[0] in VOWELS else "a"
        raise TypeError(f"{name}: must be {article} {names}, got {kind_of(value)}")


def check_bool(name: str, value) -> None:
    """Raise TypeError unless a value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: must be a bool, got {kind_of(value)}")


def check_int(name: str, value, least: int | None = None, most: int | None = None) -> None:
    """Raise TypeError unless a value is an int (or symbolic, while tracing), ValueError if it is out of bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: must be an int, got {kind_of(value)}")
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name}: must be {interval(least, most)}, got {value}")


def interval(least: int | None, most: int | None) -> str:
    """Bounds in words, for messages."""
    if most is None:
        return f"at least {least}"
    return f"at most {most}" if least is None else f"within {least}..{most}"


def check_number(name: str, value, *, positive: bool = False, signed: bool = False) -> None:
    """Raise TypeError unless a value is an int or float, ValueError unless it is finite and at least 0. positive: it
    must not be 0 either. signed: any finite number will do."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: must be a float, got {kind_of(value)}")
    fits = -LARGEST <= value <= LARGEST and (signed or value > 0 or (value == 0 and not positive))
    if not fits:
        bound = "" if signed else " above 0" if positive else " of at least 0"
        raise ValueError(f"{name}: must be a finite number{bound}, got {value}")


def check_choice(name: str, value, allowed: Iterable[str]) -> None:
    """Raise TypeError unless a value is a string, ValueError if it is none of those allowed."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: must be a string, got {kind_of(value)}")
    if value not in allowed:
        raise ValueError(f"{name}: must be one of {', '.join(allowed)}, got {value!r}")


def check_device(name: str, device) -> torch.device:
    """The torch.device that a value names. Raises TypeError or ValueError if it names none."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"{name}: must be a torch.device or its name, got {kind_of(device)}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{name}: must be a torch.device or its name, got {device!r}") from error


def check_strided(name: str, tensor) -> None:
    """Raise TypeError unless a value is a tensor with strides."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {kind_of(tensor)}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: must be a strided tensor, got layout {tensor.layout}")


def check_tensor(
    name: str,
    tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Check kind, dtype, shape (ANY: any extent) and device of a tensor. None: any shape, or any device."""
    check_strided(name, tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: dtype must be one of {', '.join(map(str, dtypes))}, got {tensor.dtype}")
    if shape is not None and not has_shape(tensor, shape):
        wanted = ", ".join("any" if size == ANY else str(size) for size in shape)
        raise ValueError(f"{name}: shape must be [{wanted}], got {shape_of(tensor)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: must be on {device}, got {tensor.device}")


def has_shape(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has a shape in which ANY stands for any extent."""
    if tensor.dim() != len(shape):
        return False
    # Not by `in`: torch.compile finds a number in no tuple with symbols.
    return all(wanted == size for wanted, size in zip(shape, tensor.shape, strict=True) if wanted != ANY)


def check_floating(name: str, tensor, shape: tuple[int, ...] | None = None, device=None) -> None:
    """``check_tensor`` for any floating dtype."""
    check_strided(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: must be a floating tensor, got {tensor.dtype}")
    check_tensor(name, tensor, (tensor.dtype,), shape, device)


def check_last_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless neighbours in the last dimension lie side by side."""
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise ValueError(f"{name}: last dimension must be contiguous, got strides {tuple(tensor.stride())}")


def check_rows(name: str, tensor: torch.Tensor, memory: bool | None = None) -> None:
    """Raise ValueError unless a tensor's rows are contiguous and aligned to 16 bytes: its address, and the stride of
    every dimension of more than one element. memory: whether the address means something; None: ``has_memory``."""
    check_last_contiguous(name, tensor)
    if tensor.numel() == 0:
        return
    for dim in range(tensor.dim() - 1):
        step = tensor.stride(dim) * tensor.element_size()
        if tensor.shape[dim] > 1 and step % VECTOR_BYTES != 0:
            raise ValueError(
                f"{name}: rows must be aligned to {VECTOR_BYTES} bytes, got a stride of {step} bytes in dimension "
                f"{dim} (strides {tuple(tensor.stride())})"
            )
    if memory is None:
        memory = has_memory(tensor)
    if memory and tensor.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"{name}: rows must be aligned to {VECTOR_BYTES} bytes, got an address "
            f"{tensor.data_ptr() % VECTOR_BYTES} bytes off (storage offset {tensor.storage_offset()})"
        )


def check_operand(name: str, tensor, dtypes, shape, device, *, aligned: bool = False) -> None:
    """``check_tensor``, and that the last dimension is contiguous; aligned: also the rows' addresses."""
    check_tensor(name, tensor, dtypes, shape, device)
    (check_rows if aligned else check_last_contiguous)(name, tensor)


def check_range(name: str, tensor: torch.Tensor, low: int, high: int, what: str) -> None:
    """Raise ValueError unless the values of a CPU tensor lie in a range. what: what the range counts.

    Does nothing on other devices, and for tensors without values (while tracing, or batched by torch.func).
    """
    if tensor.device.type != "cpu" or not has_memory(tensor):
        return
    if low <= high:
        least, most = tensor.aminmax()
        if low <= int(least) and int(most) <= high:
            return
    wrong = (tensor < low) | (tensor > high)
    for index in wrong.nonzero()[:1].tolist():
        place = index[0] if len(index) == 1 else index
        at = f" at index {place}" if index else ""
        allowed = f"within {low}..{high} ({what})" if high >= low else f"absent, as there are no {what}"
        raise ValueError(f"{name}: must be {allowed}, got {int(tensor[tuple(index)])}{at}")


def refuse_gradients(**tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError naming the first argument that requires grad or carries a forward-mode derivative."""
    refuse_tangents(**tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: gradients are not implemented (forward only); detach it, or call under torch.no_grad()"
            )
