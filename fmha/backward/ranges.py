"""Ranges of keys that queries see besides, from the keys' side: which queries see each key.

The intervals of keys that a request's queries see (``mask.intervals``) move up with the queries, ranges or not, as long
as those of one image end alike: so the queries that see a key are an interval, too.
"""

from __future__ import annotations

import torch

from warpspec.fmha.mask import intervals
from warpspec.fmha.operands import Operands
from warpspec.fmha.problem import AttentionProblem


def seen_by(problem: AttentionProblem, operands: Operands) -> torch.Tensor:
    """[first, end) of the queries that see each key, int32 [B, Sk, 2], of packed requests [1, Tk, 2]: numbers in the
    key's request. Keys of no request have anything. Nothing waits for the device.

    operands: as kernels get them.
    """
    ranges, device = operands.ranges, operands.q.device
    row, key = (torch.arange(n, device=device) for n in (ranges.shape[1], operands.k.shape[1]))
    if not problem.packed_q:
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
        # Requests one behind another: rows and keys get their request's number in front.
        far = len(key) + 1
        bounds = [(bound.clamp(0, len(key)) + of_row * far)[None] for bound in bounds]
        own = of_key.clamp(max=last)
        key, first_row = (key - starts_k[own] + of_key * far)[None], starts_q[own]
    first, end = (
        torch.searchsorted(bound.contiguous(), key, right=True) - first_row for bound in reversed(bounds)
    )
    return torch.stack([first, end], dim=-1).int()
