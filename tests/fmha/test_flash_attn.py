"""flash-attn's functions: against torch's own attention and ``attention``, by every name, and what is refused."""

from dataclasses import replace

import numpy
import pytest
import torch
from helpers.block_cases import Case, inputs_of
from helpers.varlen_cases import Packed

from warpspec.common.backend import BACKEND_VARIABLE
from warpspec.fmha import attention
from warpspec.fmha.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

MIXED = Packed("mixed", seq_q=(40, 1, 0, 1, 5), seq_k=(40, 90, 30, 0, 70), causal=True)
PAGED = replace(MIXED, page_size=16)
TOLERANCE = {"rtol": 2e-2, "atol": 2e-3}


@pytest.fixture(autouse=True)
def on_the_reference(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "reference")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def rectangle(batch=2, seq_q=9, seq_k=20, heads=(4, 2), dim=64):
    kv = (batch, seq_k, heads[1], dim)
    return normal(batch, seq_q, heads[0], dim), normal(*kv, seed=1), normal(*kv, seed=2)


def torch_attention(q, k, v, mask=None, scale=None):
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return o.transpose(1, 2)


@pytest.mark.parametrize("causal, window", [
    (False, (-1, -1)), (True, (-1, -1)), (False, (3, 2)), (True, (4, -1)), (False, (None, 5)), (True, (4, 0)),
])  # fmt: skip
def test_masks_against_torch(causal, window):
    q, k, v = rectangle()
    position, key = torch.arange(9)[:, None] + 20 - 9, torch.arange(20)
    seen = (key <= position) if causal else torch.ones(9, 20, dtype=torch.bool)
    left, right = window
    if left not in (-1, None):
        seen = seen & (key >= position - left)
    if right not in (-1, None):
        seen = seen & (key <= position + right)
    got = flash_attn_func(q, k, v, causal=causal, window_size=window, softmax_scale=0.2)
    torch.testing.assert_close(got.float(), torch_attention(q, k, v, seen, 0.2), **TOLERANCE)


def test_what_is_returned():
    q, k, v = rectangle()
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(flash_attn_func(q, k, v, 0.0, None, True), o)
    got = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert len(got) == 2 and torch.equal(got[0], o) and torch.equal(got[1], lse)
    got = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert len(got) == 3 and torch.equal(got[1], lse) and got[2] is None
    out = torch.full_like(q, torch.nan)
    assert flash_attn_func(q, k, v, causal=True, out=out) is out and torch.equal(out, o)


@pytest.mark.parametrize("name", ["learnable_sink", "s_aux", "sinks"])
def test_sinks_by_any_name_count_in_lse(name):
    q, k, v = rectangle()
    sink = normal(4, seed=3)
    o, lse = flash_attn_func(q, k, v, return_lse=True, **{name: sink})
    assert torch.equal(o, attention(q, k, v, sink=sink))
    # One more key, whose logit the mask makes the sink's.
    keys = torch.cat([k, torch.zeros_like(k[:, :1])], dim=1)
    values = torch.cat([v, torch.zeros_like(k[:, :1])], dim=1)
    mask = torch.zeros(4, 9, 21)
    mask[..., 20] = sink.float()[:, None]
    torch.testing.assert_close(o.float(), torch_attention(q, keys, values, mask), **TOLERANCE)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.float(), keys.repeat_interleave(2, 2).float()) / 8 + mask
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="learnable_sink: is the same argument as s_aux"):
        flash_attn_func(q, k, v, learnable_sink=sink, s_aux=sink)


@pytest.mark.parametrize("table", ["block_table", "page_table"])
@pytest.mark.parametrize("lengths", ["seqused_k", "cu_seqlens_k"])
def test_packed_queries_over_pages(table, lengths):
    arguments = PAGED.arguments()
    starts = torch.nn.functional.pad(arguments["kv_lengths"].cumsum(0), (1, 0)).int()
    got = flash_attn_varlen_func(
        *(arguments[name] for name in ("q", "k", "v", "cu_seqlens_q")),
        max_seqlen_q=torch.tensor(40), max_seqlen_k=numpy.int32(90), num_splits=numpy.int64(0),
        causal=True, out=PAGED.poisoned_out(), return_lse=True,
        **{table: arguments["page_table"]},
        **{lengths: arguments["kv_lengths"] if lengths == "seqused_k" else starts},
    )  # fmt: skip
    PAGED.check(got)


def test_packed_queries_and_keys_by_position():
    arguments = MIXED.arguments()
    tensors = [arguments[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    out, lse, probabilities = flash_attn_varlen_func(
        *tensors, 40, 90, 0.0, None, True, return_attn_probs=True, out=MIXED.poisoned_out()
    )
    assert probabilities is None
    MIXED.check((out, lse))
    plain = flash_attn_varlen_func(*tensors, causal=True)
    assert torch.equal(plain[:47], out[:47])


def test_rectangles_with_lengths():
    """flash-attn 4 takes them under the same name."""
    q, k, v = rectangle()
    lengths = int32(7, 20)
    got = flash_attn_varlen_func(q, k, v, seqused_k=lengths, causal=True)
    assert torch.equal(got, attention(q, k, v, kv_lengths=lengths, causal=True))


@pytest.mark.parametrize("lengths", [13, numpy.int64(13), int32(13, 13), None])
def test_a_cache(lengths):
    q, k, v = rectangle()
    expected, lse = attention(
        q, k, v, kv_lengths=None if lengths is None else int32(13, 13), causal=True, return_lse=True
    )
    assert torch.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True), expected)
    got = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True)
    assert len(got) == 2 and torch.equal(got[1], lse)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_new_keys_are_appended_to_the_cache(paged, compiled):
    call = flash_attn_with_kvcache
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    lengths, new, page_size = [5, 31], 4, 16
    q, k, v = rectangle(seq_q=4, seq_k=48)
    table = None
    caches = [torch.full_like(t, torch.nan) for t in (k, v)]
    for row, length in enumerate(lengths):
        for cache, source in zip(caches, (k, v), strict=True):
            cache[row, :length] = source[row, :length]
    if paged:
        table = int32([3, 0, 5], [1, 4, 2])
        pages = [torch.full((6, page_size, 2, 64), torch.nan, dtype=k.dtype) for _ in caches]
        for page, cache in zip(pages, caches, strict=True):
            page[table.long().flatten()] = cache.view(6, page_size, 2, 64)
        caches = pages
    added = [
        torch.stack([t[row, length : length + new] for row, length in enumerate(lengths)]) for t in (k, v)
    ]
    got = call(q, *caches, *added, cache_seqlens=int32(*lengths), block_table=table, causal=True)
    total = int32(*(length + new for length in lengths))
    assert torch.equal(got, attention(q, k, v, kv_lengths=total, causal=True))
    assert sum(int(cache.isfinite().all(-1).all(-1).sum()) for cache in caches) == 2 * int(total.sum())


def test_a_cache_does_not_remember_where_its_keys_came_from():
    """Keys of a model that runs with autograd on must not make the cache grow a graph of all steps."""
    q, k, v = rectangle()
    new = [(normal(2, 1, 2, 64).requires_grad_() * 1.0) for _ in "kv"]
    got = flash_attn_with_kvcache(q.requires_grad_(), k, v, *new, cache_seqlens=int32(2, 17))
    assert not (k.requires_grad or v.requires_grad or got.requires_grad)
    assert torch.equal(k[1, 17], new[0][1, 0])


def test_packed_queries_over_a_cache():
    arguments = PAGED.arguments()
    got = flash_attn_with_kvcache(
        arguments["q"], arguments["k"], arguments["v"], cache_seqlens=arguments["kv_lengths"], causal=True,
        page_table=arguments["page_table"], cu_seqlens_q=arguments["cu_seqlens_q"], max_seqlen_q=40,
        out=PAGED.poisoned_out(), return_lse=True,
    )  # fmt: skip
    PAGED.check(got)


@pytest.mark.parametrize("others", [
    {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "deterministic": True},
    {"softcap": None, "pack_gqa": True, "num_splits": 1, "score_mod": None, "qv": None, "attention_chunk": 0},
    {"num_splits": 0, "sm_margin": 8, "window_size": None, "q_descale": None},
])  # fmt: skip
def test_arguments_that_ask_for_nothing(others):
    q, k, v = rectangle()
    assert torch.equal(flash_attn_func(q, k, v, **others), attention(q, k, v))


def test_rows_of_other_layouts_are_made_contiguous():
    q, k, v = rectangle()
    turned = k.transpose(2, 3).contiguous().transpose(2, 3)
    assert turned.stride(-1) != 1
    assert torch.equal(flash_attn_func(q, turned, v), attention(q, k, v))


def test_soft_cap():
    q, k, v = rectangle()
    expected = attention(q, k, v, scale=1.0, softcap=2.0, causal=True)
    assert torch.equal(flash_attn_func(q, k, v, softmax_scale=1.0, softcap=2.0, causal=True), expected)
    cached = flash_attn_with_kvcache(q, k, v, softmax_scale=1.0, softcap=2.0, causal=True)
    assert torch.equal(cached, expected)


REFUSED = {
    "dropout_p": torch.zeros(2), "alibi_slopes": torch.zeros(4), "qv": torch.zeros(1), "attention_chunk": 128,
    "q_descale": torch.ones(1), "score_mod": max,
    "mask_mod": max, "seqused_q": int32(1), "gather_kv_indices": int32(1),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(name):
    q, k, v = rectangle()
    with pytest.raises(NotImplementedError, match=f"^{name}: is not supported"):
        flash_attn_func(q, k, v, **{name: REFUSED[name]})


@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad"])
def test_what_a_cache_does_not_support_is_named(name):
    q, k, v = rectangle()
    with pytest.raises(NotImplementedError, match=f"^{name}: is not supported"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=20, **{name: int32(0, 1)})


class TestBadInput:
    def test_unknown_arguments(self):
        with pytest.raises(TypeError, match="softmax_scael: is not an argument"):
            flash_attn_func(*rectangle(), softmax_scael=1.0)

    def test_head_sizes(self):
        for dim in (264, 320):
            with pytest.raises(ValueError, match=rf"q: head size must be .*, got {dim}"):
                flash_attn_func(*rectangle(dim=dim))

    def test_a_scale_by_position_is_not_taken_for_another(self):
        """flash-attn 3 and 4 have the scale where flash-attn 2 has dropout."""
        with pytest.raises(NotImplementedError, match=r"dropout_p: .* got 0\.125"):
            flash_attn_func(*rectangle(), 0.125)

    def test_values_are_given(self):
        """None is not K's values, as it is in attention()."""
        q, k, _ = rectangle()
        with pytest.raises(TypeError, match=r"^v: must be a torch.Tensor, got None"):
            flash_attn_func(q, k, None)
        with pytest.raises(TypeError, match=r"^v: must be a torch.Tensor, got None"):
            flash_attn_varlen_func(q[0], k[0], None, int32(0, len(q[0])), int32(0, len(k[0])), 9, 20)

    def test_what_is_returned(self):
        cache = [t[:, :16] for t in rectangle()]
        for call, name in (
            (flash_attn_func, "return_attn_probs"), (flash_attn_varlen_func, "return_lse"),
            (flash_attn_with_kvcache, "return_softmax_lse"),
        ):  # fmt: skip
            with pytest.raises(TypeError, match=rf"^{name}: must be a bool"):
                call(*cache, **{name: torch.ones(2)})

    def test_windows(self):
        with pytest.raises(ValueError, match=r"window_size: .*got -2"):
            flash_attn_func(*rectangle(), window_size=(-2, 0))

    def test_packed_keys_with_lengths(self):
        arguments = MIXED.arguments()
        tensors = [arguments[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
        with pytest.raises(NotImplementedError, match="seqused_k: must be None with packed keys"):
            flash_attn_varlen_func(*tensors, 40, 90, seqused_k=int32(1, 1, 1, 0, 1))
        with pytest.raises(NotImplementedError, match="cu_seqlens_q: must be given"):
            flash_attn_varlen_func(*tensors[:3], cu_seqlens_k=tensors[4])

    def test_two_tables(self):
        arguments = PAGED.arguments()
        table = arguments["page_table"]
        with pytest.raises(TypeError, match="block_table: is the same argument as page_table"):
            flash_attn_with_kvcache(
                arguments["q"], arguments["k"], arguments["v"], block_table=table, page_table=table
            )

    def test_new_keys(self):
        q, k, v = rectangle()
        with pytest.raises(ValueError, match="k: must be given with v"):
            flash_attn_with_kvcache(q, k, v, k[:, :1], cache_seqlens=3)
        with pytest.raises(ValueError, match="cache_seqlens: must be given with k and v"):
            flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1])

    @pytest.mark.parametrize("changes, words", [
        ({"k": normal(2, 3, 4, 64)}, r"k: shape must be \[B=2, n, Hkv=2, D=64\], got \[2, 3, 4, 64\]"),
        ({"v": normal(1, 3, 2, 64)}, r"v: shape must be"),
        ({"v": normal(2, 3, 2, 64).half()}, "v: dtype must be"),
        ({"cache_seqlens": int32(3, 18)}, r"cache_seqlens: values must be 0\.\.17, .* got 3 to 18"),
        ({"cache_seqlens": int32(-1, 3)}, r"cache_seqlens: .* got -1 to 3"),
        ({"cache_seqlens": int32(1, 3).long()}, "cache_seqlens: dtype must be"),
        ({"cache_seqlens": int32(1, 3)[None]}, r"cache_seqlens: shape must be \[2\], got \[1, 2\]"),
        ({"k_cache": normal(2, 20, 2, 64).double()}, r"k_cache: dtype must be .* got torch.float64"),
        ({"softmax_scale": "1"}, "softmax_scale: must be a float, got '1'"),
        ({"causal": 1}, "causal: must be a bool, got 1"),
        ({"window_size": 3}, r"window_size: must be \(left, right\), .* got 3"),
        ({"out": normal(2, 9, 4, 32)}, "out: shape must be"),
        ({"learnable_sink": normal(3)}, r"sink: shape must be \[Hq=4\]"),
    ])  # fmt: skip
    def test_new_keys_that_do_not_fit_leave_the_cache_alone(self, changes, words):
        q, k, v = rectangle()
        good = {"k": normal(2, 3, 2, 64), "v": normal(2, 3, 2, 64), "cache_seqlens": int32(2, 17)}
        before = k.clone(), v.clone()
        with pytest.raises((TypeError, ValueError), match=words):
            flash_attn_with_kvcache(q, **{"k_cache": k, "v_cache": v, **good, **changes})
        assert torch.equal(k, before[0]) and torch.equal(v, before[1])
        flash_attn_with_kvcache(q, k, v, **good)

    @pytest.mark.parametrize(
        "wrong", [None, normal(2, 9, 4, 64).float(), normal(2, 9, 3, 64), normal(2, 9, 4, 96)]
    )
    def test_wrong_queries_leave_the_cache_alone(self, wrong):
        _, k, v = rectangle()
        before = k.clone(), v.clone()
        new = {"k": normal(2, 3, 2, 64), "v": normal(2, 3, 2, 64), "cache_seqlens": int32(2, 17)}
        with pytest.raises((TypeError, ValueError), match=r"^[qk]: "):
            flash_attn_with_kvcache(wrong, k, v, **new)
        assert torch.equal(k, before[0]) and torch.equal(v, before[1])

    def test_gradients(self):
        q, k, v = rectangle()
        q.requires_grad_()
        (got,) = torch.autograd.grad(flash_attn_func(q, k, v, deterministic=True).sum(), q)
        (expected,) = torch.autograd.grad(attention(q, k, v, backend="reference").sum(), q)
        assert torch.equal(got, expected)


def test_lists_of_blocks():
    """A full block and, with causal, a partial one; the others are hidden."""
    case = Case("", 140, 300, (4, 2), flex=False, options=(("causal", True),))
    inputs, seen = inputs_of(case)
    q, k, v = (torch.where(t.isfinite(), t, 0.0) for t in (inputs["q"], inputs["k"], inputs["v"]))
    lists = inputs["block_mask"]
    got, lse = flash_attn_func(
        q, k, v, causal=True, block_sparse_tensors=lists, block_sparse_tensors_bwd=lists, return_lse=True
    )
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    expected, expected_lse = attention(q, k, v, bias=bias, return_lse=True)
    torch.testing.assert_close((got, lse), (expected, expected_lse), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="block_sparse_tensors_bwd"):
        flash_attn_func(q, k, v, block_sparse_tensors_bwd=lists)
