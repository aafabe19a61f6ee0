"""Key ranges (``attention``'s ranges) from the keys' side: which queries see each key.

The intervals of keys that a request's queries see (``mask.intervals``) move up with the queries, with or without
ranges, provided that the ranges of one image end at the same key. So the queries that see a key form an interval, too.
"""

from __future__ import annotations

import torch

from warpspec.fmha.mask import intervals
from warpspec.fmha.operands import Operands
from warpspec.fmha.problem import AttentionProblem


def seen_by(problem: AttentionProblem, operands: Operands) -> torch.Tensor:
    """[first, end) of the queries that see each key, counted in the key's request: int32 [B, Sk, 2], or [1, Tk, 2] for
    packed requests. Undefined for keys of no request. The host does not wait for the device.

    operands: as kernels get them.
    """
    ranges, device = operands.ranges, operands.q.device
    row, key = (torch.arange(n, device=device) for n in (ranges.shape[1], operands.k.shape[1]))
    if not problem.requests.packed_q:
        length = operands.kv_lengths
        length = (
            row.new_full((len(ranges),), len(key)) if length is None else length.long().clamp(0, len(key))
        )
        start = length - len(row) if operands.q_start is None else operands.q_start.long()
        bounds = intervals(problem, start[:, None] + row, length[:, None], ranges)
        key, first_row = key.expand(len(ranges), -1).contiguous(), 0
    else:
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
        # Requests are packed: prefix rows and keys with their request's number.
        far = len(key) + 1
        bounds = [(bound.clamp(0, len(key)) + of_row * far)[None] for bound in bounds]
        own = of_key.clamp(max=last)
        key, first_row = (key - starts_k[own] + of_key * far)[None], starts_q[own]
    first, end = (
        torch.searchsorted(bound.contiguous(), key, right=True) - first_row for bound in reversed(bounds)
    )
    return torch.stack([first, end], dim=-1).int()
