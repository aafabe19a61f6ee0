"""Which backend runs a call."""

from __future__ import annotations

import os

import torch
from torch.autograd import forward_ad

from warpspec.common.errors import UnsupportedProblem

BACKENDS = ("sm100", "sm90", "sim", "reference")
BACKEND_VARIABLE = "WARPSPEC_BACKEND"
# First number of a device's compute capability -> its native backend. 9: Hopper (9.0); 10: Blackwell (10.x).
NATIVE_BACKENDS = {9: "sm90", 10: "sm100"}


def resolve_backend(backend: str, device: torch.device) -> str:
    """The backend, one of ``BACKENDS``, that runs a call on tensors on ``device``.

    backend: one of ``BACKENDS``, or "auto": the environment variable WARPSPEC_BACKEND where set (and not
    empty or "auto" itself), otherwise the device's native backend for CUDA tensors and "sim" for CPU tensors.

    Raises ValueError for a name that is none of these, UnsupportedProblem where the backend does not run on
    the device. Nothing falls back silently.
    """
    source = "backend"
    if backend == "auto":
        backend = os.environ.get(BACKEND_VARIABLE, "") or "auto"
        source = BACKEND_VARIABLE
    if backend == "auto":
        return _device_backend(device)
    if backend not in BACKENDS:
        raise ValueError(f"{source}: must be one of {', '.join(('auto', *BACKENDS))}, got {backend!r}")
    if backend == "sim" and device.type != "cpu":
        raise UnsupportedProblem(f"{source} 'sim': the simulator takes CPU tensors, got {device}")
    if backend in NATIVE_BACKENDS.values():
        if device.type != "cuda":
            raise UnsupportedProblem(
                f"{source} {backend!r}: a native kernel takes CUDA tensors, got {device} (on a CPU: 'sim')"
            )
        native = _device_backend(device)
        if native != backend:
            raise UnsupportedProblem(f"{source} {backend!r}: {device} runs {native!r} kernels")
    return backend


def refuse_tangents(**tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError naming the first argument that carries a forward-mode derivative: torch would drop it
    without a word."""
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
    major, minor = torch.cuda.get_device_capability(device)
    if major not in NATIVE_BACKENDS:
        raise UnsupportedProblem(
            f"backend 'auto': no native kernel for compute capability {major}.{minor} of {device}; "
            "9.0 and 10.x have one, 'reference' runs anywhere"
        )
    return NATIVE_BACKENDS[major]
