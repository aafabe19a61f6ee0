"""Packed batches for ``attention_varlen``: requests of any length, keys packed or paged, and how to judge a result.

A batch is small enough for the simulator. The judge takes the requests apart and compares each with the reference of
``attention`` on that request alone, so that nothing of the packed path judges itself.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from helpers.attention_cases import Case, check
from helpers.page_layouts import paged
from warpspec.fmha import AttentionState
from warpspec.fmha.mask import visible
from warpspec.fmha.problem import AttentionProblem

SPARE_ROWS = 3  # rows of q, out and packed keys past the last request, all NaN
LAYOUTS = ("plain", "sliced", "interleaved")


@dataclass(frozen=True)
class Packed:
    """One call of ``attention_varlen``.

    seq_q, seq_k: queries and keys of each request. page_size: None for packed keys. hint_q, hint_k: max_seqlen_q,
    max_seqlen_k of the call; None is the longest request's for queries, and none given for keys. q_start: one value
    a request, or None. prefix: keys, whole pages of them, with which all requests begin alike, so that they share
    pages. poisoned: requests that hold NaN throughout. spare_slots: entries of the page table past the longest request.
    layout, "plain": contiguous tensors; "sliced": q, k and v are some heads of tensors with more heads, of NaN;
    "interleaved": K and V are one tensor [pages, Hkv, page, 2 D] (packed: [Tk, Hkv, 2 D]) seen as two.
    """

    id: str
    seq_q: tuple[int, ...]
    seq_k: tuple[int, ...]
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    v_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    page_size: int | None = None
    hint_q: int | None = None
    hint_k: int | None = None
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    sink: bool = False
    q_start: tuple[int, ...] | None = None
    key_stride: int = 1
    normalize: bool = True
    shared_kv: bool = False
    num_splits: int | None = None
    prefix: int = 0
    poisoned: tuple[int, ...] = ()
    spare_slots: int = 2
    layout: str = "plain"
    seed: int = 0

    @property
    def total_q(self) -> int:
        """Rows of q: those of the requests and some that belong to none."""
        return sum(self.seq_q) + SPARE_ROWS

    def arguments(self, device: str = "cpu") -> dict:
        """Keyword arguments of ``attention_varlen`` (backend, out and return_lse apart)."""
        values = self._values
        q = torch.cat([*values["q"], _nan(SPARE_ROWS, self.heads_q, self.head_dim, dtype=self.dtype)])
        result = {
            "q": _sliced(q) if self.layout == "sliced" else q,
            "cu_seqlens_q": _starts(self.seq_q),
            "max_seqlen_q": max(self.seq_q, default=0) if self.hint_q is None else self.hint_q,
            "max_seqlen_k": self.hint_k,
            "q_start": None if self.q_start is None else _int32(self.q_start),
            "sink": values["sink"],
            "num_splits": self.num_splits,
            **self._options,
        }
        names = ("k",) if self.shared_kv else ("k", "v")
        if self.page_size is None:
            sizes = {"k": self.head_dim, "v": self.v_dim or self.head_dim}
            spare = {n: _nan(SPARE_ROWS, self.heads_kv, sizes[n], dtype=self.dtype) for n in names}
            keys = [torch.cat([*values[name], spare[name]]) for name in names]
            result["cu_seqlens_k"] = _starts(self.seq_k)
        else:
            longest = max(self.seq_k, default=0)
            padded = [
                torch.stack([_padded(request, longest) for request in values[name]])
                if self.seq_k
                else _nan(0, longest, self.heads_kv, self.head_dim, dtype=self.dtype)
                for name in names
            ]
            keys, table = paged(
                padded, self.seq_k, self.page_size, spare_slots=self.spare_slots, seed=self.seed
            )
            result |= {"page_table": table, "kv_lengths": _int32(self.seq_k)}
        if self.layout == "interleaved" and not self.shared_kv:
            if self.page_size is None:
                keys = torch.cat(list(keys), dim=-1).split(self.head_dim, dim=-1)
            else:  # [pages, Hkv, page, 2 D] in memory
                both = torch.cat(list(keys), dim=-1).transpose(1, 2).contiguous()
                keys = both.transpose(1, 2).split(self.head_dim, dim=-1)
        elif self.layout == "sliced":
            keys = [_sliced(t) for t in keys]
        moved = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in result.items()}
        # Tensor.to keeps strides of dense tensors only: views are moved with all of their memory.
        for name, t in (("q", result["q"]), ("k", keys[0]), ("v", None if self.shared_kv else keys[1])):
            moved[name] = None if t is None else _moved(t, device)
        return moved

    def poisoned_out(self, device: str = "cpu") -> torch.Tensor:
        """An ``out`` full of NaN: an element never written shows, and so does one that must not be."""
        dtype = self.dtype if self.normalize else torch.float32
        out = _nan(self.total_q, self.heads_q, self.v_dim or self.head_dim, dtype=dtype)
        return _moved(_sliced(out) if self.layout == "sliced" else out, device)

    def check(self, result, *, untouched: bool = True) -> None:
        """Assert that a result, (o, lse) or a state, is this batch's, request by request.

        untouched: o is of ``poisoned_out``, and rows past the last request must still be NaN.
        """
        parts = tuple(t.cpu() for t in result)
        o = parts[0]
        assert o.shape == (self.total_q, self.heads_q, self.v_dim or self.head_dim)
        assert all(t.shape == (self.heads_q, self.total_q) for t in parts[1:])
        if untouched:
            assert o[sum(self.seq_q) :].isnan().all(), "rows past the last request were written"
        values, start = self._values, 0
        for request, (queries, keys) in enumerate(zip(self.seq_q, self.seq_k, strict=True)):
            rows = slice(start, start + queries)
            start += queries
            if queries == 0:
                continue
            inputs = {
                "q": values["q"][request][None],
                "k": values["k"][request][None],
                "v": None if self.shared_kv else values["v"][request][None],
                "q_start": None if self.q_start is None else _int32(self.q_start[request : request + 1]),
                "sink": values["sink"],
                **self._options,
            }
            own = (o[None, rows], *(t[None, :, rows] for t in parts[1:]))
            case = Case(self.id, dtype=self.dtype, normalize=self.normalize)
            try:
                check(case, own if self.normalize else AttentionState(*own), inputs, against_torch=False)
            except AssertionError as error:
                raise AssertionError(
                    f"request {request} of {queries} queries and {keys} keys: {error}"
                ) from error

    @property
    def _options(self) -> dict:
        names = ("scale", "softcap", "causal", "window", "key_stride", "normalize")
        return {name: getattr(self, name) for name in names}

    @cached_property
    def _values(self) -> dict:
        """q, k, v: a list of [n, H, D] each, one for a request; sink. NaN and Inf at keys that no row sees."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(self.dtype)

        first = normal(2, self.prefix, self.heads_kv, self.head_dim)
        values = {"q": [], "k": [], "v": [], "sink": normal(self.heads_q).bfloat16() if self.sink else None}
        for request, (queries, keys) in enumerate(zip(self.seq_q, self.seq_k, strict=True)):
            q = normal(queries, self.heads_q, self.head_dim)
            k, v = normal(2, keys, self.heads_kv, self.head_dim)
            alike = min(self.prefix, keys)
            k[:alike], v[:alike] = first[:, :alike]
            if self.shared_kv:
                v = k
            elif self.v_dim:
                v = normal(keys, self.heads_kv, self.v_dim)
            if request in self.poisoned:
                q[:], k[:], v[:] = torch.nan, torch.nan, torch.nan
            elif self.prefix == 0:
                hidden = self._hidden(request, q, k)
                k[hidden], v[hidden] = torch.nan, torch.inf
            for name, t in (("q", q), ("k", k), ("v", v)):
                values[name].append(t)
        return values

    def _hidden(self, request, q, k) -> torch.Tensor:
        """[keys] of a request: no row sees it."""
        q_start = None if self.q_start is None else _int32(self.q_start[request : request + 1])
        problem = AttentionProblem.of(q[None], k[None], **self._options, q_start=q_start)
        return ~visible(problem, None, q_start)[0].any(dim=0)


def random_batch(seed: int, **fixed) -> Packed:
    """A batch drawn at random, always the same for a seed: lengths 0, 1 and long ones among each other, layouts, masks.

    fixed: fields of ``Packed`` that are not drawn; a field that does not go with them is drawn so that it does.
    """
    draw = random.Random(seed)
    requests = len(fixed.get("seq_q", fixed.get("seq_k", ()))) or draw.randint(1, 6)
    page_size = fixed.get("page_size", draw.choice((None, 16, 32, 64, 128)))
    prefix = page_size * draw.choice((0, 0, 1, 2)) if page_size else 0
    seq_q = tuple(
        draw.choice((0, 1, 1, 2, draw.randint(3, 20), draw.randint(60, 150))) for _ in range(requests)
    )
    seq_k = tuple(
        draw.choice((0, 1, queries, queries + draw.randint(0, 200), prefix + draw.randint(1, 300)))
        for queries in seq_q
    )
    heads_kv = draw.choice((1, 2))
    drawn = {
        "seq_q": seq_q,
        "seq_k": seq_k,
        "heads_q": heads_kv * draw.choice((1, 2, 3, 4)),
        "heads_kv": heads_kv,
        "head_dim": draw.choice((64, 64, 128)),
        "dtype": draw.choice((torch.bfloat16, torch.bfloat16, torch.float16)),
        "page_size": page_size,
        "hint_k": draw.choice((None, None, 1, 100, 4000)),
        "causal": draw.choice((True, True, False)),
        "window": draw.choice((None, None, (30, 0), (127, None), (None, 5))),
        "sink": draw.choice((False, True)),
        "normalize": draw.choice((True, True, False)),
        "prefix": prefix,
        "spare_slots": draw.choice((0, 2, 9)),
        "layout": draw.choice(LAYOUTS),
        "seed": seed,
    }
    batch = Packed(f"random-{seed}", **{**drawn, **fixed})
    return batch if batch.normalize else replace(batch, sink=False)


def _starts(lengths) -> torch.Tensor:
    """cu_seqlens: where each request begins, and where the last ends."""
    return _int32((0, *itertools.accumulate(lengths)))


def _int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _nan(*shape, dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def _padded(request, length) -> torch.Tensor:
    """[length, Hkv, D] of a request's keys, NaN past them."""
    return torch.cat([request, _nan(length - len(request), *request.shape[1:], dtype=request.dtype)])


def _sliced(t) -> torch.Tensor:
    """The tensor as heads of one that has a head of NaN more on each side."""
    heads = t.shape[-2]
    room = _nan(*t.shape[:-2], heads + 2, t.shape[-1], dtype=t.dtype)
    room[..., 1 : 1 + heads, :] = t
    return room[..., 1 : 1 + heads, :]


def _moved(t, device) -> torch.Tensor:
    """Copy a view and its memory to a device."""
    memory = t.new_empty(0).set_(t.untyped_storage()).to(device)
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())
