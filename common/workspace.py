"""Workspaces in global memory for counters and states of CTAs.

Every launch finds all words EMPTY and leaves them EMPTY.
"""

from __future__ import annotations

import threading

import torch

EMPTY = -1  # an unused word; as two floats it is (NaN, NaN), which is no valid state
RESERVE_WORDS = 1 << 20  # 8 MiB: for 3900 launches of MLA, each of which takes two words of every CTA

_workspaces: dict[tuple[int, int], torch.Tensor] = {}  # key: device and stream
_reserves: dict[int, torch.Tensor] = {}  # words that no launch has used yet; key: device
_lock = threading.Lock()


def new_workspace(words: int, device: torch.device) -> torch.Tensor:
    """A new workspace of ``words`` Int64, all EMPTY."""
    return torch.full((words,), EMPTY, dtype=torch.int64, device=device)


def prepare_reserve(device_index: int) -> None:
    """Fill the device's reserve, once, unless the current stream is being captured; waits for the device."""
    if device_index not in _reserves and not torch.cuda.is_current_stream_capturing():
        _reserves[device_index] = new_workspace(RESERVE_WORDS, torch.device("cuda", device_index))
        torch.cuda.synchronize(device_index)


def workspace(words: int, device_index: int) -> torch.Tensor:
    """At least ``words`` Int64 on a CUDA device, all EMPTY, that no concurrent launch uses.

    Each stream has one workspace. It runs its launches one after another, and each launch leaves the workspace EMPTY. A
    launch that is captured into a graph gets one of its own, permanently: from the reserve, or if that is used up, one
    that the graph fills at every replay.
    """
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            left = _reserves.get(device_index)
            if left is not None and left.numel() >= words:
                _reserves[device_index] = left[words:]
                return left[:words]
        return new_workspace(words, torch.device("cuda", device_index))
    key = (device_index, torch._C._cuda_getCurrentRawStream(device_index))
    found = _workspaces.get(key)
    if found is None or found.numel() < words:
        size = 1 << (words - 1).bit_length()
        found = _workspaces[key] = new_workspace(size, torch.device("cuda", device_index))
    return found
