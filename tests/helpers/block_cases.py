"""Lists of blocks, and calls of attention with them.

NaN and Inf stand at every key that no query sees, in some calls at keys that some see and others do not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import create_block_mask

from helpers.attention_cases import LSE_TOLERANCE
from helpers.gpu_tensors import moved
from warpspec.fmha import BlockMask, attention

NONE, PARTIAL, FULL = range(3)


class FlashLists(NamedTuple):
    """flash-attn-4's record, with the fields that are read."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None
    full_block_idx: torch.Tensor | None
    block_size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Case:
    """lists: (batch rows, heads) that have lists of their own. flex: the mask is a random one of elements, given as
    FlexAttention's; otherwise flash-attn-4's lists. parts: of blocks that are not listed, partial and full. block:
    (queries, keys), for flash-attn-4's. poisoned: a value that some rows see is NaN. options: further arguments of the
    call."""

    id: str
    queries: int
    keys: int
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 64
    batch: int = 1
    lists: tuple[int, int] = (1, 1)
    flex: bool = True
    parts: tuple[float, float, float] = (0.4, 0.3, 0.3)
    block: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    poisoned: bool = False
    options: tuple = ()
    packed = False


CASES = [
    Case("flex", 200, 300, (4, 2), poisoned=True, options=(("sink", torch.tensor([0.5, -1.0, 0.0, 2.0])),)),
    Case("flex-heads", 130, 257, (4, 2), 128, 2, lists=(2, 4), options=(("softcap", 3.0),)),
    Case("lists-causal", 300, 300, (2, 2), 128, lists=(1, 2), flex=False, options=(("causal", True),), poisoned=True),
    Case("lists-window", 257, 500, (8, 2), 64, 2, flex=False, lists=(2, 1),
         options=(("causal", True), ("window", (150, 0)), ("num_splits", 2))),
    Case("flex-256-state", 140, 270, (2, 1), 256, dtype=torch.float16, options=(("normalize", False),)),
    Case("flex-512", 70, 200, (2, 1), 512, options=(("num_splits", 2),)),
    Case("lists-256x64", 300, 190, (6, 2), 80, flex=False, block=(256, 64), parts=(0.5, 0.0, 0.5)),
    Case("full-only", 130, 200, (1, 1), 64, parts=(0.5, 0.0, 0.5), dtype=torch.float16),
    Case("no-block", 140, 140, (1, 1), 64, flex=False, parts=(1.0, 0.0, 0.0)),
    Case("decode-splits", 1, 900, (8, 1), 128, 2, lists=(2, 1), options=(("num_splits", 3),)),
]  # fmt: skip


def kinds_of(case: Case, generator) -> torch.Tensor:
    """NONE, PARTIAL or FULL of each block [b, h, M, N]; the first block of queries sees nothing."""
    shape = [-(-n // size) for n, size in zip((case.queries, case.keys), case.block, strict=True)]
    draws = torch.multinomial(torch.tensor(case.parts), case.lists[0] * case.lists[1] * shape[0] * shape[1], True,
                              generator=generator)  # fmt: skip
    kinds = draws.view(*case.lists, *shape)
    if shape[0] > 1:
        kinds[0, 0, 0] = NONE
    return kinds


def by_element(case: Case, kinds: torch.Tensor) -> torch.Tensor:
    wide = kinds.repeat_interleave(case.block[0], 2).repeat_interleave(case.block[1], 3)
    return wide[:, :, : case.queries, : case.keys]


def flash_lists(case: Case, kinds: torch.Tensor, generator) -> FlashLists:
    """The lists of blocks, each in random order; what follows them is no block's number."""
    found = []
    for kind in (PARTIAL, FULL):
        own = kinds == kind
        order = torch.rand(own.shape, generator=generator).masked_fill(~own, 2.0).argsort(dim=-1)
        counts = own.sum(dim=-1).int()
        past = torch.arange(own.shape[-1]) >= counts[..., None]
        found += [counts, order.masked_fill(past, 10**6).int()]
    return FlashLists(*found, None if case.block == (128, 128) else case.block)


def mask_of(case: Case, generator) -> tuple:
    """(lists, bool [b, h, Sq, Sk] of what is seen)."""
    options = dict(case.options)
    kinds = kinds_of(case, generator)
    wide = by_element(case, kinds)
    if case.flex:
        table = torch.rand(wide.shape, generator=generator) < 0.5
        table = (wide == FULL) | ((wide == PARTIAL) & table)
        b, h = (n if n > 1 else None for n in case.lists)
        lists = create_block_mask(
            lambda b, h, q, k: table[b, h, q, k], b, h, case.queries, case.keys, device="cpu"
        )
        return lists, table
    position = torch.arange(case.keys - case.queries, case.keys)[:, None]
    key, seen = torch.arange(case.keys), torch.ones(case.queries, case.keys, dtype=torch.bool)
    if options.get("causal"):
        seen = seen & (key <= position)
    if options.get("window"):
        left, _ = options["window"]
        seen = seen & (key >= position - left)
    return flash_lists(case, kinds, generator), (wide == FULL) | ((wide == PARTIAL) & seen)


def inputs_of(case: Case, seed: int = 0) -> tuple[dict, torch.Tensor]:
    """(keyword arguments of ``attention``, bool [B, Hq, Sq, Sk] of what is seen)."""
    generator = torch.Generator().manual_seed(seed)
    lists, seen = mask_of(case, generator)
    heads_q, heads_kv = case.heads
    seen = seen.expand(case.batch, heads_q, -1, -1)

    def rows(n, heads):
        return torch.randn(case.batch, n, heads, case.head_dim, generator=generator).to(case.dtype)

    q, k, v = rows(case.queries, heads_q), rows(case.keys, heads_kv), rows(case.keys, heads_kv)
    by_key = seen.unflatten(1, (heads_kv, -1)).flatten(2, 3).transpose(1, 2)  # [B, rows, Hkv, Sk]
    hidden = ~by_key.any(dim=1).transpose(1, 2)  # [B, Sk, Hkv]
    k[hidden], v[hidden] = torch.inf, torch.nan
    if case.poisoned:
        some = by_key.any(dim=1) & ~by_key.all(dim=1)
        place = some.transpose(1, 2).nonzero()[0]
        v[tuple(place)] = torch.nan
    if case.head_dim == 512:
        v = None
    return {"q": q, "k": k, "v": v, "block_mask": lists, **dict(case.options)}, seen


def moved_inputs(inputs: dict) -> dict:
    """Inputs on the GPU."""
    lists = BlockMask.of(inputs["block_mask"], inputs["q"].shape[1], inputs["k"].shape[1])
    return moved(inputs | {"block_mask": lists})


class Requests(NamedTuple):
    """A call of ``attention_varlen`` with lists. rows: slices of its queries. keys: (k, v) of each request. seen: bool
    [queries, keys] of each."""

    call: dict
    rows: list[slice]
    keys: list[tuple]
    seen: list[torch.Tensor]

    def check(self, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Assert that results are those of each request alone with a bias of -inf at its hidden elements."""
        for rows, (k, v), seen in zip(self.rows, self.keys, self.seen, strict=True):
            bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            q, k, v, bias = (t[None] for t in (self.call["q"][rows], k, v, bias[None]))
            expected, expected_lse = attention(q, k, v, bias=bias, return_lse=True, backend="reference")
            own, own_lse = o[rows][None].cpu().float(), lse[:, rows][None].cpu()
            torch.testing.assert_close(own, expected.float(), rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(own_lse, expected_lse, rtol=0.0, atol=LSE_TOLERANCE)


# (queries, keys) of requests; lists are for LONGEST, so that the last one has queries and keys past them.
REQUESTS, LONGEST = ((5, 70), (0, 40), (3, 0), (130, 256), (1, 300), (140, 129), (260, 600)), (256, 512)


def requests_of(pages: bool, generator) -> Requests:
    """Packed requests whose lists have full and partial blocks everywhere."""
    heads, page = 2, 16
    case = Case(
        "", *LONGEST, (heads, 1), batch=len(REQUESTS), lists=(len(REQUESTS), 1), parts=(0.2, 0.3, 0.5)
    )
    kinds = kinds_of(case, generator)
    table = torch.rand(by_element(case, kinds).shape, generator=generator) < 0.5
    wide = by_element(case, kinds)
    table = (wide == FULL) | ((wide == PARTIAL) & table)
    lists = create_block_mask(
        lambda b, h, q, k: table[b, 0, q, k], len(REQUESTS), None, *LONGEST, device="cpu"
    )
    q, rows, keys, seen, end = [], [], [], [], 0
    for own, (queries, length) in zip(table[:, 0], REQUESTS, strict=True):
        q.append(torch.randn(queries, heads, 64, generator=generator).bfloat16())
        k, v = (torch.randn(length, 1, 64, generator=generator).bfloat16() for _ in "kv")
        visible = torch.zeros(queries, length, dtype=torch.bool)
        part = own[:queries, :length]
        visible[: part.shape[0], : part.shape[1]] = part
        nobody = ~visible.any(dim=0)
        k[nobody], v[nobody] = torch.nan, torch.inf
        rows.append(slice(end, end := end + queries))
        keys.append((k, v))
        seen.append(visible)
    call = {"q": torch.cat(q), "block_mask": lists, "max_seqlen_q": max(n for n, _ in REQUESTS)}
    call["cu_seqlens_q"] = torch.tensor([0, *(one.stop for one in rows)], dtype=torch.int32)
    lengths = [n for _, n in REQUESTS]
    if not pages:
        call["cu_seqlens_k"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        call["k"], call["v"] = (torch.cat([own[i] for own in keys]) for i in range(2))
        return Requests(call, rows, keys, seen)
    most = -(-max(lengths) // page)
    numbers = torch.randperm(len(REQUESTS) * most, generator=generator).view(len(REQUESTS), most)
    for name, i in (("k", 0), ("v", 1)):
        room = torch.full((numbers.numel(), page, 1, 64), torch.nan).bfloat16()
        for own, places in zip(keys, numbers, strict=True):
            used = own[i].new_full((most * page, 1, 64), torch.nan)
            used[: len(own[i])] = own[i]
            room[places] = used.unflatten(0, (most, page))
        call[name] = room
    return Requests(
        call | {"page_table": numbers.int(), "kv_lengths": torch.tensor(lengths, dtype=torch.int32)},
        rows,
        keys,
        seen,
    )


EVEN, SPARSE, NOTHING = (0.4, 0.3, 0.3), (0.7, 0.2, 0.1), (1.0, 0.0, 0.0)
