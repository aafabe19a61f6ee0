"""Chooses the backend that runs a call."""

from __future__ import annotations

import os

import torch
from torch.autograd import forward_ad

from warpspec.common.architecture import ARCHITECTURES, architecture_of, native_backends
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.repeated import BACKEND_VARIABLE

OTHER_BACKENDS = ("sim", "reference")  # besides the native ones


def resolve_backend(backend: str, device: torch.device) -> str:
    """The backend that runs a call on tensors on ``device``: a native one, "sim" or "reference".

    backend: one of these, or "auto". "auto" takes the environment variable WARPSPEC_BACKEND if it is set (and not empty
    or "auto" itself), otherwise the device's native backend for CUDA tensors and "sim" for CPU tensors.

    Raises TypeError for anything but a string, ValueError for any other name, and UnsupportedProblem if the backend
    does not run on the device. There is no silent fallback.
    """
    source = "backend"
    if not isinstance(backend, str):
        raise TypeError(f"backend: must be a string, got {backend!r} ({type(backend).__name__})")
    if backend == "auto":
        backend = os.environ.get(BACKEND_VARIABLE, "") or "auto"
        source = BACKEND_VARIABLE
    if backend == "auto":
        return _device_backend(device)
    if backend == "reference" or (backend == "sim" and device.type == "cpu"):
        return backend
    native = native_backends()
    if backend not in (*native, *OTHER_BACKENDS):
        allowed = ", ".join(("auto", *native, *OTHER_BACKENDS))
        raise ValueError(f"{source}: must be one of {allowed}, got {backend!r}")
    if backend == "sim":
        raise UnsupportedProblem(f"{source} 'sim': the simulator takes CPU tensors, got {device}")
    if backend in native:
        if device.type != "cuda":
            raise UnsupportedProblem(
                f"{source} {backend!r}: a native kernel takes CUDA tensors, got {device} (on a CPU: 'sim')"
            )
        own = _device_backend(device)
        if own != backend:
            raise UnsupportedProblem(f"{source} {backend!r}: {device} runs {own!r} kernels")
    return backend


def refuse_tangents(**tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError naming the first argument that carries a forward-mode derivative. torch would drop the
    derivative without any message."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name}: forward-mode derivatives are not implemented")


def _device_backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "sim"
    if device.type != "cuda":
        raise UnsupportedProblem(
            f"backend 'auto': {device} tensors have none (cuda and cpu do); 'reference' runs anywhere"
        )
    capability = torch.cuda.get_device_capability(device)
    found = architecture_of(capability)
    if found is None:
        known = ", ".join(f"{one.capability[0]}.{one.capability[1]}" for one in ARCHITECTURES.values())
        raise UnsupportedProblem(
            f"backend 'auto': no native kernel for compute capability {capability[0]}.{capability[1]} of {device}; "
            f"{known} have one, 'reference' runs anywhere"
        )
    return found.backend
