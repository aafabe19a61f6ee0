"""Attention cases for every kernel: shapes, masks, layouts and adversarial data, with how to judge a result.

A case is small enough for the simulator: a few 128 x 128 tiles per head. ``arguments`` makes its inputs, with
NaN and Inf stored at every key that no row of a batch row sees; ``check`` compares a result with the
reference and with torch's own attention in the same dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from warpspec.fmha import AttentionState, attention
from warpspec.fmha.mask import visible
from warpspec.fmha.problem import AttentionProblem

# Worst head's ||got - ref|| / ||ref||, and lse's largest absolute difference (DESIGN 7).
O_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
LSE_TOLERANCE = 1e-3
TORCH_FACTOR = 1.25  # never worse than this times torch's own error in the same dtype
NATS_PER_TILE = 5.0  # less than the 2**8 by which a kernel may let the row maximum fall behind
TILE = 128


@dataclass(frozen=True)
class Case:
    """One call of ``attention``.

    kv_lengths, q_start: one value per batch row. layout: how q, k, v and out lie in memory (see ``_place``).
    data: what fills them (see ``_values``). poison: NaN and Inf at keys no row sees. long: only in the long
    suite.
    """

    id: str
    batch: int = 1
    seq_q: int = 1
    seq_k: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    sink: bool = False
    kv_lengths: tuple[int, ...] | None = None
    q_start: tuple[int, ...] | None = None
    key_stride: int = 1
    normalize: bool = True
    shared_kv: bool = False
    v_dim: int | None = None
    layout: str = "bshd"
    data: str = "normal"
    poison: bool = True
    long: bool = False


FP16 = torch.float16

# fmt: off
CASES = [
    # Sizes: below, at and just past a tile in each direction; one row, one key.
    Case("one-token-one-key"),
    Case("one-tile", seq_q=128, seq_k=128),
    Case("one-tile-fp16", seq_q=128, seq_k=128, dtype=FP16),
    Case("past-a-tile", seq_q=129, seq_k=257, heads_q=2, heads_kv=2),
    Case("short-of-a-tile", batch=2, seq_q=127, seq_k=255, heads_q=2, heads_kv=1, dtype=FP16),
    Case("three-tiles", batch=2, seq_q=300, seq_k=300, heads_q=2, heads_kv=1, causal=True),
    # Grouped heads, and their packing into the M tile when queries are few.
    Case("decode-8-to-1", batch=2, seq_q=1, seq_k=300, heads_q=16, heads_kv=2),
    Case("decode-mqa-128", seq_q=1, seq_k=140, heads_q=128, heads_kv=1),
    Case("group-3-odd-queries", batch=2, seq_q=50, seq_k=130, heads_q=6, heads_kv=2, causal=True),
    Case("group-5-few-queries", seq_q=7, seq_k=200, heads_q=5, heads_kv=1, causal=True, dtype=FP16),
    Case("group-72", seq_q=3, seq_k=64, heads_q=72, heads_kv=1, causal=True, long=True),
    # Causal, with every relation of Sq to Sk; rows that see nothing.
    Case("causal-square", seq_q=256, seq_k=256, causal=True),
    Case("causal-fewer-queries", seq_q=100, seq_k=260, heads_q=2, heads_kv=1, causal=True, dtype=FP16),
    Case("causal-fewer-keys", seq_q=200, seq_k=70, heads_q=2, heads_kv=1, causal=True, sink=True),
    Case("causal-one-key", seq_q=130, seq_k=1, causal=True, long=True),
    # Windows.
    Case("window-left", seq_q=200, seq_k=300, heads_q=2, heads_kv=1, window=(40, None)),
    Case("window-right", seq_q=200, seq_k=300, heads_q=2, heads_kv=1, window=(None, 5), dtype=FP16),
    Case("window-both", seq_q=300, seq_k=300, window=(17, 33)),
    Case("window-self-only", seq_q=130, seq_k=130, window=(0, 0), long=True),
    Case("window-causal", seq_q=300, seq_k=400, heads_q=2, heads_kv=1, causal=True, window=(128, 0),
         sink=True),
    Case("window-causal-right-ignored", seq_q=40, seq_k=160, causal=True, window=(20, 7), long=True),
    Case("window-wider-than-keys", seq_q=130, seq_k=140, window=(1000, 1000), long=True),
    Case("gpt-oss-layer", seq_q=140, seq_k=140, heads_q=8, heads_kv=1, causal=True, window=(127, None),
         sink=True),
    # KV lengths and query positions.
    Case("lengths", batch=4, seq_q=20, seq_k=260, heads_q=2, heads_kv=1, kv_lengths=(260, 129, 1, 0),
         sink=True),
    Case("lengths-causal", batch=3, seq_q=5, seq_k=300, heads_q=4, heads_kv=1, causal=True,
         kv_lengths=(300, 128, 3)),
    Case("lengths-window", batch=2, seq_q=1, seq_k=400, heads_q=8, heads_kv=1, window=(128, 0), causal=True,
         kv_lengths=(400, 150), sink=True),
    Case("q-start", batch=3, seq_q=40, seq_k=200, heads_q=2, heads_kv=1, causal=True, q_start=(0, 120,
         -30), sink=True),
    Case("q-start-window-past-keys", batch=3, seq_q=40, seq_k=200, window=(30, 4), q_start=(0, 190, 300)),
    Case("q-start-lengths", batch=2, seq_q=30, seq_k=280, causal=True, window=(100, None), q_start=(128, 3),
         kv_lengths=(150, 20), dtype=FP16),
    # Sink, scale, state, shared K and V.
    Case("sink", batch=2, seq_q=77, seq_k=200, heads_q=4, heads_kv=2, sink=True),
    Case("sink-fp16", batch=2, seq_q=77, seq_k=200, heads_q=4, heads_kv=2, sink=True, dtype=FP16, long=True),
    Case("scale", seq_q=64, seq_k=200, scale=0.05),
    Case("scale-negative", seq_q=64, seq_k=200, scale=-0.2, causal=True),
    Case("scale-zero", seq_q=64, seq_k=200, scale=0.0, causal=True, long=True),
    Case("state", batch=2, seq_q=130, seq_k=200, heads_q=2, heads_kv=1, normalize=False, kv_lengths=(200,
         60)),
    Case("state-empty-rows", seq_q=100, seq_k=60, heads_q=2, heads_kv=1, normalize=False, causal=True,
         dtype=FP16),
    Case("shared-kv", seq_q=60, seq_k=200, heads_q=4, heads_kv=1, shared_kv=True, causal=True),
    # Memory layouts.
    Case("layout-bhsd", batch=2, seq_q=70, seq_k=150, heads_q=4, heads_kv=2, layout="bhsd", causal=True),
    Case("layout-packed", batch=2, seq_q=150, seq_k=150, heads_q=2, heads_kv=2, layout="packed", causal=True),
    Case("layout-padded", batch=2, seq_q=70, seq_k=150, heads_q=2, heads_kv=1, layout="padded", sink=True),
    Case("layout-broadcast", batch=2, seq_q=30, seq_k=150, heads_q=2, heads_kv=2, layout="broadcast",
         long=True),
    # Data: what the running maximum and the rescale of O have to survive.
    Case("data-rising", seq_q=128, seq_k=512, data="rising"),
    Case("data-creeping", seq_q=128, seq_k=640, data="creeping", dtype=FP16),
    Case("data-creeping-state", seq_q=100, seq_k=512, data="creeping", normalize=False, long=True),
    Case("data-falling", seq_q=128, seq_k=512, data="falling", sink=True),
    Case("data-equal", seq_q=64, seq_k=300, data="equal", causal=True),
    Case("data-peaked", seq_q=128, seq_k=300, heads_q=2, heads_kv=1, data="peaked"),
    Case("data-very-negative", seq_q=64, seq_k=200, data="negative", long=True),
    Case("data-outliers", seq_q=64, seq_k=300, data="outliers", causal=True, dtype=FP16),
]
# fmt: on

# fmt: off
# NaN and Inf that reach some rows: those show it, and no other row does.
PARTLY_POISONED = [
    Case("poison-causal", seq_q=140, seq_k=140, causal=True, data="poisoned-tail"),
    Case("poison-window", seq_q=140, seq_k=140, window=(9, 0), data="poisoned-middle", sink=True),
    Case("poison-query", seq_q=9, seq_k=140, heads_q=2, heads_kv=1, causal=True, data="nan-query"),
    Case("poison-query-state", seq_q=9, seq_k=140, data="nan-query", normalize=False),
    Case("poison-decode", batch=2, seq_q=4, seq_k=150, heads_q=4, heads_kv=1, causal=True,
         data="poisoned-tail",
         dtype=FP16),
]

# Of each architecture's kernel one with split keys and one without, that run in the simulator: tests that look at
# code only look at the same.
SPLIT_KEYS = {
    "sm_90a": Case(
        "splits", batch=2, seq_q=1, seq_k=420, heads_q=16, heads_kv=1, shared_kv=True, sink=True, kv_lengths=(420, 3)
    ),
    "sm_100a": Case(
        "decode", batch=2, seq_q=2, seq_k=180, heads_q=32, heads_kv=1, causal=True, sink=True, kv_lengths=(180, 0)
    ),
}
WHOLE_KEYS = {
    "sm_90a": next(replace(case, head_dim=128) for case in CASES if case.id == "q-start-window-past-keys"),
    "sm_100a": Case("prefill", seq_q=70, seq_k=150, heads_q=2, heads_kv=1, head_dim=128, causal=True, sink=True),
}

# fmt: on


def arguments(case: Case, seed: int = 0, device: str = "cpu") -> dict:
    """Keyword arguments of ``attention`` for a case (backend, out and return_lse apart)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (case.batch, case.seq_q, case.heads_q, case.head_dim),
        "k": (case.batch, case.seq_k, case.heads_kv, case.head_dim),
        "v": (case.batch, case.seq_k, case.heads_kv, case.head_dim),
    }
    values = _values(case, shapes, generator)
    result = {
        "scale": case.scale,
        "softcap": case.softcap,
        "v_dim": case.v_dim,
        "causal": case.causal,
        "window": case.window,
        "normalize": case.normalize,
        "sink": _normal((case.heads_q,), generator).bfloat16().to(device) if case.sink else None,
        "kv_lengths": _int32(case.kv_lengths, device),
        "q_start": _int32(case.q_start, device),
        "key_stride": case.key_stride,
    }
    if case.poison:
        plain = {name: values[name].to(case.dtype) for name in ("qk" if case.v_dim else "qkv")}
        problem = AttentionProblem.of(**{**result, **plain, "normalize": True})
        hidden = ~visible(problem, result["kv_lengths"], result["q_start"]).any(dim=1).cpu()  # [B, Sk]
        if case.layout == "broadcast":  # batch rows share their keys
            hidden = hidden.all(dim=0, keepdim=True).expand_as(hidden)
        for name, bad in (("k", (torch.nan, torch.inf)), ("v", (torch.inf, torch.nan))):
            for start in (0, 1):
                values[name][:, start::2][hidden[:, start::2]] = bad[start]
    placed = _place(case, {name: values[name].to(device, case.dtype) for name in "qkv"})
    if case.shared_kv:
        placed["v"] = None
    return {**placed, **result}


def poisoned_out(case: Case, device: str = "cpu") -> torch.Tensor:
    """An ``out`` full of NaN, in the case's layout, so that an element never written shows."""
    shape = (case.batch, case.seq_q, case.heads_q, case.v_dim or case.head_dim)
    dtype = case.dtype if case.normalize else torch.float32
    if case.layout == "bhsd":
        return torch.full(
            (shape[0], shape[2], shape[1], shape[3]), torch.nan, dtype=dtype, device=device
        ).transpose(1, 2)
    if case.layout == "padded":
        return torch.full((*shape[:3], shape[3] + 8), torch.nan, dtype=dtype, device=device)[..., : shape[3]]
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def check(case: Case, result, inputs: dict, *, against_torch: bool = True) -> None:
    """Assert that a result, (o, lse) or a state, is the case's, within the tolerances of DESIGN 7.

    against_torch: also that its error is not much more than torch's. Where few rows see few keys that is chance:
    each error is that of a handful of roundings.
    """
    reference = attention(**{**inputs, "normalize": False, "sink": None}, backend="reference")
    # The reference unrounded: as backend it would round o to the operands' dtype.
    expected, lse = _normalized(reference, inputs["sink"]), reference.lse
    if case.normalize:
        o, got_lse = result
    else:
        assert isinstance(result, AttentionState)
        # Any row_max will do that the sums were taken against: compare what does not depend on it.
        o, got_lse = _normalized(result, None), result.lse
        assert all(part.dtype == torch.float32 for part in result)
        empty = reference.row_sum == 0
        assert (result.row_max[empty] == -torch.inf).all() and (result.row_sum[empty] == 0).all()
        assert (result.o.transpose(1, 2)[empty] == 0).all()
    assert o.shape == expected.shape and got_lse.shape == lse.shape

    undefined = ~expected.isfinite().all(dim=-1)  # rows that see NaN or Inf: any NaN or Inf will do
    assert not o[undefined].isfinite().any(), "rows that see NaN or Inf"
    o, expected = (torch.where(undefined[..., None], 0.0, t.float()) for t in (o, expected))
    assert o.isfinite().all(), f"{int((~o.isfinite()).sum())} elements of o are not finite"
    assert (o.transpose(1, 2)[lse == -torch.inf] == 0).all(), "o of rows without a visible key"
    head_error, tolerance = relative_error(o, expected), O_TOLERANCE[case.dtype]
    assert head_error <= tolerance, f"worst head's error {head_error:.2e}, tolerance {tolerance:.0e}"

    assert got_lse[lse.isnan()].isnan().all(), "lse of rows that see NaN"
    defined = ~undefined.transpose(1, 2)
    seen = defined & (lse != -torch.inf)
    assert (got_lse[defined & ~seen] == -torch.inf).all(), "lse of rows without a visible key"
    lse_error = float((got_lse - lse)[seen].abs().max()) if bool(seen.any()) else 0.0
    assert lse_error <= LSE_TOLERANCE, f"lse off by {lse_error:.2e}, tolerance {LSE_TOLERANCE:.0e}"

    if against_torch and case.normalize and not bool(undefined.any()):
        torch_error = relative_error(torch_attention(case, inputs).float(), expected)
        bar = max(TORCH_FACTOR * torch_error, torch.finfo(case.dtype).eps / 4)
        assert head_error <= bar, f"worst head's error {head_error:.2e}, torch's own {torch_error:.2e}"


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Worst head's ||got - expected|| / ||expected||, of [B, S, H, D]; against a head of zeros, ||got||."""
    error = (got - expected).norm(dim=(1, 3))
    size = expected.norm(dim=(1, 3))
    return float((error / torch.where(size == 0, 1.0, size)).max())


def torch_attention(case: Case, inputs: dict) -> torch.Tensor:
    """torch's scaled_dot_product_attention in the case's dtype; the sink is one more key, of zeros."""
    q, k, v = inputs["q"], inputs["k"], inputs["k"] if inputs["v"] is None else inputs["v"]
    v = v[..., : case.v_dim]
    problem = AttentionProblem.of(**inputs)
    seen = visible(problem, inputs["kv_lengths"], inputs["q_start"])[:, None].expand(-1, case.heads_q, -1, -1)
    k, v = (torch.where(seen.any(dim=2).any(dim=1)[..., None, None], t, 0.0) for t in (k, v))
    bias = inputs.get("bias")
    bias = 0.0 if bias is None else torch.where(seen, bias.float(), 0.0)
    mask = torch.where(seen, bias, -torch.inf).to(q.dtype)
    seen = seen & (mask != -torch.inf)
    # Every row has this key; without a sink it is visible to rows without another, which then give 0.
    extra = torch.where(seen.any(dim=-1), -torch.inf, 0.0).to(q.dtype)
    if inputs["sink"] is not None:
        extra = inputs["sink"].to(q.dtype)[None, :, None].expand_as(extra)
    mask = torch.cat([mask, extra[..., None]], dim=-1)
    k, v = (torch.cat([t, torch.zeros_like(t[:, :1])], dim=1) for t in (k, v))
    k, v = (t.repeat_interleave(problem.group, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=problem.logits.scale)
    return o.transpose(1, 2)


def _normalized(state: AttentionState, sink) -> torch.Tensor:
    """o [B, Sq, Hq, D] fp32, written out here so that no code under test judges itself."""
    total = state.row_sum.clone()
    if sink is not None:
        total += torch.exp(sink.float()[None, :, None] - state.row_max)
    o = state.o / total.transpose(1, 2)[..., None]
    return torch.where((state.row_sum == 0).transpose(1, 2)[..., None], 0.0, o)


def _normal(shape, generator):
    return torch.randn(shape, generator=generator)


def _int32(values, device):
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)


def _values(case: Case, shapes, generator) -> dict[str, torch.Tensor]:
    """q, k, v in fp32: standard normal, then shaped by ``case.data``.

    rising: the row maximum grows by far more than any lazy-rescale threshold from tile to tile; creeping: by
    a little less than one each tile; falling: its largest stands in the first tile; equal: every key is the
    same one; peaked: logits spread over hundreds; negative: all logits near -500; outliers: single keys far
    above the rest, in the middle of tiles; poisoned-*: NaN and Inf at keys that only some rows see;
    nan-query: one query holds a NaN.
    """
    values = {name: _normal(shape, generator) for name, shape in shapes.items()}
    q, k, v = values["q"], values["k"], values["v"]
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    tile = torch.arange(case.seq_k) // TILE
    tiles = math.ceil(case.seq_k / TILE)
    # One feature carries the logit asked for: q has 1 there and k has logit / scale.
    wanted = {
        "rising": 40.0 * tile,
        "creeping": NATS_PER_TILE * tile,
        "falling": 20.0 * (tiles - tile),
        "negative": torch.full((case.seq_k,), -500.0),
        "outliers": torch.where(torch.arange(case.seq_k) % 101 == 50, 60.0, 0.0),
    }
    if case.data in wanted:
        q[..., 0] = 1.0
        k[..., 0] = (wanted[case.data] / scale)[None, :, None]
    elif case.data == "equal":
        k[:] = k[:, :1].clone()
    elif case.data == "peaked":
        q *= 8
        k *= 8
    elif case.data == "poisoned-tail":
        k[:, -2], v[:, -2], v[:, -1] = torch.nan, torch.nan, torch.inf
    elif case.data == "nan-query":
        q[:, case.seq_q // 2, 0, 5] = torch.nan
    elif case.data == "poisoned-middle":
        k[:, 60], v[:, 60], v[:, 61] = torch.inf, torch.nan, -torch.inf
    else:
        assert case.data == "normal", case.data
    return values


def _place(case: Case, values) -> dict[str, torch.Tensor]:
    """Values in the case's memory layout; what lies between them is NaN.

    bshd: contiguous. bhsd: heads outside the sequence. packed: q, k and v are slices of one [B, S, 3, H, D]
    tensor. padded: rows 16 bytes longer than D, and 16 bytes into their allocation. broadcast: k and v have
    one batch row and one head in memory, expanded (stride 0).
    """
    if case.layout == "bhsd":
        return {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in values.items()}
    if case.layout == "packed":
        q, k, v = torch.stack(list(values.values()), dim=2).unbind(2)
        return {"q": q, "k": k, "v": v}
    if case.layout == "padded":
        result = {}
        for name, t in values.items():
            room = torch.full((t.numel() // t.shape[-1] * (t.shape[-1] + 8) + 8,), torch.nan, dtype=t.dtype)
            view = room.to(t.device)[8:].view(*t.shape[:-1], t.shape[-1] + 8)[..., : t.shape[-1]]
            result[name] = view.copy_(t)
        return result
    if case.layout == "broadcast":
        k, v = (t[:1, :, :1].expand(t.shape) for t in (values["k"], values["v"]))
        return {"q": values["q"], "k": k, "v": v}
    assert case.layout == "bshd", case.layout
    return values
