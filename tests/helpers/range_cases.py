"""Images among text: ranges of keys that a query sees beside the causal ones, and calls of attention with them.

NaN and Inf stand at every key that no query sees, in some calls at keys that some see and others do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """queries, keys: of each request, the last queries of whose keys are asked for. images: (first, last) key of each
    image in every request, as far as it has such keys. cut: images are cut by the window on the left. poisoned: the
    first image's last value is NaN. shared: V is K. options: further arguments of the call."""

    id: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    images: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    page_size: int | None = None
    packed: bool = False
    cut: bool = False
    poisoned: bool = False
    shared: bool = False
    options: tuple = ()


CASES = [
    Case("packed-window", (210, 1, 90), (210, 70, 200), ((20, 80), (130, 190)), packed=True, poisoned=True,
         options=(("window", (30, 0)),)),
    Case("causal", (150,), (260,), ((100, 140), (141, 180), (200, 259)), (4, 2), 128),
    Case("pages-cut", (40, 40), (300, 150), ((110, 149), (262, 290)), (8, 1), page_size=32, cut=True,
         options=(("window", (60, 0)), ("softcap", 5.0))),
    Case("long-image", (130,), (300,), ((10, 295),), dtype=torch.float16, options=(("window", (16, 0)),)),
    Case("shared-512", (70,), (150,), ((90, 130),), (2, 1), 512, shared=True),
    Case("packed-512", (60, 3, 0), (190, 90, 5), ((140, 170), (88, 89)), (4, 2), 512, packed=True, poisoned=True),
    Case("256-splits", (9,), (500,), ((480, 499),), (4, 1), 256, options=(("num_splits", 3), ("window", (300, 0)))),
]  # fmt: skip


def ranges_of(case: Case, queries: int, keys: int) -> torch.Tensor:
    """int32 [queries, 2] of a request."""
    left = (dict(case.options).get("window") or (None,))[0]
    found = torch.full((queries, 2), -1, dtype=torch.int32)
    for first, last in case.images:
        for position in range(max(first, keys - queries), min(last + 1, keys)):
            begin = max(first, position - left) if case.cut else first
            found[position - (keys - queries)] = torch.tensor([begin, last])
    return found


def seen_by(case: Case, ranges: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """bool [queries, keys], by the contract's words."""
    left = (dict(case.options).get("window") or (None,))[0]
    position = torch.arange(keys - queries, keys)[:, None]
    key = torch.arange(keys)
    seen = key <= position
    if left is not None:
        seen = seen & (key >= position - left)
    return seen | ((ranges[:, :1] <= key) & (key <= ranges[:, 1:]))


def inputs_of(case: Case, seed: int = 0) -> dict:
    """Keyword arguments of ``attention`` or ``attention_varlen``."""
    generator = torch.Generator().manual_seed(seed)
    heads_q, heads_kv = case.heads
    requests = list(zip(case.queries, case.keys, strict=True))
    q = [torch.randn(n, heads_q, case.head_dim, generator=generator).to(case.dtype) for n, _ in requests]
    kv = [torch.randn(2, n, heads_kv, case.head_dim, generator=generator).to(case.dtype) for _, n in requests]
    ranges = [ranges_of(case, *sizes) for sizes in requests]
    for own, (queries, keys), each in zip(kv, requests, ranges, strict=True):
        hidden = ~seen_by(case, each, queries, keys).any(dim=0)
        own[0, hidden], own[1, hidden] = torch.inf, torch.nan
    if case.poisoned:
        kv[0][1, case.images[0][1]] = torch.nan
    if case.shared:
        kv = [own[:1] for own in kv]
    options = {"causal": True, **dict(case.options)}
    lengths = torch.tensor(case.keys, dtype=torch.int32)
    if case.packed:
        k, v = torch.cat(kv, dim=1)
        starts = (
            torch.tensor((0, *sizes), dtype=torch.int32).cumsum(0).int()
            for sizes in (case.queries, case.keys)
        )
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
        options |= {"max_seqlen_q": max(case.queries), "ranges": torch.cat(ranges)}
        return {"q": torch.cat(q), "k": k, "v": v, **options}
    page = case.page_size or 1
    slots = -(-max(case.keys) // page)
    rows = torch.full(
        (len(kv[0]), len(kv), slots * page, heads_kv, case.head_dim), torch.nan, dtype=case.dtype
    )
    for b, own in enumerate(kv):
        rows[:, b, : own.shape[1]] = own
    options |= {"ranges": torch.stack(ranges), "kv_lengths": lengths}
    if case.page_size:
        table = torch.randperm(len(kv) * slots, generator=generator).view(len(kv), -1).int()
        pages = torch.full(
            (len(rows), table.numel(), page, heads_kv, case.head_dim), torch.nan, dtype=case.dtype
        )
        pages[:, table.long()] = rows.unflatten(2, (-1, page))
        rows, options["page_table"] = pages, table
    return {"q": torch.stack(q), "k": rows[0], "v": rows[1] if len(rows) > 1 else None, **options}
