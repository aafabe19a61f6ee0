"""Key ranges (``attention``'s ranges) from the keys' side: which queries see each key.

The intervals of keys that a request's queries see (``mask.intervals``) move up with the queries, with or without
ranges, provided that the ranges of one image end at the same key. So the queries that see a key form an interval, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpspec.fmha.mask import intervals
from warpspec.fmha.operands import Operands
from warpspec.fmha.problem import AttentionProblem


class Bounds(NamedTuple):
    """Intervals of keys that queries see, [B, Sq], or [1, T] for packed requests, and keys to look up among them.

    first, end: the interval of each query. key: [B, Sk] or [1, Tk]. first_row: the row of the request's first query,
    for each key. Packed queries and keys have their request's number in front, so that all of them ascend if each
    request's do.
    """

    first: torch.Tensor
    end: torch.Tensor
    key: torch.Tensor
    first_row: torch.Tensor | int


def bounds_of(problem: AttentionProblem, operands: Operands) -> Bounds:
    """The bounds of a call's queries. operands: as kernels get them. The host does not wait for the device."""
    ranges, device = operands.ranges, operands.q.device
    row, key = (torch.arange(n, device=device) for n in (ranges.shape[1], operands.k.shape[-3]))
    if not problem.requests.packed_q:
        length = operands.kv_lengths
        length = (
            row.new_full((len(ranges),), len(key)) if length is None else length.long().clamp(0, len(key))
        )
        start = length - len(row) if operands.q_start is None else operands.q_start.long()
        bounds = intervals(problem, start[:, None] + row, length[:, None], ranges)
        return Bounds(*bounds, key.expand(len(ranges), -1).contiguous(), 0)
    starts_q, starts_k = (t.long() for t in (operands.cu_seqlens_q, operands.cu_seqlens_k))
    of_row, of_key = (
        torch.searchsorted(starts[1:].contiguous(), index, right=True)
        for starts, index in ((starts_q, row), (starts_k, key))
    )
    last = len(starts_q) - 2
    own = of_row.clamp(max=last)
    length = starts_k.diff()[own]
    start = length - starts_q.diff()[own] if operands.q_start is None else operands.q_start.long()[own]
    bounds = intervals(problem, start + row - starts_q[own], length, ranges[0])
    far = len(key) + 1
    bounds = [(bound.clamp(0, len(key)) + of_row * far)[None] for bound in bounds]
    own = of_key.clamp(max=last)
    return Bounds(*bounds, (key - starts_k[own] + of_key * far)[None], starts_q[own])


def seen_by(problem: AttentionProblem, operands: Operands) -> torch.Tensor:
    """[first, end) of the queries that see each key, counted in the key's request: int32 [B, Sk, 2], or [1, Tk, 2] for
    packed requests. Undefined for keys of no request. The host does not wait for the device.

    operands: as kernels get them.
    """
    found = bounds_of(problem, operands)
    first, end = (
        torch.searchsorted(bound.contiguous(), found.key, right=True) - found.first_row
        for bound in (found.end, found.first)
    )
    return torch.stack([first, end], dim=-1).int()


def check_ascending(problem: AttentionProblem, operands: Operands) -> None:
    """Raise ValueError if some query's keys begin or end before those of the query in front of it: the queries that see
    a key would be no interval. operands: as kernels get them. Waits for the device."""
    found = bounds_of(problem, operands)
    wrong = (found.first.diff(dim=-1) < 0) | (found.end.diff(dim=-1) < 0)
    if problem.requests.packed_q:
        wrong &= torch.arange(1, found.first.shape[-1], device=wrong.device) < operands.cu_seqlens_q[-1]
    if wrong.any():
        batch, row = wrong.nonzero()[0].tolist()
        before, own = (tuple(operands.ranges[batch, at].tolist()) for at in (row, row + 1))
        index = [row + 1] if problem.requests.packed_q else [batch, row + 1]
        raise ValueError(
            "ranges: gradients need keys that neither begin nor end earlier than those of the query before, got "
            f"{own} at index {index} after {before}"
        )
