"""Values held by the small tensors of a call: lengths, positions, page numbers.

Those of CPU tensors are always checked. Looking at a CUDA tensor's would stop the host until the device has caught
up, which no call may do unasked: they are checked where the environment variable WARPSPEC_DEBUG is 1. Without it
kernels read nothing out of bounds all the same: they clamp kv_lengths to 0..Sk, a page number out of range counts as
a page of zeros, and a position only says which keys a row sees.
"""

from __future__ import annotations

import os

import torch

DEBUG_VARIABLE = "WARPSPEC_DEBUG"
POSITION_LIMIT = 2**29  # of q_start, sequences, windows: one of each adds up within int32


def debugging() -> bool:
    """Whether WARPSPEC_DEBUG asks for checks that wait for the device. ValueError if it is none of "", "0", "1"."""
    value = os.environ.get(DEBUG_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{DEBUG_VARIABLE}: must be 0 or 1, got {value!r}")
    return value == "1"


def are_checked(device: torch.device) -> bool:
    """Whether a call looks at the values of its tensors on ``device``."""
    return device.type == "cpu" or debugging()


def check_values(kv_lengths, q_start, page_table, *, seq_k: int, pages: int, page_size: int | None) -> None:
    """Raise ValueError naming the argument, the value, where it stands and what is allowed.

    kv_lengths, q_start: int32 [B] or None. page_table: int32 [B, slots] or None; entries of pages wholly past the KV
    length may hold anything. All on one device, any: for CUDA tensors it waits for the device (so not while a CUDA
    graph is captured). seq_k: Sk. pages, page_size: of k.
    """
    checks = []  # (name, tensor, where it is wrong, what is allowed)
    if kv_lengths is not None:
        wrong = (kv_lengths < 0) | (kv_lengths > seq_k)
        checks.append(("kv_lengths", kv_lengths, wrong, f"0..{seq_k} (Sk)"))
    if q_start is not None:
        wrong = (q_start < -POSITION_LIMIT) | (q_start > POSITION_LIMIT)
        checks.append(("q_start", q_start, wrong, f"within +-{POSITION_LIMIT}"))
    if page_table is not None:
        first_key = torch.arange(page_table.shape[1], device=page_table.device) * page_size
        used = first_key < kv_lengths[:, None]
        wrong = used & ((page_table < 0) | (page_table >= pages))
        checks.append(("page_table", page_table, wrong, f"0..{pages - 1} (k has {pages} pages)"))
    if not checks:
        return
    for found, (name, tensor, wrong, allowed) in zip(
        torch.stack([wrong.any() for _, _, wrong, _ in checks]).tolist(), checks, strict=True
    ):
        if found:
            place = wrong.nonzero()[0].tolist()
            index = place[0] if len(place) == 1 else place
            entry = "" if len(place) == 1 else f", entry {place[1]}"
            raise ValueError(
                f"{name}: values must be {allowed}, got {int(tensor[tuple(place)])} at index {index} "
                f"(batch row {place[0]}{entry})"
            )
