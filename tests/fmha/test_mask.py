"""The visibility rule against the contract's sentences, key by key."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warpspec.fmha import attention, attention_varlen
from warpspec.fmha.mask import key_range, position_range, visible
from warpspec.fmha.problem import POSITION_LIMIT, AttentionProblem


def sees(j, p, length, causal, left, right, key_stride):
    """DESIGN 3, word for word."""
    if j >= length:
        return False
    if causal and not (j + 1) * key_stride - 1 <= p:
        return False
    if left is not None and not p - left <= j:
        return False
    return right is None or j <= p + right


reach = st.none() | st.integers(0, 12)


@given(
    position=st.integers(-20, 40),
    length=st.integers(0, 20),
    causal=st.booleans(),
    left=reach,
    right=reach,
    key_stride=st.sampled_from([1, 1, 2, 4, 7]),
)
def test_key_range_is_the_set_of_visible_keys(position, length, causal, left, right, key_stride):
    if key_stride != 1:
        left = right = None
    first, end = key_range(position, length, causal=causal, left=left, right=right, key_stride=key_stride)
    keys = [j for j in range(25) if sees(j, position, length, causal, left, right, key_stride)]
    assert [j for j in range(25) if first <= j < end] == keys
    assert first >= 0
    assert end <= length


@given(
    key=st.integers(0, 20),
    causal=st.booleans(),
    left=reach,
    right=reach,
    key_stride=st.sampled_from([1, 1, 2, 4, 7]),
)
def test_position_range_is_the_set_of_rows_that_see_a_key(key, causal, left, right, key_stride):
    if key_stride != 1:
        left = right = None
    first, end = position_range(key, causal=causal, left=left, right=right, key_stride=key_stride)
    positions = range(-20, 170)
    rows = [p for p in positions if sees(key, p, 21, causal, left, right, key_stride)]
    assert [p for p in positions if (first is None or first <= p) and (end is None or p < end)] == rows


@given(
    seq_q=st.integers(1, 6),
    seq_k=st.integers(1, 9),
    causal=st.booleans(),
    window=st.none() | st.tuples(reach, reach),
    lengths=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    starts=st.none() | st.tuples(st.integers(-9, 12), st.integers(-9, 12)),
)
def test_visible_with_default_and_given_positions(seq_q, seq_k, causal, window, lengths, starts):
    tensors = {
        "kv_lengths": None if lengths is None else torch.tensor(lengths, dtype=torch.int32).clamp(max=seq_k),
        "q_start": None if starts is None else torch.tensor(starts, dtype=torch.int32),
    }
    q, k = torch.zeros(2, seq_q, 2, 64).half(), torch.zeros(2, seq_k, 1, 64).half()
    problem = AttentionProblem.of(q, k, causal=causal, window=window, **tensors)
    seen = visible(problem, **tensors)
    assert seen.shape == (2, seq_q, seq_k)
    left, right = window or (None, None)
    for b in range(2):
        length = seq_k if lengths is None else min(lengths[b], seq_k)
        start = length - seq_q if starts is None else starts[b]
        for i in range(seq_q):
            for j in range(seq_k):
                assert seen[b, i, j] == sees(j, start + i, length, causal, left, right, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_sides_of_windows_are_dropped_where_they_hide_no_key(causal):
    """Just there, so that kernels without windows serve such calls."""
    sides = (None, *range(7))
    for seq_q, seq_k, left, right in itertools.product((1, 3, 6), (1, 4, 6), sides, sides):
        q, k = torch.zeros(1, seq_q, 2, 64).half(), torch.zeros(1, seq_k, 1, 64).half()
        options = {"causal": causal, "window": (left, right)}
        found = AttentionProblem.of(q, k, **options)
        positions = range(seq_k - seq_q, seq_k)
        pairs = [(p, j) for p in positions for j in range(seq_k) if sees(j, p, seq_k, causal, None, None, 1)]
        for side, own in (("left", (left, None)), ("right", (None, right))):
            hides = not all(sees(j, p, seq_k, causal, *own, 1) for p, j in pairs)
            reach = {"left": left, "right": right}[side]
            assert getattr(found, f"window_{side}") == (reach if hides else None), (seq_q, seq_k, options)
            assert getattr(found.mask, f"has_{side}") == hides
        placed = AttentionProblem.of(q, k, q_start=torch.zeros(1, dtype=torch.int32), **options)
        assert (placed.window_left, placed.window_right) == (left, None if causal else right)


def test_windows_hide_keys_of_packed_requests_whatever_the_hints_say():
    """max_seqlen_q and max_seqlen_k may be too small: the tensors' sizes decide."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(11, 2, 64).half() for _ in range(3))
    starts = torch.tensor([0, 2, 11], dtype=torch.int32)
    options = {"window": (4, 3), "backend": "reference"}
    hints = {"max_seqlen_q": 1, "max_seqlen_k": 1}
    found = attention_varlen(q, k, v, starts, cu_seqlens_k=starts, **hints, **options)
    alone = attention(*(t[None, 2:] for t in (q, k, v)), **options)[0]
    assert torch.equal(found[2:], alone)
    wide = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, **hints, "memory": False}
    kept, dropped = (AttentionProblem.of(q, k, v, window=(each, each), **wide) for each in (9, 10))
    assert (kept.window_left, kept.window_right) == (9, 9)
    assert (dropped.window_left, dropped.window_right, dropped.mask.band) == (None, None, False)


def test_lengths_out_of_range_are_clamped():
    """Where values go unchecked (a CUDA tensor's), the definition is what kernels do: clamp."""
    q, k = torch.zeros(2, 3, 1, 64).half(), torch.zeros(2, 5, 1, 64).half()
    problem = AttentionProblem.of(q, k, causal=True)
    wild = torch.tensor([9, -4], dtype=torch.int32)
    tame = torch.tensor([5, 0], dtype=torch.int32)
    assert torch.equal(visible(problem, wild), visible(problem, tame))


def test_largest_window_and_position_do_not_wrap_around():
    """A kernel computes in int32: so does this."""
    position = torch.tensor([2 * POSITION_LIMIT, -POSITION_LIMIT], dtype=torch.int32)
    length = torch.tensor([5, 5], dtype=torch.int32)
    first, end = key_range(
        position,
        length,
        causal=False,
        left=POSITION_LIMIT,
        right=POSITION_LIMIT,
        minimum=torch.minimum,
        maximum=lambda low, value: value.clamp(min=low),
    )
    assert first.tolist() == [POSITION_LIMIT, 0]
    assert end.tolist() == [5, 1]
