"""The host path without a GPU: CPU tensors pass for CUDA ones, and launches do nothing.

What stays is our Python, and torch's: checks, look-ups, plans, allocations, autograd. What is missing is the compiled
host functions (conversion of their arguments, TMA descriptors, the driver's launch) and CUDA's allocator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from warpspec.common import backend, launch, workspace
from warpspec.common.hardware import GPUS
from warpspec.fmha import flash_attn, problem, values

INDEX = -1  # what CPU tensors give as their device's index


@contextlib.contextmanager
def no_launches(arch: str = "sm_90a") -> Iterator[None]:
    """A context in which calls on CPU tensors take the way of calls on a GPU of ``arch``, up to the launches, which do
    nothing: results are what memory held."""
    target = launch.Target.of_model(GPUS[arch], INDEX)
    own = target.architecture.backend

    def on_gpu(device):
        return values.debugging()

    def new_workspace(words, device):
        return torch.full((words,), workspace.EMPTY, dtype=torch.int64)

    replaced = [
        (torch.Tensor, "is_cuda", property(lambda tensor: True)),
        (torch.cuda, "current_device", lambda: INDEX),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (torch._C, "_cuda_getDevice", lambda: INDEX),
        (launch, "_device_target", lambda device: target),
        (launch.Kernel, "launcher", lambda *_, **__: lambda *arguments: None),
        (backend, "_device_backend", lambda device: own),
        (workspace, "new_workspace", new_workspace),
        (problem, "are_checked", on_gpu),
        (flash_attn, "are_checked", on_gpu),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=not hasattr(owner, name)))
        yield
