"""The FP32 reference against loops written from the definition, torch's SDPA, and what must not change it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warpspec.fmha import AttentionState, attention

NEG_INF = -math.inf


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def reference(*tensors, **options):
    return attention(*tensors, backend="reference", **options)


def by_loops(
    q,
    k,
    v=None,
    scale=None,
    causal=False,
    window=None,
    sink=None,
    bias=None,
    kv_lengths=None,
    page_table=None,
    q_start=None,
    key_stride=1,
):
    """(o, lse) in float64 by Python loops over every row and key; shares no code with the reference."""
    v = k if v is None else v
    batch, seq_q, heads_q, dim = q.shape
    group = heads_q // k.shape[2]
    seq_k = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    o = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((batch, heads_q, seq_q), NEG_INF, dtype=torch.float64)
    for b in range(batch):
        length = seq_k if kv_lengths is None else int(kv_lengths[b])
        for h in range(heads_q):
            for i in range(seq_q):
                p = i + (length - seq_q if q_start is None else int(q_start[b]))
                terms = []
                for j in range(length):
                    if causal and (j + 1) * key_stride - 1 > p:
                        continue
                    if window and window[0] is not None and j < p - window[0]:
                        continue
                    if window and window[1] is not None and j > p + window[1]:
                        continue
                    place = (b, j)
                    if page_table is not None:
                        place = (int(page_table[b, j // k.shape[1]]), j % k.shape[1])
                    key, value = k[place][h // group], v[place][h // group]
                    logit = sum(float(x) * float(y) for x, y in zip(q[b, i, h], key, strict=True))
                    logit *= dim**-0.5 if scale is None else scale
                    if bias is not None:
                        logit += float(bias[b % bias.shape[0], h % bias.shape[1], i, j])
                        if logit == NEG_INF:
                            continue
                    terms.append((logit, value.double()))
                if not terms:
                    continue
                top = max(logit for logit, _ in terms)
                total = sum(math.exp(logit - top) for logit, _ in terms)
                lse[b, h, i] = top + math.log(total)
                if sink is not None:
                    total += math.exp(float(sink[h]) - top)
                o[b, i, h] = sum(math.exp(logit - top) * value for logit, value in terms) / total
    return o, lse


def agrees(q, k, v=None, **options):
    """Assert that reference and loops agree: o to a rounding of q's dtype, lse and state to fp32's."""
    o, lse = reference(q, k, v, return_lse=True, **options)
    expected, expected_lse = by_loops(q, k, v, **options)
    assert o.dtype == q.dtype and lse.dtype == torch.float32
    assert o.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    torch.testing.assert_close(o.double(), expected, rtol=torch.finfo(q.dtype).eps, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=2e-6)
    state = reference(q, k, v, normalize=False, **{**options, "sink": None})
    assert all(part.dtype == torch.float32 for part in state)
    torch.testing.assert_close(state.lse.double(), expected_lse, rtol=1e-6, atol=2e-6)
    if options.get("sink") is None:
        total = torch.where(state.row_sum == 0, 1.0, state.row_sum).transpose(1, 2)[..., None]
        torch.testing.assert_close((state.o / total).double(), expected, rtol=1e-5, atol=2e-6)
    return o, lse


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "window-left-causal": {"window": (1, None), "causal": True},
    "window-right": {"window": (None, 0)},
    "scale": {"scale": -0.4},
    "sink": {"sink": randn(4, dtype=torch.float32, seed=9)},
    "sink-bf16-causal": {"sink": randn(4, seed=9), "causal": True},
    "sink-double": {"sink": randn(4, dtype=torch.float64, seed=9)},
    "lengths": {"kv_lengths": int32(6, 0), "causal": True, "sink": randn(4)},
    "q-start": {"q_start": int32(-2, 3), "causal": True},
    "q-start-window": {"q_start": int32(0, 5), "window": (1, 1)},
    "key-stride": {"key_stride": 4, "q_start": int32(0, 13), "causal": True},
    "key-stride-defaults": {"key_stride": 2, "causal": True},
    "key-stride-not-causal": {"key_stride": 4},
    "bias": {"bias": randn(2, 4, 5, 7, dtype=torch.float32, seed=3)},
    "bias-broadcast": {"bias": randn(1, 1, 5, 7, seed=3), "causal": True, "scale": 0.0},
    "bias-per-head": {"bias": randn(1, 4, 5, 7, seed=3), "sink": randn(4)},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_agrees_with_loops(options, dtype):
    agrees(
        randn(2, 5, 4, 64, dtype=dtype),
        randn(2, 7, 2, 64, dtype=dtype, seed=1),
        randn(2, 7, 2, 64, dtype=dtype, seed=2),
        **options,
    )


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_head_sizes_and_shared_kv(dim):
    q, k = randn(1, 3, 4, dim), randn(1, 4, 1, dim, seed=1)
    o, lse = agrees(q, k, causal=True, sink=randn(4))
    again, lse_again = reference(q, k, k.clone(), causal=True, sink=randn(4), return_lse=True)
    assert torch.equal(o, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1)])
def test_head_groups(heads):
    agrees(randn(1, 2, heads[0], 64), randn(1, 5, heads[1], 64, seed=1), randn(1, 5, heads[1], 64, seed=2))


def test_bias_of_minus_infinity_hides_keys_and_rows():
    bias = randn(1, 4, 7, 5, dtype=torch.float32).transpose(2, 3)  # of any strides
    bias[:, 1, :, 3] = NEG_INF
    bias[:, 2, 4] = NEG_INF
    o, lse = agrees(randn(2, 5, 4, 64), randn(2, 7, 2, 64, seed=1), bias=bias, sink=randn(4))
    assert (o[:, 4, 2] == 0).all() and (lse[:, 2, 4] == NEG_INF).all()


def test_pages_equal_the_same_keys_in_order():
    q, k, v = randn(2, 3, 4, 64), randn(2, 12, 2, 64, seed=1), randn(2, 12, 2, 64, seed=2)
    lengths = int32(12, 5)
    table = torch.tensor([[4, 0, 6], [1, 5, -9]], dtype=torch.int32)  # the second row uses two pages
    pages = []
    for source in (k, v):
        page = torch.full((7, 4, 2, 64), torch.nan, dtype=source.dtype)
        for b in range(2):
            for slot in range(3):
                if table[b, slot] >= 0:
                    page[table[b, slot]] = source[b, 4 * slot : 4 * slot + 4]
        pages.append(page)
    options = {"kv_lengths": lengths, "causal": True, "sink": randn(4), "return_lse": True}
    got = reference(q, *pages, page_table=table, **options)
    expected = reference(q, k, v, **options)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    agrees(q, *pages, page_table=table, kv_lengths=lengths, window=(2, None))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 33, 33, 4, 2), (1, 128, 128, 2, 2), (1, 1, 1, 1, 1)])
def test_agrees_with_torch_sdpa(shape, causal):
    batch, seq_q, seq_k, heads_q, heads_kv = shape
    q, k, v = (
        randn(batch, seq_q, heads_q, 64),
        randn(batch, seq_k, heads_kv, 64),
        randn(batch, seq_k, heads_kv, 64),
    )
    state = reference(q, k, v, causal=causal, normalize=False)
    got = state.o / state.row_sum.transpose(1, 2)[..., None]
    q, k, v = (t.float().transpose(1, 2) for t in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 3, 100])
def test_num_splits_does_not_change_the_result(num_splits):
    q, k = randn(2, 5, 4, 64), randn(2, 7, 2, 64, seed=1)
    assert torch.equal(reference(q, k, num_splits=num_splits), reference(q, k))


class TestDegenerate:
    @pytest.mark.parametrize("empty", ["batch", "seq_q", "seq_k"])
    @pytest.mark.parametrize("normalize", [True, False])
    def test_size_zero(self, empty, normalize):
        size = {"batch": 2, "seq_q": 3, "seq_k": 4, empty: 0}
        q, k = randn(size["batch"], size["seq_q"], 4, 64), randn(size["batch"], size["seq_k"], 2, 64)
        stats = (size["batch"], 4, size["seq_q"])
        if normalize:
            o, lse = reference(q, k, sink=randn(4), return_lse=True)
            assert o.dtype == q.dtype
        else:
            state = reference(q, k, normalize=False)
            o, lse = state.o, state.lse
            assert o.dtype == torch.float32 and (state.row_sum == 0).all()
        assert o.shape == q.shape and (o == 0).all()
        assert lse.shape == stats and (lse == NEG_INF).all()

    def test_empty_page_table(self):
        k = randn(0, 16, 2, 64)
        table = torch.zeros(2, 0, dtype=torch.int32)
        o = reference(randn(2, 3, 4, 64), k, kv_lengths=int32(0, 0), page_table=table)
        assert o.shape == (2, 3, 4, 64) and (o == 0).all()

    def test_no_pages_and_no_keys(self):
        table = torch.full((2, 3), -1, dtype=torch.int32)
        o = reference(randn(2, 3, 4, 64), randn(0, 16, 2, 64), kv_lengths=int32(0, 0), page_table=table)
        assert (o == 0).all()

    @pytest.mark.parametrize("sink", [None, randn(4)])
    def test_rows_without_visible_keys(self, sink):
        o, lse = reference(randn(1, 9, 4, 64), randn(1, 4, 2, 64), causal=True, sink=sink, return_lse=True)
        assert (o[:, :5] == 0).all() and (lse[..., :5] == NEG_INF).all()
        assert o[:, 5:].any(dim=-1).all() and lse[..., 5:].isfinite().all()

    def test_one_visible_key_is_its_value(self):
        v = randn(1, 9, 1, 64)
        assert torch.equal(reference(randn(1, 9, 1, 64), randn(1, 9, 1, 64), v, window=(0, 0)), v)

    def test_huge_sink_takes_everything_and_no_sink_is_minus_infinity(self):
        q, k = randn(1, 3, 2, 64), randn(1, 4, 1, 64)
        o = reference(q, k, sink=torch.tensor([1e4, NEG_INF]))
        assert (o[:, :, 0] == 0).all()
        assert torch.equal(o[:, :, 1], reference(q, k)[:, :, 1])


class TestPoison:
    """NaN and Inf at invisible keys; a row that sees them shows them."""

    @pytest.mark.parametrize("bad", [math.nan, math.inf, NEG_INF])
    def test_at_keys_no_row_sees(self, bad):
        q, k, v = randn(2, 3, 4, 64), randn(2, 8, 2, 64, seed=1), randn(2, 8, 2, 64, seed=2)
        lengths = int32(5, 0)
        expected = reference(q, k, v, kv_lengths=lengths, return_lse=True)
        for t in (k, v):
            t[0, 5:], t[1] = bad, bad
        got = reference(q, k, v, kv_lengths=lengths, return_lse=True)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])

    @pytest.mark.parametrize("bad", [math.nan, math.inf, NEG_INF])
    @pytest.mark.parametrize("where", ["k", "v"])
    def test_at_a_key_only_later_rows_see(self, bad, where):
        tensors = {"q": randn(1, 8, 2, 64), "k": randn(1, 8, 2, 64, seed=1), "v": randn(1, 8, 2, 64, seed=2)}
        expected = reference(**tensors, causal=True)
        tensors[where][:, 5, :, 7] = bad
        got = reference(**tensors, causal=True)
        torch.testing.assert_close(got[:, :5], expected[:, :5], rtol=1e-2, atol=1e-6)
        if where == "v" or math.isnan(bad):  # an infinite key may also get a logit of -inf, and no weight
            assert not got[:, 5:, :, 7].isfinite().any()

    def test_hidden_by_bias(self):
        bias = torch.zeros(1, 2, 4, 4)
        bias[:, 1, :, 2] = NEG_INF
        bias[:, 0, 1, 0] = NEG_INF
        q, k, v = randn(1, 4, 2, 64), randn(1, 4, 1, 64, seed=1), randn(1, 4, 1, 64, seed=2)
        v[:, 2] = math.nan
        o = reference(q, k, v, bias=bias)
        assert o[:, :, 1].isfinite().all() and o[:, :, 0].isnan().all()

    def test_infinite_value_at_a_visible_key_is_infinite(self):
        q, k, v = randn(1, 1, 1, 64), randn(1, 3, 1, 64, seed=1), randn(1, 3, 1, 64, seed=2)
        v[:, 1, :, 3], v[:, 0, :, 4], v[:, 2, :, 4] = math.inf, math.inf, NEG_INF
        o = reference(q, k, v)[0, 0, 0]
        assert o[3] == math.inf and o[4].isnan() and o[:3].isfinite().all()


class TestMemory:
    def test_any_strides(self):
        q, k, v = randn(2, 5, 4, 64), randn(2, 7, 2, 64, seed=1), randn(2, 7, 2, 64, seed=2)
        expected = reference(q, k, v, causal=True)
        heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        assert torch.equal(reference(*heads_first, causal=True), expected)
        padded = [torch.nn.functional.pad(t, (0, 8), value=math.nan)[..., :64] for t in (q, k, v)]
        assert torch.equal(reference(*padded, causal=True), expected)
        every_other = [t.repeat_interleave(2, dim=1)[:, ::2] for t in (q, k, v)]
        assert torch.equal(reference(*every_other, causal=True), expected)

    def test_broadcast_keys_and_lengths(self):
        q, k = randn(3, 5, 4, 64), randn(1, 7, 1, 64, seed=1)
        lengths = int32(6).expand(3)
        got = reference(q, k.expand(3, 7, 2, 64), kv_lengths=lengths)
        assert torch.equal(got, reference(q, k.repeat(3, 1, 2, 1), kv_lengths=int32(6, 6, 6)))

    def test_out_is_written_and_returned(self):
        q, k = randn(2, 5, 4, 64), randn(2, 7, 2, 64)
        room = torch.full((2, 4, 5, 72), math.nan, dtype=q.dtype)
        out = room.transpose(1, 2)[..., :64]
        got, lse = reference(q, k, out=out, return_lse=True)
        expected, expected_lse = reference(q, k, return_lse=True)
        assert got is out and torch.equal(out, expected) and torch.equal(lse, expected_lse)
        assert room[..., 64:].isnan().all()

    def test_out_of_a_state(self):
        q, k = randn(2, 5, 4, 64), randn(2, 7, 2, 64)
        out = torch.full((2, 5, 4, 64), math.nan)
        state = reference(q, k, out=out, normalize=False)
        assert isinstance(state, AttentionState) and state.o is out
        torch.testing.assert_close(state, reference(q, k, normalize=False), rtol=0, atol=0)

    def test_arguments_come_back_unchanged(self):
        tensors = {
            "q": randn(2, 5, 4, 64),
            "k": randn(6, 4, 2, 64),
            "v": randn(6, 4, 2, 64),
            "sink": randn(4),
        }
        tensors |= {"kv_lengths": int32(7, 3), "q_start": int32(1, 2), "bias": randn(1, 4, 5, 8)}
        tensors["page_table"] = torch.tensor([[0, 1], [2, 77]], dtype=torch.int32)
        copies = {name: t.clone() for name, t in tensors.items()}
        reference(**tensors, causal=True)
        assert all(torch.equal(tensors[name], copies[name]) for name in tensors)


small = {
    "seq_q": st.integers(1, 6),
    "seq_k": st.integers(1, 12),
    "causal": st.booleans(),
    "window": st.none() | st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
    "seed": st.integers(0, 1000),
}


def inputs(seq_q, seq_k, seed):
    return [randn(2, seq_q, 4, 64, seed=seed), *(randn(2, seq_k, 2, 64, seed=seed + i) for i in (1, 2))]


def close(got, expected):
    torch.testing.assert_close(got.lse, expected.lse, rtol=1e-5, atol=2e-5)
    got_o, expected_o = (
        s.o / torch.where(s.row_sum == 0, 1.0, s.row_sum).transpose(1, 2)[..., None] for s in (got, expected)
    )
    torch.testing.assert_close(got_o, expected_o, rtol=1e-4, atol=2e-5)


@settings(max_examples=40)
@given(**small, copies=st.integers(1, 3))
def test_repeating_all_keys_adds_only_to_lse(seq_q, seq_k, causal, window, seed, copies):
    q, k, v = inputs(seq_q, seq_k, seed)
    once, lse = reference(q, k, v, return_lse=True)
    repeated, lse_repeated = reference(
        q, k.repeat(1, copies, 1, 1), v.repeat(1, copies, 1, 1), return_lse=True
    )
    torch.testing.assert_close(repeated, once, rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(lse_repeated, lse + math.log(copies), rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(**small)
def test_masks_equal_bias_of_minus_infinity(seq_q, seq_k, causal, window, seed):
    """A structural mask is the bias that hides the same keys; the mask is written out here."""
    q, k, v = inputs(seq_q, seq_k, seed)
    p = torch.arange(seq_q)[:, None] + seq_k - seq_q
    j = torch.arange(seq_k)[None, :]
    hidden = (j > p) if causal else torch.zeros(seq_q, seq_k, dtype=torch.bool)
    left, right = window or (None, None)
    if left is not None:
        hidden = hidden | (j < p - left)
    if right is not None:
        hidden = hidden | (j > p + right)
    bias = torch.zeros(1, 1, seq_q, seq_k).masked_fill(hidden, NEG_INF)
    structural = reference(q, k, v, causal=causal, window=window, normalize=False)
    close(reference(q, k, v, bias=bias, normalize=False), structural)


@settings(max_examples=40)
@given(**small, shift=st.floats(-50, 50))
def test_constant_bias_moves_only_lse(seq_q, seq_k, causal, window, seed, shift):
    q, k, v = inputs(seq_q, seq_k, seed)
    options = {"causal": causal, "window": window, "normalize": False}
    plain = reference(q, k, v, **options)
    moved = reference(q, k, v, bias=torch.full((1, 1, seq_q, seq_k), shift), **options)
    close(moved._replace(row_max=moved.row_max - shift), plain)


@settings(max_examples=40)
@given(**small)
def test_sink_scales_rows_by_its_share(seq_q, seq_k, causal, window, seed):
    q, k, v = inputs(seq_q, seq_k, seed)
    sink = randn(4, dtype=torch.float32, seed=seed)
    options = {"causal": causal, "window": window, "return_lse": True}
    o, lse = reference(q, k, v, **options)
    with_sink, lse_with_sink = reference(q, k, v, sink=sink, **options)
    assert torch.equal(lse, lse_with_sink)
    share = torch.sigmoid(lse - sink[None, :, None]).transpose(1, 2)[..., None]
    torch.testing.assert_close(with_sink.float(), o.float() * share, rtol=2e-2, atol=1e-6)


@settings(max_examples=40)
@given(**small, value=st.floats(-8, 8))
def test_equal_values_come_back(seq_q, seq_k, causal, window, seed, value):
    """Weights sum to one: whatever the keys, rows that see any return the value all keys hold."""
    q, k, v = inputs(seq_q, seq_k, seed)
    v[:] = value
    o, lse = reference(q, k, v, causal=causal, window=window, return_lse=True)
    seen = (lse != NEG_INF).transpose(1, 2)
    torch.testing.assert_close(o[seen], torch.full_like(o[seen], float(v[0, 0, 0, 0])), rtol=1e-2, atol=1e-6)
    assert (o[~seen] == 0).all()
