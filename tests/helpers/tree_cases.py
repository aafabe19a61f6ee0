"""Trees of drafts: random ones, attention of each draft's path by itself, and calls of attention with trees.

In the calls NaN and Inf stand at every key that no draft sees, and in some at keys that some see and others do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.fmha import attention, tree_words

# Drafts and prefix: below, at and past tiles of keys; one draft; a tree of as many as a word has bits; no prefix.
SHAPES = ((7, 130), (1, 64), (64, 200), (16, 0), (33, 95))


def random_tree(drafts: int, generator: torch.Generator, chain: float = 0.3) -> torch.Tensor:
    """bool [d, d]: which drafts each sees. The parent of a draft is the one before it with probability ``chain``, else
    any of those before."""
    mask = torch.eye(drafts, dtype=torch.bool)
    for i in range(1, drafts):
        follows = torch.rand((), generator=generator) < chain
        parent = i - 1 if follows else int(torch.randint(i, (), generator=generator))
        mask[i] |= mask[parent]
    return mask


def path_by_path(q, k, v, mask, start: int, **options):
    """(o [d, Hq, D], lse [Hq, d]) of one request: each draft as the only query, over the prefix and its path.

    q [d, Hq, D]; k, v [L, Hkv, D], of which the prefix is the first ``start``; mask bool [d, d].
    """
    results = []
    for i in range(len(q)):
        path = mask[i].nonzero()[:, 0] + start
        keys = torch.cat([torch.arange(start), path[path < len(k)]])
        own = (t[None, keys] for t in (k, v))
        results.append(
            attention(q[None, None, i], *own, causal=True, return_lse=True, backend="reference", **options)
        )
    return torch.cat([o[0] for o, _ in results]), torch.cat([lse[0] for _, lse in results], dim=1)


@dataclass(frozen=True)
class Case:
    """prefixes: keys of each request before its drafts. poisoned: a draft's key holds NaN and Inf, which reach those
    that see it and nobody else. options: further arguments of the call. kv_dtype: k's and v's."""

    id: str
    drafts: int
    prefixes: tuple[int, ...]
    heads: tuple[int, int] = (4, 1)
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    page_size: int | None = None
    packed: bool = False
    poisoned: bool = False
    options: tuple = ()
    kv_dtype: torch.dtype | None = None


CASES = [
    Case("packed-window", 13, (190, 0, 61), packed=True, options=(("window", (40, 0)), ("softcap", 5.0))),
    Case("pages-line", 16, (600, 900, 40), (8, 1), page_size=64, poisoned=True),
    Case(
        "whole-word",
        64,
        (100, 3),
        (2, 1),
        128,
        torch.float16,
        poisoned=True,
        options=(("window", (20, None)),),
    ),
    Case("splits", 7, (500, 300), (16, 2), 128, options=(("num_splits", 3),)),
    Case("shared-512", 5, (150,), (8, 1), 512),
    Case("256", 9, (150,), (4, 2), 256, options=(("window", (3, 0)),)),
    Case("fp8-few", 4, (300, 70), (4, 1), 64, options=(("window", (90, 0)),), kv_dtype=torch.float8_e4m3fn),
    Case("state", 30, (131,), (3, 1), options=(("normalize", False),)),
]


def inputs_of(case: Case, seed: int = 0) -> dict:
    """Keyword arguments of ``attention`` or ``attention_varlen``, with NaN and Inf where nobody looks."""
    generator = torch.Generator().manual_seed(seed)
    heads_q, heads_kv = case.heads
    batch, most = len(case.prefixes), max(case.prefixes) + case.drafts
    page = case.page_size or 1
    most = -(-most // page) * page
    q = torch.randn(batch, case.drafts, heads_q, case.head_dim, generator=generator).to(case.dtype)
    kv = torch.randn(2, batch, most, heads_kv, case.head_dim, generator=generator).to(case.dtype)
    lengths = torch.tensor(case.prefixes, dtype=torch.int32) + case.drafts
    masks = torch.stack([random_tree(case.drafts, generator) for _ in case.prefixes])
    left = (dict(case.options).get("window") or (None,))[0]
    for b, length in enumerate(lengths.tolist()):
        kv[:, b, length:] = torch.nan
        if left is not None:
            kv[:, b, : max(length - case.drafts - 1 - left, 0)] = torch.inf
    if case.poisoned:
        kv[1, 0, case.prefixes[0] + case.drafts // 2] = torch.nan
    kv = kv.to(case.kv_dtype or case.dtype)
    options = {"causal": True, "tree": tree_words(masks), **dict(case.options)}
    if case.head_dim == 512:
        kv[1] = kv[0]
    k, v = kv[0], None if case.head_dim == 512 else kv[1]
    if case.packed:
        rows = [slice(0, n) for n in lengths.tolist()]
        k, v = (torch.cat([t[b, own] for b, own in enumerate(rows)]) for t in (k, v))
        starts = torch.arange(batch + 1, dtype=torch.int32) * case.drafts
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": ends, "max_seqlen_q": case.drafts}
        return {"q": q.flatten(0, 1), "k": k, "v": v, **options, "tree": options["tree"].flatten()}
    if case.page_size:
        table = torch.randperm(batch * (most // page), generator=generator).view(batch, -1).int()
        pages = kv.new_full((2, table.numel(), page, heads_kv, case.head_dim), torch.nan)
        pages[:, table.long()] = kv.unflatten(2, (-1, page))
        return {"q": q, "k": pages[0], "v": pages[1], "page_table": table, "kv_lengths": lengths, **options}
    return {"q": q, "k": k, "v": v, "kv_lengths": lengths, **options}
