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
        return _Call(self).arguments()

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


class _Call:
    """The arguments of a problem's call, while they are made. Methods draw in the order in which they stand here."""

    def __init__(self, problem: Problem):
        self.problem, self.has = problem, problem.features.__contains__
        self.draw, self.generator = random.Random(problem.seed), torch.Generator().manual_seed(problem.seed)
        self.options = {}

    def arguments(self) -> dict:
        """Keyword arguments; each is there if it is not None."""
        self.make_rows()
        self.make_options()
        by_query = self.make_ranges_and_trees()
        bias = self.make_bias()
        self.make_blocks()
        self.hide_unseen(by_query)
        self.store()
        self.lay_out_queries(by_query, bias)
        self.lay_out_keys()
        found = {"q": self.q, "k": self.k, "v": self.v, **self.options}
        optional = {name: value for name, value in found.items() if value is not None}
        return optional | {"v": self.v}

    def normal(self, *shape) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def make_rows(self) -> None:
        """Sizes, and the rows of each request in fp32 (q: in its dtype)."""
        has, draw = self.has, self.draw
        self.dim, self.dim_v = next(
            (SIZES[one] for one in sorted(self.problem.features) if one in SIZES), (64, 64)
        )
        if has("mla"):
            self.dim, self.dim_v = 576, 512
        one_head = has("mla") or (self.dim == 512 and has("shared"))
        self.batch, self.heads_kv = 2, 1 if one_head else draw.choice((1, 2))
        self.heads = self.heads_kv * (draw.choice((3, 5)) if has("odd group") else draw.choice((2, 4)))
        most_q = draw.randint(65, 90) if has("many queries") else draw.randint(1, 12)
        most_k = 160 if self.dim >= 512 else 300  # what the simulator does in a minute
        keys = [draw.randint(most_q, most_k), draw.choice((most_q, draw.randint(most_q, most_k)))]
        packed = self.problem.packed
        self.queries = [most_q, draw.randint(1, most_q) if packed else most_q]
        self.keys = keys if packed or has("lengths") or has("pages") else [keys[0]] * self.batch
        self.q = [self.normal(n, self.heads, self.dim).to(self.problem.dtype) for n in self.queries]
        self.k = [self.normal(n, self.heads_kv, self.dim) for n in self.keys]
        self.v = [self.normal(n, self.heads_kv, self.dim_v) for n in self.keys]

    def make_options(self) -> None:
        """The options that are no tensors of rows, and where queries stand."""
        has, draw, options = self.has, self.draw, self.options
        options |= {"causal": has("causal"), "normalize": not has("state")}
        options["window"] = draw.choice(((40, None), (15, 3), (90, 0))) if has("window") else None
        options["sink"] = self.normal(self.heads) if has("sink") else None
        options["num_splits"] = 3 if has("splits") else None
        options["softcap"] = 4.0 if has("softcap") else None
        if has("negative scale"):
            options["scale"] = -(self.dim**-0.5)
        if has("stride"):
            options["key_stride"] = 4
        self.starts = None
        if has("q_start"):
            self.starts = [draw.randint(-5, n * (4 if has("stride") else 1)) for n in self.keys]
            options["q_start"] = torch.tensor(self.starts, dtype=torch.int32)

    def make_ranges_and_trees(self) -> dict[str, list]:
        """By name, a tensor for each request."""
        begins = self.starts or [n - m for n, m in zip(self.keys, self.queries, strict=True)]
        found = {}
        if self.has("tree"):
            found["tree"] = [tree_words(random_tree(n, self.generator)) for n in self.queries]
        if self.has("ranges"):
            found["ranges"] = [
                _ranges(self.draw, n, begin) for n, begin in zip(self.queries, begins, strict=True)
            ]
        return found

    def make_bias(self) -> torch.Tensor | None:
        if not self.has("bias"):
            return None
        shape = (self.batch, 1, self.queries[0], max(self.keys))
        return self.normal(*shape).masked_fill(self.normal(*shape) > 1.5, -torch.inf)

    def make_blocks(self) -> None:
        if self.has("blocks"):
            most_q, most = self.queries[0], max(self.keys)  # pages have room for more
            lists = block_cases.Case(
                "", most_q, most, (self.heads, self.heads_kv), batch=self.batch, flex=self.draw.random() < 0.5,
                lists=(self.draw.choice((1, self.batch)), self.draw.choice((1, self.heads))),
            )  # fmt: skip
            mask = block_cases.mask_of(lists, self.generator)[0]
            self.options["block_mask"] = BlockMask.of(mask, most_q, most)

    def hide_unseen(self, by_query: dict[str, list]) -> None:
        """NaN and Inf in keys and values that no query sees."""
        options, names = self.options, ("causal", "window", "key_stride")
        for b in range(self.batch):
            own = {name: each[b][None] for name, each in by_query.items()}
            start = None if self.starts is None else options["q_start"][b : b + 1]
            problem = AttentionProblem.of(
                self.q[b][None], self.k[b][None].to(self.problem.dtype), q_start=start, **own,
                **{name: options[name] for name in names if name in options},
                **({"v_dim": self.dim_v} if self.has("mla") else {}),
            )  # fmt: skip
            seen = visible(problem, None, start, own.get("tree"), own.get("ranges"))
            hidden = ~_by_lists(options.get("block_mask"), problem, seen, b)[0].any(dim=0).any(dim=0)
            self.k[b][hidden], self.v[b][hidden] = torch.nan, torch.nan if self.has("e4m3") else torch.inf

    def store(self) -> None:
        """Keys and values in the dtype of the cache, with its scales."""
        has, kinds = self.has, {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
        stored = next((kinds[one] for one in kinds if has(one)), self.problem.dtype)
        self.k, self.v = (
            [_nvfp4(t) if has("nvfp4") else t.to(stored) for t in each] for each in (self.k, self.v)
        )
        if self.problem.features.intersection(QUANTISED):
            self.options["k_scale"] = torch.full((1,), 0.5)
            self.options["v_scale"] = torch.rand(self.batch, self.heads_kv) + 0.5
        if has("mla"):
            self.options["v_dim"] = self.dim_v

    def lay_out_queries(self, by_query: dict[str, list], bias: torch.Tensor | None) -> None:
        """Queries, and what comes with each, packed or as batch rows."""
        if self.problem.packed:
            self.options["cu_seqlens_q"] = _ends(self.queries)
            self.options["max_seqlen_q"] = self.queries[0]
            join = torch.cat
        else:
            self.options["bias"] = bias
            join = torch.stack
        self.options |= {name: join(each) for name, each in by_query.items()}
        self.q = join(self.q)

    def lay_out_keys(self) -> None:
        """Keys and values packed, as batch rows or in pages."""
        has, options = self.has, self.options
        if self.problem.packed and not has("pages"):
            options["cu_seqlens_k"] = _ends(self.keys)
            self.k, self.v = torch.cat(self.k), torch.cat(self.v)
        else:
            page = self.draw.choice((16, 32, 64, 128)) if has("pages") else 1
            room, bias = -(-max(self.keys) // page) * page, options.get("bias")
            if bias is not None:
                more = bias.new_zeros(*bias.shape[:3], room - max(self.keys))
                options["bias"] = torch.cat([bias, more], dim=3)
            self.k, self.v = (torch.stack([_padded(t, room) for t in each]) for each in (self.k, self.v))
            if has("lengths") or has("pages"):
                options["kv_lengths"] = torch.tensor(self.keys, dtype=torch.int32)
            if has("pages"):
                count = self.batch * room // page
                table = torch.randperm(count, generator=self.generator).view(self.batch, -1).int()
                options["page_table"] = table
                self.k, self.v = (_paged(t, table, page) for t in (self.k, self.v))
        if has("nvfp4"):
            self.k, options["k_block_scales"] = _apart(self.k, self.dim)
            self.v, options["v_block_scales"] = _apart(self.v, self.dim)
        if has("shared") or has("mla"):
            self.v = options["v_block_scales"] = None


def _ends(lengths: list[int]) -> torch.Tensor:
    """cu_seqlens of requests."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


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
