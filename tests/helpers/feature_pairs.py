"""Calls of attention that together have every feature with every other one.

``covering(seed)`` draws sets of features until each pair that goes together is in one of them; ``Problem`` makes a call
of such a set: random lengths, NaN and Inf at every key that no query sees, outputs poisoned. Judged by the reference.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import torch

from helpers import block_cases
from helpers.attention_cases import LSE_TOLERANCE, O_TOLERANCE, relative_error
from helpers.tree_cases import random_tree
from warpspec.cache.quantize import quantize_nvfp4
from warpspec.fmha import BlockMask, attention, attention_varlen, tree_words
from warpspec.fmha.block_mask import LISTS, seen_by_heads
from warpspec.fmha.mask import visible
from warpspec.fmha.problem import AttentionProblem

SIZES = {"d72": (72, 72), "d128": (128, 128), "d192/128": (192, 128), "d256": (256, 256), "d512": (512, 512)}
FEATURES = (
    "causal", "window", "sink", "bias", "pages", "packed", "lengths", "q_start", "stride", "state", "splits", "softcap",
    "fp16", "shared", "mla", "e4m3", "e5m2", "nvfp4", "tree", "ranges", "blocks", "odd group", "negative scale",
    "many queries", *SIZES,
)  # fmt: skip
QUANTISED = ("e4m3", "e5m2", "nvfp4")
NEEDS = {"stride": "causal", "tree": "causal", "ranges": "causal"}
NAN_BYTE = 0x7F  # of NVFP4, a block scale
APART = [  # groups of features no two of which go together
    (*SIZES, "mla"),
    QUANTISED,
    ("stride", "tree", "ranges"),
    ("packed", "lengths"),
    ("packed", "bias"),
    ("state", "sink"),
    ("stride", "window"),
    ("mla", "shared"),
    ("d192/128", "shared"),
    ("many queries", "tree"),
    ("blocks", "tree"),
    *((quantised, other) for quantised in QUANTISED for other in ("bias", "mla", "d72", "d192/128", "d512")),
]


class Rules(NamedTuple):
    """features: all there are. needs: feature -> another that it comes with. apart: groups of features no two of which
    go together."""

    features: tuple[str, ...]
    needs: dict[str, str]
    apart: list[tuple[str, ...]]

    def legal(self, features: frozenset) -> bool:
        """Whether there is a call with just these features."""
        return all(self.needs[one] in features for one in features & self.needs.keys()) and all(
            len(features.intersection(group)) < 2 for group in self.apart
        )


FORWARD = Rules(FEATURES, NEEDS, APART)


def covering(seed: int, rules: Rules = FORWARD, most: int = 10, draws: int = 60) -> list[frozenset]:
    """Sets of at most ``most`` features that hold every legal pair, each the best of this many draws."""
    draw, left, needs = random.Random(seed), set(), rules.needs
    for pair in itertools.combinations(rules.features, 2):
        needed = frozenset(pair) | {needs[one] for one in pair if one in needs}
        if rules.legal(needed):
            left.add(frozenset(pair))
    found = []
    while left:
        first = draw.choice(sorted(left, key=sorted))
        best, gain = None, -1
        for _ in range(draws):
            features = set(first) | {needs[one] for one in first if one in needs}
            for one in draw.sample(rules.features, len(rules.features)):
                more = features | {one} | ({needs[one]} if one in needs else set())
                if len(more) <= most and rules.legal(frozenset(more)):
                    features = more
            covered = sum(pair <= features for pair in left)
            if covered > gain:
                best, gain = frozenset(features), covered
        found.append(best)
        left = {pair for pair in left if not pair <= best}
    return found


@dataclass(frozen=True)
class Problem:
    """A call with these features."""

    features: frozenset
    seed: int

    @property
    def id(self) -> str:
        return "+".join(sorted(self.features)) or "plain"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if "fp16" in self.features else torch.bfloat16

    @property
    def packed(self) -> bool:
        return "packed" in self.features

    def arguments(self) -> dict:
        """Keyword arguments of ``attention`` or ``attention_varlen``."""
        has, draw = self.features.__contains__, random.Random(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        dim, dim_v = next((SIZES[one] for one in sorted(self.features) if one in SIZES), (64, 64))
        if has("mla"):
            dim, dim_v = 576, 512
        batch, heads_kv = 2, 1 if has("mla") or (dim == 512 and has("shared")) else draw.choice((1, 2))
        heads = heads_kv * (draw.choice((3, 5)) if has("odd group") else draw.choice((2, 4)))
        most_q = draw.randint(65, 90) if has("many queries") else draw.randint(1, 12)
        most_k = 160 if dim >= 512 else 300  # what the simulator does in a minute
        keys = [draw.randint(most_q, most_k), draw.choice((most_q, draw.randint(most_q, most_k)))]
        queries = [most_q, draw.randint(1, most_q) if self.packed else most_q]
        if not (self.packed or has("lengths") or has("pages")):
            keys = [keys[0]] * batch

        def normal(*shape):
            return torch.randn(shape, generator=generator)

        q = [normal(n, heads, dim).to(self.dtype) for n in queries]
        k = [normal(n, heads_kv, dim) for n in keys]
        v = [normal(n, heads_kv, dim_v) for n in keys]
        options = {"causal": has("causal"), "normalize": not has("state")}
        options["window"] = draw.choice(((40, None), (15, 3), (90, 0))) if has("window") else None
        options["sink"] = normal(heads) if has("sink") else None
        options["num_splits"] = 3 if has("splits") else None
        options["softcap"] = 4.0 if has("softcap") else None
        if has("negative scale"):
            options["scale"] = -(dim**-0.5)
        if has("stride"):
            options["key_stride"] = 4
        starts = None
        if has("q_start"):
            starts = [draw.randint(-5, n * (4 if has("stride") else 1)) for n in keys]
            options["q_start"] = torch.tensor(starts, dtype=torch.int32)
        begins = starts or [n - m for n, m in zip(keys, queries, strict=True)]
        by_query = {}
        if has("tree"):
            by_query["tree"] = [tree_words(random_tree(n, generator)) for n in queries]
        if has("ranges"):
            by_query["ranges"] = [_ranges(draw, n, begin) for n, begin in zip(queries, begins, strict=True)]
        bias = None
        if has("bias"):
            bias = normal(batch, 1, most_q, max(keys)).masked_fill(
                normal(batch, 1, most_q, max(keys)) > 1.5, -torch.inf
            )
        if has("blocks"):
            most = max(keys)  # pages have room for more
            lists = block_cases.Case(
                "", most_q, most, (heads, heads_kv), batch=batch, flex=draw.random() < 0.5,
                lists=(draw.choice((1, batch)), draw.choice((1, heads))),
            )  # fmt: skip
            options["block_mask"] = BlockMask.of(block_cases.mask_of(lists, generator)[0], most_q, most)
        for b in range(batch):  # NaN and Inf where nobody looks
            own = {name: each[b][None] for name, each in by_query.items()}
            start = None if starts is None else options["q_start"][b : b + 1]
            names = ("causal", "window", "key_stride")
            problem = AttentionProblem.of(
                q[b][None], k[b][None].to(self.dtype), q_start=start, **own,
                **{name: options[name] for name in names if name in options},
                **({"v_dim": dim_v} if has("mla") else {}),
            )  # fmt: skip
            seen = visible(problem, None, start, own.get("tree"), own.get("ranges"))
            hidden = ~_by_lists(options.get("block_mask"), problem, seen, b)[0].any(dim=0).any(dim=0)
            k[b][hidden], v[b][hidden] = torch.nan, torch.nan if has("e4m3") else torch.inf
        stored = torch.float8_e4m3fn if has("e4m3") else torch.float8_e5m2 if has("e5m2") else self.dtype
        k, v = ([_nvfp4(t) if has("nvfp4") else t.to(stored) for t in each] for each in (k, v))
        if self.features.intersection(QUANTISED):
            options["k_scale"], options["v_scale"] = torch.full((1,), 0.5), torch.rand(batch, heads_kv) + 0.5
        if has("mla"):
            options["v_dim"] = dim_v
        if self.packed:
            options["cu_seqlens_q"] = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
            options["max_seqlen_q"] = most_q
            options |= {name: torch.cat(each) for name, each in by_query.items()}
            q = torch.cat(q)
        else:
            options |= {name: torch.stack(each) for name, each in by_query.items()}
            options["bias"], q = bias, torch.stack(q)
        lengths = torch.tensor(keys, dtype=torch.int32)
        if self.packed and not has("pages"):
            options["cu_seqlens_k"] = torch.tensor([0, *itertools.accumulate(keys)], dtype=torch.int32)
            k, v = torch.cat(k), torch.cat(v)
        else:
            page = draw.choice((16, 32, 64, 128)) if has("pages") else 1
            room = -(-max(keys) // page) * page if bias is None else max(keys)
            if bias is not None and has("pages"):
                room = -(-max(keys) // page) * page
                more = bias.new_zeros(batch, 1, most_q, room - max(keys))
                options["bias"] = torch.cat([bias, more], dim=3)
            k, v = (torch.stack([_padded(t, room) for t in each]) for each in (k, v))
            if has("lengths") or has("pages"):
                options["kv_lengths"] = lengths
            if has("pages"):
                count = batch * room // page
                table = torch.randperm(count, generator=generator).view(batch, -1).int()
                options["page_table"] = table
                k, v = (_paged(t, table, page) for t in (k, v))
        if has("nvfp4"):
            (k, options["k_block_scales"]), (v, options["v_block_scales"]) = (_apart(t, dim) for t in (k, v))
        if has("shared") or has("mla"):
            v = options["v_block_scales"] = None
        return {
            "q": q,
            "k": k,
            "v": v,
            **{name: value for name, value in options.items() if value is not None},
        }

    def run(self, arguments: dict, **where):
        """(o, lse), o over a poisoned ``out``."""
        call = attention_varlen if self.packed else attention
        normalize = arguments["normalize"]
        q, v = arguments["q"], arguments["v"]
        size = arguments.get("v_dim") or (q if v is None else v).shape[-1]
        if v is not None and "nvfp4" in self.features:
            size *= 2  # numbers of a byte
        dtype = self.dtype if normalize else torch.float32
        out = torch.full((*q.shape[:-1], size), torch.nan, dtype=dtype, device=q.device)
        result = call(**arguments, out=out, return_lse=normalize, **where)
        if normalize:
            return result
        sums = result.row_sum.transpose(-1, -2)[..., None]
        return torch.where(sums > 0, result.o / sums, result.o), result.lse

    def check(self, got, arguments: dict) -> None:
        """Assert that a result is the reference's."""
        o, lse = (t.cpu() for t in got)
        expected, expected_lse = self.run(arguments, backend="reference")
        if self.packed:
            o, expected = o[None], expected[None]
        assert o.isfinite().all() and expected.isfinite().all()
        error = relative_error(o.float(), expected.float())
        assert error <= O_TOLERANCE[self.dtype], f"worst head's error {error:.2e}"
        seen = expected_lse != -torch.inf
        assert torch.equal(seen, lse != -torch.inf)
        assert not seen.any() or (lse - expected_lse)[seen].abs().max() <= LSE_TOLERANCE


def _by_lists(
    lists: BlockMask | None, problem: AttentionProblem, seen: torch.Tensor, request: int
) -> torch.Tensor:
    """bool [1, 1 or Hq, Sq, Sk] of what a request's queries see. seen [1, Sq, Sk]: without lists."""
    if lists is None:
        return seen[:, None]
    problem = replace(problem, mask=replace(problem.mask, block_size=lists.block_size))
    own = {
        name: t[min(request, len(t) - 1)][None] if name in LISTS else t for name, t in lists.operands.items()
    }
    return seen_by_heads(problem, SimpleNamespace(kv_lengths=None, **own), seen)


def _ranges(draw: random.Random, queries: int, begin: int) -> torch.Tensor:
    """int32 [queries, 2]: images of random sizes among text."""
    found, i = torch.full((queries, 2), -1, dtype=torch.int32), 0
    while i < queries:
        size = draw.randint(1, max(queries // 2, 1))
        if draw.random() < 0.6 and begin + i >= 0:
            found[i : i + size] = torch.tensor([begin + i, begin + i + size - 1 + draw.randint(0, 5)])
        i += size
    return found


def _nvfp4(t: torch.Tensor) -> torch.Tensor:
    """uint8 [n, Hkv, D / 2 + D / 16] of [n, Hkv, D]: codes, then block scales; those of keys that are not finite are
    NaN."""
    hidden = ~t.isfinite().all(dim=-1)
    codes, blocks = quantize_nvfp4(t.masked_fill(hidden[..., None], 1.0), torch.tensor(1.0))
    blocks = blocks.view(torch.uint8).masked_fill(hidden[..., None], NAN_BYTE)
    return torch.cat([codes.view(torch.uint8), blocks], dim=-1)


def _apart(rows: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, block scales) of rows as ``_nvfp4`` makes them."""
    return rows[..., : dim // 2].contiguous(), rows[..., dim // 2 :].contiguous()


def _padded(t: torch.Tensor, length: int) -> torch.Tensor:
    """[length, Hkv, D] of a request's keys, NaN past them."""
    value = NAN_BYTE if t.dtype == torch.uint8 else torch.nan
    return torch.cat([t, torch.full((length - len(t), *t.shape[1:]), value).to(t.dtype)])


def _paged(t: torch.Tensor, table: torch.Tensor, page: int) -> torch.Tensor:
    """[pages, page, Hkv, D] of [B, Sk, Hkv, D]."""
    rows = t.unflatten(1, (-1, page))
    pages = torch.empty_like(rows.flatten(0, 1))
    pages.view(torch.uint8)[table.long().flatten()] = rows.flatten(0, 1).view(torch.uint8)
    return pages
