"""Values held by the small tensors of a call: lengths, positions, page numbers, where packed requests begin.

Values of CPU tensors are always checked. Reading a CUDA tensor's values makes the host wait for the device, so they are
checked only if the environment variable WARPSPEC_DEBUG is 1. Without it, kernels still read nothing out of bounds: they
clamp kv_lengths to 0..Sk, a page number out of range counts as a page of zeros, a position only says which keys a row
sees, and the rows of a packed request are those within the tensor (``request_rows``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from warpspec.common.repeated import variable_reader

DEBUG_VARIABLE = "WARPSPEC_DEBUG"
_debug_variable = variable_reader(DEBUG_VARIABLE)
POSITION_LIMIT = 2**29  # limit of q_start, sequences and windows: one of each adds up within int32


def debugging() -> bool:
    """Whether WARPSPEC_DEBUG enables checks that wait for the device. ValueError if it is none of "", "0", "1"."""
    value = _debug_variable()
    if value is None:
        return False
    value = os.fsdecode(value)
    if value not in ("", "0", "1"):
        raise ValueError(f"{DEBUG_VARIABLE}: must be 0 or 1, got {value!r}")
    return value == "1"


def are_checked(device: torch.device) -> bool:
    """Whether a call looks at the values of its tensors on ``device``."""
    return device.type == "cpu" or debugging()


class _Check(NamedTuple):
    """A check of a tensor's values: where they are wrong, and what is allowed there."""

    name: str
    tensor: torch.Tensor
    wrong: torch.Tensor
    allowed: str


def check_values(
    kv_lengths, q_start, page_table, *, seq_k: int, pages: int, page_size: int | None, starts: Sequence = ()
) -> None:
    """Raise ValueError naming the argument, the value, where it stands and what is allowed.

    kv_lengths, q_start: int32 [B] or None. page_table: int32 [B, slots] or None; entries of pages wholly past the KV
    length may hold anything. All on one device, any: for CUDA tensors it waits for the device (so not while a CUDA
    graph is captured). seq_k: Sk. pages, page_size: of k. starts: (name, cu_seqlens int32 [B + 1], rows of the packed
    tensor, its name) of each cu_seqlens.
    """
    checks = []
    if kv_lengths is not None:
        wrong = (kv_lengths < 0) | (kv_lengths > seq_k)
        checks.append(_Check("kv_lengths", kv_lengths, wrong, f"0..{seq_k} (Sk)"))
    if q_start is not None:
        wrong = (q_start < -POSITION_LIMIT) | (q_start > POSITION_LIMIT)
        checks.append(_Check("q_start", q_start, wrong, f"within +-{POSITION_LIMIT}"))
    if page_table is not None:
        first_key = torch.arange(page_table.shape[1], device=page_table.device) * page_size
        used = first_key < kv_lengths[:, None]
        wrong = used & ((page_table < 0) | (page_table >= pages))
        checks.append(_Check("page_table", page_table, wrong, f"0..{pages - 1} (k has {pages} pages)"))
    for name, tensor, rows, packed in starts:
        descends = torch.zeros_like(tensor, dtype=torch.bool)
        descends[1:] = tensor[1:] < tensor[:-1]
        begins = torch.zeros_like(descends)
        begins[:1] = tensor[:1] != 0
        checks += [
            _Check(name, tensor, begins, "0 at first"),
            _Check(name, tensor, descends, "in ascending order"),
            _Check(name, tensor, tensor > rows, f"0..{rows} ({packed} has {rows} rows)"),
        ]
    if not checks:
        return
    for found, (name, tensor, wrong, allowed) in zip(
        torch.stack([check.wrong.any() for check in checks]).tolist(), checks, strict=True
    ):
        if found:
            place = wrong.nonzero()[0].tolist()
            index = place[0] if len(place) == 1 else place
            entry = "" if len(place) == 1 else f", entry {place[1]}"
            row = "" if name.startswith("cu_seqlens") else f" (batch row {place[0]}{entry})"
            raise ValueError(
                f"{name}: values must be {allowed}, got {int(tensor[tuple(place)])} at index {index}{row}"
            )


def check_ranges(operands, seq_k: int) -> None:
    """Raise ValueError if a range of ``ranges`` does not contain its query's own position. operands: ``Operands``.
    seq_k: Sk. Waits for the device."""
    ranges, starts_q, starts_k = operands.ranges.long(), operands.cu_seqlens_q, operands.cu_seqlens_k
    row = torch.arange(ranges.shape[-2], device=ranges.device)
    if starts_q is None:
        batch, queries, query = ranges.shape[0], ranges.shape[1], row
    else:
        batch, queries = len(starts_q) - 1, starts_q.diff()
        if batch == 0:  # the rows are nobody's
            return
        request = torch.searchsorted(starts_q[1:].contiguous(), row, right=True).clamp(max=batch - 1)
        query = row - starts_q[request]
    if starts_k is not None:
        length = starts_k.diff()
    else:
        length = row.new_full((batch,), seq_k) if operands.kv_lengths is None else operands.kv_lengths
    start = length - queries if operands.q_start is None else operands.q_start
    position = query + (start[:, None] if starts_q is None else start[request])
    first, last = ranges.unbind(-1)
    wrong = ((first > position) | (last < position) | (first < 0)) & ((first != -1) | (last != -1))
    if starts_q is not None:
        wrong &= row < starts_q[-1]
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"ranges: must be (-1, -1) or hold the query's position, {int(position[place])}, got "
            f"({int(first[place])}, {int(last[place])}) at index {list(place)}"
        )


def check_scale(name: str, scale: torch.Tensor | None) -> None:
    """Raise ValueError for a scale of codes that is negative, NaN or Inf. Waits for the device."""
    if scale is not None and not ((scale >= 0) & (scale != torch.inf)).all():
        raise ValueError(f"{name}: values must be finite and at least 0, got {scale.tolist()}")


def request_rows(cu_seqlens: torch.Tensor, rows: int) -> list[slice]:
    """The rows of each request of a packed tensor of this many: those within the tensor, if values are unchecked. Waits
    for the device."""
    found = cu_seqlens.clamp(0, rows).tolist()
    return [slice(first, max(first, end)) for first, end in itertools.pairwise(found)]
