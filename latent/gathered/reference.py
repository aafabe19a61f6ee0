"""Gathered attention by its definition, in FP32 torch: one query at a time, on dequantised rows."""

from __future__ import annotations

import torch

from warpspec.common.autocast import without_autocast
from warpspec.fmha.state import AttentionState
from warpspec.latent.cache.reference import angles_at, rotate
from warpspec.latent.gathered.problem import VALUE_DIM, GatheredProblem, KeySet


@without_autocast
def forward(
    problem: GatheredProblem, q: torch.Tensor, key_sets: list[KeySet], rotate_back: tuple | None
) -> AttentionState:
    """The un-normalised state: o [T, H, 512] (rotated back if asked), row_max and row_sum [H, T], fp32."""
    o = torch.zeros(problem.tokens, problem.heads, VALUE_DIM, dtype=torch.float32, device=q.device)
    row_max = torch.full((problem.heads, problem.tokens), -torch.inf, dtype=torch.float32, device=q.device)
    row_sum = torch.zeros_like(row_max)
    for token in range(problem.tokens):
        keys = torch.cat([visible_rows(each, token) for each in key_sets])
        if len(keys) == 0:
            continue
        logits = problem.scale * (q[token].float() @ keys.T)  # [H, keys]
        row_max[:, token] = logits.amax(1)
        weights = torch.exp(logits - row_max[:, token, None])
        row_sum[:, token] = weights.sum(1)
        o[token] = weights @ keys[:, :VALUE_DIM]
    if rotate_back is not None:
        cos_sin, positions = rotate_back
        o = rotate(o, angles_at(cos_sin, positions)[:, None], back=True)
    return AttentionState(o, row_max, row_sum)


def visible_rows(key_set: KeySet, token: int) -> torch.Tensor:
    """fp32 [keys, D]: the rows that a query sees, in the order of its slots."""
    slots = key_set.slots[token]
    if key_set.lengths is not None:
        slots = slots[: max(0, int(key_set.lengths[token]))]
    return key_set.pool.read(slots[(slots >= 0) & (slots < key_set.pool.capacity)])
