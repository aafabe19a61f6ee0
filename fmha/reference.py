"""Attention by its definition, in FP32 torch: what every kernel is compared with.

One query head at a time, and for it: which keys each row sees, its logits, softmax's sums, the values.
Nothing here is fast, and nothing is shared with the kernels but the visibility rule.
"""

from __future__ import annotations

import torch

from warpspec.fmha.mask import visible
from warpspec.fmha.operands import Operands
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.state import AttentionState


def forward(problem: AttentionProblem, operands: Operands) -> AttentionState:
    """The un-normalised state of a checked problem; v is given."""
    q, k, v, bias = operands.q, operands.k, operands.v, operands.bias
    o = torch.zeros(problem.o_shape, device=problem.device)
    row_max = torch.full(problem.stat_shape, -torch.inf, device=problem.device)
    row_sum = torch.zeros(problem.stat_shape, device=problem.device)
    seen = visible(problem, operands.kv_lengths, operands.q_start)  # [B, Sq, Sk]
    if operands.page_table is not None:
        k, v = (gather_pages(pages, operands.page_table) for pages in (k, v))  # [B, Sk, Hkv, D]
    for b in range(problem.batch):
        for h in range(problem.heads_q):
            head = seen[b]  # [Sq, Sk]
            if bias is not None:
                head_bias = bias.expand(problem.batch, problem.heads_q, -1, -1)[b, h].float()
                head = head & (head_bias != -torch.inf)
            keys = head.any(dim=0).nonzero()[:, 0]  # keys that no row sees take no part
            if len(keys) == 0:
                continue
            head = head[:, keys]
            head_k, head_v = (t[b, keys, h // problem.group].float() for t in (k, v))  # [keys, D]
            logits = problem.scale * (q[b, :, h].float() @ head_k.T)  # [Sq, keys]
            if bias is not None:
                logits = logits + head_bias[:, keys]
            logits = torch.where(head, logits, -torch.inf)
            row_max[b, h] = logits.amax(dim=1)
            weights = torch.where(head, torch.exp(logits - row_max[b, h, :, None]), 0.0)
            row_sum[b, h] = weights.sum(dim=1)
            o[b, :, h] = weighted_sum(weights, head, head_v)
    return AttentionState(o, row_max, row_sum)


def weighted_sum(weights, seen, values) -> torch.Tensor:
    """[Sq, D]: sum over the keys a row sees of weight * value; [Sq, keys], [Sq, keys], [keys, D].

    A matrix product, except for keys that store NaN or Inf: 0 * NaN would bring them to rows that do not see
    them.
    """
    finite = values.isfinite().all(dim=1)
    terms = weights[:, ~finite, None] * values[~finite]  # [Sq, keys with NaN or Inf, D]
    return weights[:, finite] @ values[finite] + torch.where(seen[:, ~finite, None], terms, 0.0).sum(dim=1)


def gather_pages(pages, page_table) -> torch.Tensor:
    """[B, Sk, Hkv, D] from [pages, page_size, Hkv, D]; entries past kv_lengths may hold any number."""
    if len(pages) == 0:
        return pages.new_zeros(page_table.shape[0], page_table.shape[1] * pages.shape[1], *pages.shape[2:])
    return pages[page_table.long().clamp(0, len(pages) - 1)].flatten(1, 2)
