"""Attention by its definition, in FP32 torch: what every kernel is compared with.

One query head at a time, and for it: which keys each row sees, its logits, softmax's sums, the values.
Nothing here is fast, and only the visibility rule is shared with the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from warpspec.common.autocast import without_autocast
from warpspec.fmha.block_mask import LISTS, TENSORS, seen_by_heads
from warpspec.fmha.features import RequestLayout
from warpspec.fmha.mask import visible
from warpspec.fmha.operands import Operands
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.quantized import BLOCK, BLOCK_SCALES, SCALES, dequantized, linear
from warpspec.fmha.state import AttentionState
from warpspec.fmha.values import request_rows


@without_autocast
def forward(problem: AttentionProblem, operands: Operands) -> AttentionState:
    """The un-normalised state of a checked problem; v is given. With packed queries, rows of no request are 0."""
    return packed(problem, operands) if problem.requests.packed_q else rectangle(problem, operands)


def packed(problem: AttentionProblem, operands: Operands) -> AttentionState:
    """The state of packed requests, one request at a time."""
    state = empty_state(problem)
    keys = None
    if problem.requests.packed_k:
        keys = request_rows(operands.cu_seqlens_k, operands.k.shape[1])
    for b, rows in enumerate(request_rows(operands.cu_seqlens_q, problem.total_q)):
        q_start = None if operands.q_start is None else operands.q_start[b : b + 1]
        scales = {name: getattr(operands, name) for name in SCALES}
        scales = {name: None if scale is None else scale[b : b + 1] for name, scale in scales.items()}
        cached = {name: getattr(operands, name) for name in ("k", "v", *BLOCK_SCALES)}
        if keys is not None:
            cached = {name: None if t is None else t[:, keys[b]] for name, t in cached.items()}
        by_query = {name: getattr(operands, name) for name in ("tree", "ranges")}
        by_query = {name: None if t is None else t[:, rows] for name, t in by_query.items()}
        lists = {name: getattr(operands, name) for name in TENSORS}
        lists |= {
            name: t[b : b + 1] for name, t in lists.items() if name in LISTS and t is not None and len(t) > 1
        }
        one = Operands(operands.q[:, rows], q_start=q_start, **by_query, **cached, **scales, **lists)
        if keys is not None:
            seq_k = one.k.shape[1]
        else:
            seq_k = operands.page_table.shape[1] * problem.requests.page_size
            lengths = operands.kv_lengths[b : b + 1].clamp(0, seq_k)
            used = -(-int(lengths) // problem.requests.page_size)  # entries of the table that hold keys
            seq_k = used * problem.requests.page_size
            one = one._replace(page_table=operands.page_table[b : b + 1, :used], kv_lengths=lengths)
        seq_q = one.q.shape[1]
        if seq_q == 0 or seq_k == 0:
            continue
        sizes = {"batch": 1, "seq_q": seq_q, "seq_k": seq_k, "requests": alone(problem)}
        own = rectangle(replace(problem, **sizes), one)
        state.o[:, rows] = own.o
        state.row_max[..., rows], state.row_sum[..., rows] = own.row_max, own.row_sum
    return state


def alone(problem: AttentionProblem) -> RequestLayout:
    """The layout of one of a problem's packed requests as a batch of its own."""
    return replace(problem.requests, packed_q=False, packed_k=False)


def empty_state(problem: AttentionProblem) -> AttentionState:
    """The state of rows that see no key."""
    row_max = torch.full(problem.stat_shape, -torch.inf, dtype=torch.float32, device=problem.device)
    return AttentionState(
        torch.zeros(problem.o_shape, dtype=torch.float32, device=problem.device),
        row_max,
        torch.zeros_like(row_max),
    )


def rectangle(problem: AttentionProblem, operands: Operands) -> AttentionState:
    """The state of a problem with the same number of queries in each batch row."""
    q, bias = operands.q, operands.bias
    o, row_max, row_sum = state = empty_state(problem)
    given = (operands.kv_lengths, operands.q_start, operands.tree, operands.ranges)
    seen = seen_by_heads(problem, operands, visible(problem, *given))  # [B, 1 or Hq, Sq, Sk]
    k, v = keys_and_values(problem, operands)
    # So many consecutive query heads have the same keys, values and mask.
    alike = 1 if (bias is not None and bias.shape[1] > 1) or seen.shape[1] > 1 else problem.group
    for b in range(problem.batch):
        for h in range(problem.heads_q):
            if h % alike == 0:
                head = seen[b, h if seen.shape[1] > 1 else 0]  # [Sq, Sk]
                if bias is not None:
                    head_bias = bias.expand(problem.batch, problem.heads_q, -1, -1)[b, h].float()
                    head = head & (head_bias != -torch.inf)
                keys = head.any(dim=0).nonzero()[:, 0]  # leave out keys that no row sees
                head = head[:, keys]
                kv_head = h // problem.group
                head_k, head_v = (each.of_head(b, keys, kv_head) for each in (k, v))  # [keys, D]
                finite = head_v.isfinite().all(dim=1)
            if len(keys) == 0:
                continue
            logits = problem.logits.logits(q[b, :, h].float() @ head_k.T)  # [Sq, keys]
            if bias is not None:
                logits = logits + head_bias[:, keys]
            logits = torch.where(head, logits, -torch.inf)
            row_max[b, h] = logits.amax(dim=1)
            weights = torch.where(head, torch.exp(logits - row_max[b, h, :, None]), 0.0)
            row_sum[b, h] = weights.sum(dim=1)
            o[b, :, h] = weighted_sum(weights, head, head_v, finite)
    return state


class Rows(NamedTuple):
    """Keys or values: codes [B, Sk, Hkv, D] or bytes of them, block scales [B, Sk, Hkv, D/16] or None, scale [B, Hkv,
    1] or None."""

    codes: torch.Tensor
    blocks: torch.Tensor | None
    scale: torch.Tensor | None

    def of_head(self, batch: int, keys: torch.Tensor, head: int) -> torch.Tensor:
        """fp32 [keys, D]."""
        blocks = None if self.blocks is None else self.blocks[batch, keys, head]
        values = dequantized(self.codes[batch, keys, head], blocks)
        return values if self.scale is None else values * self.scale[batch, head]


def keys_and_values(problem: AttentionProblem, operands: Operands) -> tuple[Rows, Rows]:
    """K and V, gathered from their pages."""
    k_blocks, v_blocks = operands.k_block_scales, operands.v_block_scales
    if k_blocks is not None and v_blocks is None:
        v_blocks = k_blocks[..., : problem.heads.v // BLOCK]
    found = (operands.k, linear(k_blocks, False), operands.v, linear(v_blocks, problem.format.swizzled))
    if operands.page_table is not None:
        found = (None if t is None else gather_pages(t, operands.page_table) for t in found)
    k, k_blocks, v, v_blocks = found
    return Rows(k, k_blocks, operands.k_scale), Rows(v, v_blocks, operands.v_scale)


def weighted_sum(weights, seen, values, finite=None) -> torch.Tensor:
    """[Sq, D]: sum over the keys a row sees of weight * value; [Sq, keys], [Sq, keys], [keys, D].

    A matrix product, except for keys that store NaN or Inf: 0 * NaN would bring them to rows that do not see
    them. finite [keys]: those that store neither; None: not known.
    """
    if finite is None:
        finite = values.isfinite().all(dim=1)
    if finite.all():
        return weights @ values
    terms = weights[:, ~finite, None] * values[~finite]  # [Sq, keys with NaN or Inf, D]
    return weights[:, finite] @ values[finite] + torch.where(seen[:, ~finite, None], terms, 0.0).sum(dim=1)


def gather_pages(pages, page_table) -> torch.Tensor:
    """[B, Sk, Hkv, D] from [pages, page_size, Hkv, D]; entries past kv_lengths may hold any number."""
    if len(pages) == 0:
        return pages.new_zeros(page_table.shape[0], page_table.shape[1] * pages.shape[1], *pages.shape[2:])
    return pages[page_table.long().clamp(0, len(pages) - 1)].flatten(1, 2)
