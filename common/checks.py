"""Checks of single arguments that operations share. They raise with the argument's name, its value and what is allowed.

The checks of attention's operands, which depend on each other, are in ``fmha.checks``.
"""

from __future__ import annotations

import math

import torch

from warpspec.common.backend import refuse_tangents
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.outputs import has_memory


def check_tensor(name, tensor, dtypes, shape, device, *, aligned: bool = False) -> None:
    """Check kind, dtype, shape (-1: any), device and a contiguous last dimension; aligned: also the rows' addresses."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {tensor!r} ({type(tensor).__name__})")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: must be a strided tensor, got layout {tensor.layout}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: dtype must be one of {', '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.dim() != len(shape) or any(
        w != -1 and w != n for w, n in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if n == -1 else str(n) for n in shape)
        raise ValueError(f"{name}: shape must be [{wanted}], got {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: must be on {device}, got {tensor.device}")
    if tensor.dim() and tensor.numel() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name}: the last dimension must be contiguous, got strides {list(tensor.stride())}"
        )
    if aligned and has_memory(tensor):
        width = tensor.element_size()
        strides = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
        if any(s * width % VECTOR_BYTES for s in strides) or tensor.data_ptr() % VECTOR_BYTES:
            raise ValueError(
                f"{name}: rows must be aligned to {VECTOR_BYTES} bytes, got strides {list(tensor.stride())} at an "
                f"address of {tensor.data_ptr() % VECTOR_BYTES} past a multiple"
            )


def check_range(name, tensor, low, high, what) -> None:
    """Check that the values of a CPU tensor lie in a range; skipped while tracing, when it has no values."""
    if torch.compiler.is_compiling():
        return
    wrong = (tensor < low) | (tensor > high)
    for i in wrong.nonzero()[:1, 0].tolist():
        raise ValueError(f"{name}: must be within {low}..{high} ({what}), got {int(tensor[i])} at index {i}")


def check_eps(eps) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise ValueError(f"eps: must be a finite number of at least 0, got {eps!r}")


def refuse_gradients(**tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError naming the first argument that requires grad or carries a forward-mode derivative."""
    refuse_tangents(**tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: gradients are not implemented (forward only); detach it, or call under torch.no_grad()"
            )
