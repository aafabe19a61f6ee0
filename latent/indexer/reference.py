"""The indexer by its definitions, in FP32 torch: queries, scores, top k."""

from __future__ import annotations

import torch

from warpspec.common.autocast import without_autocast
from warpspec.latent.cache.pools import NO_SLOT, pages_of, table_slots
from warpspec.latent.cache.reference import angles_at, hadamard_transform, rotate


def query_rows(q, cos_sin, positions, hadamard: bool) -> torch.Tensor:
    """K3: the rows of queries q before quantisation, bf16 [T, H, 128]."""
    rows = rotate(q, angles_at(cos_sin, positions)[:, None]).bfloat16()
    return hadamard_transform(rows).bfloat16() if hadamard else rows


@without_autocast
def index_scores(queries, weights, keys) -> torch.Tensor:
    """K4: fp32 [T, N], sum over heads of weight * ReLU(q . k).

    queries: fp32 [T, H, 128]. weights: [T, H]. keys: fp32 [N, 128] or [T, N, 128].
    """
    products = torch.einsum("thd,nd->thn" if keys.dim() == 2 else "thd,tnd->thn", queries, keys)
    return torch.einsum("th,thn->tn", weights.float(), products.relu())


def index_topk(logits, k, lengths, page_table, requests, page_size) -> tuple[torch.Tensor, torch.Tensor]:
    """K5: (slots int32 [T, k], counts int32 [T]), one row at a time, by a stable sort."""
    slots = torch.full((len(logits), k), NO_SLOT, dtype=torch.int32, device=logits.device)
    counts = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    for t, row in enumerate(logits.float()):
        length = row.shape[0] if lengths is None else min(max(int(lengths[t]), 0), row.shape[0])
        row = row[:length]
        order = sort_key(row).argsort(descending=True, stable=True)
        chosen = order[row[order] != -torch.inf][:k].sort().values
        if page_table is not None:
            found = table_slots(pages_of(page_table, requests[t : t + 1]), chosen[None], page_size)[0]
        else:
            found = chosen.to(torch.int32)
        slots[t, : len(chosen)], counts[t] = found, len(chosen)
    return slots, counts


def sort_key(row: torch.Tensor) -> torch.Tensor:
    """int64 keys that sort in order of preference: NaN first, -0 equal to 0."""
    bits = (row.float() + 0.0).view(torch.int32).long()
    key = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    return torch.where(row.isnan(), 1 << 32, key)
