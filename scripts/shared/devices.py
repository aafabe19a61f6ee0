"""Where a backend's tensors are."""

from __future__ import annotations

import torch

CPU_BACKENDS = ("sim", "reference")


def device_of(backend: str) -> str:
    """The device whose tensors a backend takes on this machine; "auto" takes the GPU's where there is one."""
    return "cpu" if backend in CPU_BACKENDS or not torch.cuda.is_available() else "cuda"
