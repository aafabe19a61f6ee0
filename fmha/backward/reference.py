"""Attention's gradients by their definition, in FP32 torch: what every backward kernel is compared with.

One query head at a time, as in ``fmha.reference``; nothing that the forward pass rounded is used.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from warpspec.common.autocast import without_autocast
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.block_mask import seen_by_heads
from warpspec.fmha.mask import visible
from warpspec.fmha.operands import Operands
from warpspec.fmha.reference import alone, weighted_sum
from warpspec.fmha.values import request_rows


@without_autocast
def backward(problem: BackwardProblem, operands: Operands, do, dlse) -> dict[str, torch.Tensor]:
    """Compute the wanted gradients, by name, in fp32, with their tensors' shapes; rows of no request are 0.

    operands: as kernels get them, v given. do: like o; dlse: like lse; either may be None.
    """
    found = {name: torch.zeros_like(getattr(operands, name), dtype=torch.float32) for name in problem.wanted}
    if not problem.forward.requests.packed_q:
        rectangle(problem, operands, do, dlse, found)
        return found
    forward = problem.forward
    keys = request_rows(operands.cu_seqlens_k, operands.k.shape[1])
    for b, rows in enumerate(request_rows(operands.cu_seqlens_q, forward.total_q)):
        q_start = None if operands.q_start is None else operands.q_start[b : b + 1]
        ranges = None if operands.ranges is None else operands.ranges[:, rows]
        parts = {"q": rows, "k": keys[b], "v": keys[b]}
        one = Operands(*(getattr(operands, n)[:, part] for n, part in parts.items()), sink=operands.sink)
        own = {name: t[:, parts[name]] if name in parts else t for name, t in found.items()}
        sizes = {"batch": 1, "seq_q": one.q.shape[1], "seq_k": one.k.shape[1]}
        request = replace(forward, requests=alone(forward), **sizes)
        if not request.is_empty:
            rectangle(
                replace(problem, forward=request),
                one._replace(q_start=q_start, ranges=ranges),
                None if do is None else do[:, rows],
                None if dlse is None else dlse[..., rows],
                own,
            )
    return found


def rectangle(problem: BackwardProblem, operands: Operands, do, dlse, found: dict) -> None:
    """Add to ``found`` the gradients of a problem with as many queries in each batch row."""
    forward = problem.forward
    q, k, v, sink, bias = operands.q, operands.k, operands.v, operands.sink, operands.bias
    seen = visible(forward, operands.kv_lengths, operands.q_start, ranges=operands.ranges)
    seen = seen_by_heads(forward, operands, seen)  # [B, 1 or Hq, Sq, Sk]
    for b in range(forward.batch):
        for h in range(forward.heads_q):
            head, kv_head = seen[b, h if seen.shape[1] > 1 else 0], h // forward.group  # [Sq, Sk]
            if bias is not None:
                head_bias = bias.expand(forward.batch, forward.heads_q, -1, -1)[b, h].float()
                head = head & (head_bias != -torch.inf)
            rows, keys = (head.any(dim=dim).nonzero()[:, 0] for dim in (1, 0))
            if len(keys) == 0:
                continue  # leave out keys that no row sees, and rows that see no key
            head = head[rows][:, keys]
            head_q, head_k, head_v = (
                q[b, rows, h].float(),
                k[b, keys, kv_head].float(),
                v[b, keys, kv_head].float(),
            )
            logits = forward.logits.logits(head_q @ head_k.T)
            slopes = forward.logits.slopes(logits)
            if bias is not None:
                logits = logits + head_bias[rows][:, keys]
            logits = torch.where(head, logits, -torch.inf)
            row_max = logits.amax(dim=1, keepdim=True)
            weights = torch.exp(logits - row_max)
            row_sum = weights.sum(dim=1, keepdim=True)
            scaled_down, sink_share = shares_of(row_max, row_sum, None if sink is None else sink[h].float())
            p = weights * scaled_down
            ds, row_dot = torch.zeros_like(p), 0.0
            if do is not None:
                head_do = do[b, rows, h].float()
                dp = torch.where(head, head_do @ head_v.T, 0.0)
                row_dot = (p * dp).sum(dim=1, keepdim=True)
                ds = p * (dp - row_dot)
            if dlse is not None:
                ds = ds + dlse[b, h, rows, None] * weights / row_sum
            ds = torch.where(head, ds, 0.0)
            values = "k" if forward.format.shared_kv else "v"
            if values in found and do is not None:
                found[values][b, keys, kv_head] += weighted_sum(p.T, head.T, head_do)
            if "bias" in found:
                place = found["bias"][b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0]
                place[rows[:, None], keys] += ds
            ds = torch.where(head, ds * slopes, 0.0)
            if "q" in found:
                found["q"][b, rows, h] += forward.logits.scale * weighted_sum(ds, head, head_k)
            if "k" in found:
                found["k"][b, keys, kv_head] += forward.logits.scale * weighted_sum(ds.T, head.T, head_q)
            if "sink" in found:
                found["sink"][h] -= (sink_share * row_dot).sum()


def shares_of(row_max, row_sum, sink) -> tuple:
    """(what a row's weights are multiplied by to become P, the sink's share of the row); weights are relative to
    row_max. Finite for every sink, however far above the logits. sink: a number, or None."""
    if sink is None:
        return 1.0 / row_sum, 0.0
    high = torch.maximum(row_max, sink)
    of_keys = torch.exp(row_max - high)
    of_sink = torch.where(sink == high, 1.0, torch.exp(sink - high))  # an infinite sink, too
    total = row_sum * of_keys + of_sink
    return of_keys / total, of_sink / total
