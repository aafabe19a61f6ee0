"""Attention's gradients: cases, the float64 autograd that judges them, and how near a result must be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from helpers import block_cases
from warpspec.fmha import BlockMask, attention, attention_varlen

NAMES = ("q", "k", "v", "sink", "bias")
# Worst head's ||got - expected|| / ||expected||. The reference works in fp32 and rounds its results.
REFERENCE_TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
# torch's own (SDPA on a CPU) is 3.1e-3 to 3.6e-3 off in dK and dV, bf16, at the sizes of these cases.
KERNEL_TOLERANCE = {torch.bfloat16: 4.2e-3, torch.float16: 6e-4}
FARTHEST_SINK = 1e6
SINK_FACTOR = 4  # of dsink: a sum over rows of numbers of both signs
# Of dQ and dK where a batch row has one to three keys: dS is a difference of few terms. With two keys, O in bf16 and
# all else in float64 puts either off by 4.3e-3, and with dS in bf16, too, dQ by 5.1e-3 and dK by 5.0e-3.
FEW_KEYS, FEW_KEYS_FACTOR = 3, 1.3


@dataclass(frozen=True)
class Case:
    """One call and what flows back through it. lengths_q: packed requests of this many queries (lengths_k: keys), else
    a rectangle. v_dim: V's head size, if it is not head_dim. bias: (batch rows, heads) that have each their own.
    through: results that have gradients. sliced: q, k and v are some heads of tensors with more, of NaN, and gradients
    of results every other element of memory. images: (first, last) key of each, in every request, as far as there are
    such keys; an image's queries see all of it. sink: whether there are sinks; or those of the heads.
    blocks: (FlexAttention's mask rather than flash-attn-4's lists, (batch rows, heads) with lists of their own, parts
    of blocks as in ``block_cases.Case``)."""

    id: str
    batch: int = 1
    seq_q: int = 24
    seq_k: int = 24
    heads_q: int = 2
    heads_kv: int = 1
    head_dim: int = 64
    v_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    key_stride: int = 1
    sink: bool | tuple[float, ...] = False
    sink_dtype: torch.dtype = torch.float32
    bias: tuple[bool, bool] | None = None
    bias_dtype: torch.dtype = torch.float32
    kv_lengths: tuple[int, ...] | None = None
    q_start: tuple[int, ...] | None = None
    shared_kv: bool = False
    through: str = "o"
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    wanted: tuple[str, ...] = NAMES
    deterministic: bool = False
    sliced: bool = False
    images: tuple[tuple[int, int], ...] | None = None
    blocks: tuple | None = None

    def mask(self) -> tuple:
        """(lists of blocks, bool [B, Hq, Sq, Sk] of what is seen)."""
        flex, lists, parts = self.blocks
        options = (("causal", self.causal), ("window", self.window))
        case = block_cases.Case(
            self.id, self.seq_q, self.seq_k, lists=lists, flex=flex, parts=parts, options=options
        )
        found, seen = block_cases.mask_of(case, torch.Generator().manual_seed(3))
        return found, seen.expand(self.batch, self.heads_q, -1, -1)

    @property
    def packed(self) -> bool:
        return self.lengths_q is not None

    def with_dim(self, dim: int) -> Case:
        """The case with another head size. Beyond 256 its scale is less, so that logits are as large as there: delta is
        of an O in 16 bits, and with larger ones that rounding alone is nearly the tolerance (3.5e-3 at 512)."""
        scale = None if self.scale is None else self.scale * min(1.0, (256 / dim) ** 0.5)
        return replace(self, head_dim=dim, scale=scale)

    def tensors(self, device="cpu", seed=0) -> dict:
        """The differentiable arguments; those wanted require a gradient."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape, dtype=self.dtype):
            return torch.randn(*shape, generator=generator).to(dtype)

        if self.packed:
            rows, keys = (sum(self.lengths_q) + 2,), (sum(self.lengths_k) + 2,)
        else:
            rows, keys = (self.batch, self.seq_q), (self.batch, self.seq_k)
        found = {
            "q": normal(*rows, self.heads_q, self.head_dim),
            "k": normal(*keys, self.heads_kv, self.head_dim),
        }
        if not self.shared_kv:
            found["v"] = normal(*keys, self.heads_kv, self.v_dim or self.head_dim)
        if self.sink:
            found["sink"] = normal(self.heads_q, dtype=self.sink_dtype)
            if self.sink is not True:
                found["sink"] = torch.tensor(self.sink, dtype=self.sink_dtype)
        if self.bias is not None:
            batches, heads = self.bias
            shape = (self.batch if batches else 1, self.heads_q if heads else 1, self.seq_q, self.seq_k)
            found["bias"] = normal(*shape, dtype=self.bias_dtype)
            found["bias"][..., -1, 1] = -torch.inf
        for b, length in enumerate(self.kv_lengths or ()):
            for name in "kv":
                if name in found:
                    found[name][b, length:] = torch.nan
        if self.packed:  # rows of no request
            for t in found.values():
                if t.dim() == 3:
                    t[-2:] = torch.nan
        found = {name: t.to(device) for name, t in found.items()}
        if self.sliced:
            for name in "qkv":
                if name in found:
                    heads = found[name].shape[-2]
                    wider = torch.cat([found[name], torch.full_like(found[name], torch.nan)], dim=-2)
                    found[name] = wider[..., :heads, :]
        return {name: t.requires_grad_(name in self.wanted) for name, t in found.items()}

    def call(self, tensors: dict, **options):
        """(o, lse) of a call."""
        device = tensors["q"].device

        def int32(values):
            return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

        options |= {
            "scale": self.scale,
            "softcap": self.softcap,
            "causal": self.causal,
            "window": self.window,
            "key_stride": self.key_stride,
        }
        options |= {"q_start": int32(self.q_start), "return_lse": True, "deterministic": self.deterministic}
        if self.images is not None:
            options["ranges"] = self.ranges().to(device)
        if self.blocks is not None:
            options["block_mask"] = BlockMask.of(self.mask()[0], self.seq_q, self.seq_k).to(device)
        if not self.packed:
            return attention(**tensors, **options, kv_lengths=int32(self.kv_lengths))
        starts = {
            f"cu_seqlens_{name}": int32([0, *itertools.accumulate(lengths)])
            for name, lengths in (("q", self.lengths_q), ("k", self.lengths_k))
        }
        return attention_varlen(**tensors, **starts, max_seqlen_q=max(self.lengths_q), **options)

    def ranges(self) -> torch.Tensor:
        """int32 [B, Sq, 2], packed [T, 2]: each query's image."""
        lengths = self.kv_lengths or (self.seq_k,) * self.batch
        sizes = [(self.seq_q, n) for n in lengths]
        if self.packed:
            sizes = [*zip(self.lengths_q, self.lengths_k, strict=True), (2, 2)]
        found = []
        for b, (queries, keys) in enumerate(sizes):
            start = keys - queries if self.q_start is None or b >= len(self.q_start) else self.q_start[b]
            found.append(torch.full((queries, 2), -1, dtype=torch.int32))
            for first, last in self.images:
                rows = slice(max(first - start, 0), max(last + 1 - start, 0))
                found[b][rows] = torch.tensor([first, last], dtype=torch.int32)
        return torch.cat(found) if self.packed else torch.stack(found)

    def gradients(self, tensors: dict, **options) -> dict:
        """What flows back to the wanted tensors, by autograd."""
        results = [
            t
            for name, t in zip(("o", "lse"), self.call(tensors, **options), strict=True)
            if name in self.through.split("+")
        ]
        wanted = {name: t for name, t in tensors.items() if t.requires_grad}
        seeds = [self.seed_of(t) for t in results]
        return dict(zip(wanted, torch.autograd.grad(results, list(wanted.values()), seeds), strict=True))

    def seed_of(self, result) -> torch.Tensor:
        """The gradient of a result; that of rows of no request is NaN."""
        generator = torch.Generator().manual_seed(7)
        seed = torch.randn(result.shape, generator=generator)
        if self.packed:
            (seed[-2:] if result.dim() == 3 else seed[:, -2:]).fill_(torch.nan)
        seed = seed.to(result)
        return torch.stack([seed, seed], dim=-1)[..., 0] if self.sliced else seed

    def expected(self, tensors: dict) -> dict:
        """Gradients in float64 by autograd of the definition, of each batch row or request by itself."""
        leaves = {
            n: t.detach().cpu().double().nan_to_num(0.0, neginf=-torch.inf).requires_grad_()
            for n, t in tensors.items()
        }
        total = torch.zeros((), dtype=torch.float64)
        shape, values = tensors["q"].shape, tensors.get("v", tensors["k"])
        dtypes = {"o": self.dtype, "lse": torch.float32}
        stat_shape = (shape[1], shape[0]) if self.packed else (shape[0], shape[2], shape[1])
        seeds = {
            "o": self.seed_of(torch.empty(*shape[:-1], values.shape[-1], dtype=dtypes["o"])).double(),
            "lse": self.seed_of(torch.empty(stat_shape)).double(),
        }
        if self.packed:
            ends_q, ends_k = ([0, *itertools.accumulate(n)] for n in (self.lengths_q, self.lengths_k))
            parts = [
                (slice(*q), slice(*k))
                for q, k in zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True)
            ]
        else:
            lengths = self.kv_lengths or (self.seq_k,) * self.batch
            parts = [(b, b) for b in range(self.batch)]
        for b, (rows, keys) in enumerate(parts):
            q, k, v = (
                leaves.get(n, leaves["k"])[part] for n, part in (("q", rows), ("k", keys), ("v", keys))
            )
            if not self.packed:
                k, v = k[: lengths[b]], v[: lengths[b]]
            start = None if self.q_start is None else self.q_start[b]
            bias = leaves.get("bias")
            if bias is not None:
                bias = bias.expand(self.batch, self.heads_q, -1, -1)[b, :, :, : k.shape[0]]
            listed = None if self.blocks is None else self.mask()[1][b]
            o, lse = definition(self, q, k, v, leaves.get("sink"), bias, start, listed)
            some = lse != -torch.inf
            seed_o, seed_lse = seeds["o"][rows], (seeds["lse"][:, rows] if self.packed else seeds["lse"][b])
            if "o" in self.through.split("+"):
                total = total + (o * torch.where(some.T[..., None], seed_o, 0.0)).sum()
            if "lse" in self.through.split("+"):
                total = total + torch.where(some, lse * torch.where(some, seed_lse, 0.0), 0.0).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return {
            n: torch.zeros_like(t) if g is None else g
            for (n, t), g in zip(leaves.items(), found, strict=True)
        }

    def judge(self, tolerances: dict, **options) -> None:
        """Compute gradients of the case's tensors and check them. tolerances: of each dtype. options: of the call."""
        tensors = self.tensors()
        self.check(self.gradients(tensors, **options), tensors, tolerances[self.dtype])

    def check(self, found: dict, tensors: dict, tolerance: float) -> None:
        """Assert that gradients are near the definition's, head by head; exactly zero where those are."""
        expected = self.expected(tensors)
        with torch.no_grad():
            lse = self.call({n: t.detach().cpu() for n, t in tensors.items()}, backend="reference")[1]
        assert set(found) == {name for name, t in tensors.items() if t.requires_grad}
        few = any(1 <= length <= FEW_KEYS for length in self.kv_lengths or ())
        few_factor = FEW_KEYS_FACTOR if few else 1.0
        factors = {"sink": SINK_FACTOR, "q": few_factor, "k": few_factor}
        for name, got in found.items():
            assert got.shape == tensors[name].shape and got.dtype == tensors[name].dtype
            got, wanted = got.cpu().double(), expected[name]
            if self.packed and name in "qkv":  # rows of no request hold anything in q's, zeros in the keys'
                got, wanted = got[:-2], wanted[:-2]
            assert got.isfinite().all(), f"{self.id}: d{name} is not finite"
            heads = {"sink": got.dim() - 1, "bias": 1}.get(name, got.dim() - 2)
            if name == "sink":
                parts = [(got, wanted)]
            else:
                parts = list(zip(got.unbind(heads), wanted.unbind(heads), strict=True))
            floor = 1e-3 * wanted.norm() / len(parts) ** 0.5
            for h, (a, b) in enumerate(parts):
                error = (
                    ((a - b).norm() / b.norm().clamp(min=floor)).item()
                    if wanted.norm() > 0
                    else a.abs().max().item()
                )
                limit = tolerance * factors.get(name, 1.0)
                assert error <= limit, f"{self.id}: d{name} of head {h} is off by {error:.2e}"
            if name == "q":  # rows that see no key
                zero = (lse[..., : got.shape[-3]] == -torch.inf).transpose(-1, -2)
            else:  # keys that no row sees; a key that is a row's only one has a dK of zero but for rounding
                zero = (
                    wanted == 0
                    if name == "v" and self.through != "lse"
                    else torch.zeros(got.shape, dtype=torch.bool)
                )
            assert (got[zero] == 0).all(), f"{self.id}: d{name} is not zero where nobody sees"


def definition(case: Case, q, k, v, sink, bias, start, listed=None):
    """(o [Sq, Hq, D], lse [Hq, Sq]) of one batch row in float64, by the docstring of ``attention``. listed: what is
    seen, with lists of blocks."""
    group = case.heads_q // case.heads_kv
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    logits = scale * torch.einsum("qhd,khd->hqk", q, k)
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    if bias is not None:
        logits = logits + bias
    position = torch.arange(len(q))[:, None] + (len(k) - len(q) if start is None else start)
    key = torch.arange(len(k))
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    left, right = case.window or (None, None)
    if case.causal:
        seen &= (key + 1) * case.key_stride - 1 <= position
    if left is not None:
        seen &= key >= position - left
    if right is not None:
        seen &= key <= position + right
    for first, last in case.images or ():
        seen |= (position >= first) & (position <= last) & (key >= first) & (key <= last)
    logits = logits.masked_fill(~(seen if listed is None else listed), -torch.inf)
    some = (logits > -torch.inf).any(-1)
    safe = torch.where(some[..., None], logits, 0.0)
    lse = torch.where(some, safe.logsumexp(-1), -torch.inf)
    total = safe.logsumexp(-1)
    if sink is not None:
        sink = sink.clamp(max=FARTHEST_SINK)  # beyond, autograd divides Inf by Inf
        total = torch.logaddexp(total, sink[:, None].expand_as(total))
    p = torch.where(some[..., None], torch.exp(safe - total[..., None]), 0.0)
    return torch.einsum("hqk,khd->qhd", p, v), lse


# Features in pairs, rows that see nothing, one key, no key, grouped heads.
CASES = [
    Case("plain", heads_kv=2),
    Case("one-token-one-key", seq_q=1, seq_k=1),
    Case("causal-gqa", heads_q=4, heads_kv=2, causal=True),
    Case("causal-empty-rows-sink-lse", seq_q=30, seq_k=11, causal=True, sink=True, through="o+lse"),
    Case("far-sinks", heads_q=5, sink=(0.3, 110.0, 1e4, torch.inf, -torch.inf), causal=True, through="o+lse"),
    Case("mqa-window-sink", batch=2, heads_q=3, window=(5, 2), sink=True, sink_dtype=torch.float16,
         dtype=torch.float16),
    Case("bias-by-head", batch=2, bias=(False, True), causal=True, through="o+lse"),
    Case("bias-by-batch-sink", batch=2, bias=(True, False), bias_dtype=torch.bfloat16, sink=True),
    Case("bias-of-all-window", batch=2, bias=(False, False), window=(4, None)),
    Case("bias-of-each", batch=2, seq_q=70, seq_k=136, bias=(True, True), bias_dtype=torch.bfloat16, causal=True),
    Case("lengths", batch=3, kv_lengths=(24, 7, 0), sink=True, through="lse"),
    Case("lengths-causal-bias", batch=2, kv_lengths=(20, 3), causal=True, bias=(True, True)),
    Case("q-start-stride", batch=2, seq_q=30, seq_k=9, q_start=(0, 40), causal=True, key_stride=4, sink=True),
    Case("softcap-bias-sink", scale=1.0, softcap=4.0, bias=(False, True), causal=True, sink=True, through="o+lse"),
    Case("softcap-packed-window", lengths_q=(20, 3), lengths_k=(20, 30), window=(6, 0), scale=-0.5, softcap=2.0),
    Case("negative-scale-shared", scale=-0.2, shared_kv=True, causal=True, wanted=("k",)),
    Case("packed", lengths_q=(5, 0, 17, 1), lengths_k=(9, 3, 17, 0), causal=True, sink=True, sink_dtype=torch.bfloat16,
         through="o+lse"),
    Case("packed-window-gqa", heads_q=4, heads_kv=2, lengths_q=(20, 3), lengths_k=(20, 30), window=(6, 0), causal=True),
]  # fmt: skip
# Lists of blocks, by name.
BLOCKS = {
    "flex": Case("flex", seq_q=200, seq_k=300, heads_q=4, heads_kv=2, sink=True, through="o+lse",
                      blocks=(True, (1, 1), block_cases.EVEN)),
    "heads": Case("heads", batch=2, seq_q=190, seq_k=257, heads_q=4, heads_kv=2, head_dim=128, softcap=4.0,
                       blocks=(True, (2, 4), block_cases.SPARSE)),
    "causal": Case("causal", seq_q=300, seq_k=300, heads_q=2, heads_kv=2, head_dim=128, causal=True,
                        deterministic=True, blocks=(False, (1, 2), block_cases.EVEN)),
    "256": Case("256", seq_q=140, seq_k=270, head_dim=256, dtype=torch.float16, deterministic=True,
                     blocks=(True, (1, 1), block_cases.EVEN)),
    "window-bias": Case("window-bias", batch=2, seq_q=200, seq_k=260, causal=True, window=(150, 0),
                             bias=(False, True), blocks=(False, (2, 1), block_cases.EVEN)),
    "no-block": Case("no-block", seq_q=140, seq_k=140, blocks=(False, (1, 1), block_cases.NOTHING)),
    "72": Case("72", seq_q=140, seq_k=140, head_dim=72, blocks=(True, (1, 2), block_cases.EVEN)),
}  # fmt: skip
