"""merge(): states over parts of the keys give attention over all of them, whatever the parts."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warpspec.fmha import AttentionState, attention, merge

SEQ_Q, SEQ_K, HEADS = 5, 12, 4


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def reference(*tensors, **options):
    return attention(*tensors, backend="reference", **options)


def inputs(seed=0):
    q = randn(2, SEQ_Q, HEADS, 64, seed=seed) * 4
    return q, randn(2, SEQ_K, 2, 64, seed=seed + 1), randn(2, SEQ_K, 2, 64, seed=seed + 2)


def whole(tensors, sink, **options):
    """(o fp32, lse) in one shot, o from the un-normalised state in float64."""
    state = reference(*tensors, normalize=False, **options)
    total = state.row_sum.double()
    if sink is not None:
        total = total + torch.exp(sink.double()[None, :, None] - state.row_max)
    o = state.o.double() / total.transpose(1, 2)[..., None]
    return o.nan_to_num(0.0).float(), state.lse


def parts(tensors, cuts, **options):
    """States over keys [cut, next cut); the last query stands at the last key of all, as in the whole."""
    q, k, v = tensors
    states = []
    for first, end in pairwise(cuts):
        start = torch.full((q.shape[0],), SEQ_K - SEQ_Q - first, dtype=torch.int32)
        states.append(
            reference(q, k[:, first:end], v[:, first:end], normalize=False, q_start=start, **options)
        )
    return states


def close(got, expected):
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=2e-6)


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(0, SEQ_K), max_size=4),
    causal=st.booleans(),
    left=st.none() | st.integers(0, 6),
    with_sink=st.booleans(),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 100),
)
def test_any_split_in_any_order(cuts, causal, left, with_sink, order, seed):
    tensors = inputs(seed)
    options = {"causal": causal, "window": None if left is None else (left, None)}
    sink = randn(HEADS, seed=seed).float() * 3 if with_sink else None
    states = parts(tensors, [0, *sorted(cuts), SEQ_K], **options)  # equal cuts make parts without keys
    order.shuffle(states)
    close(merge(states, sink), whole(tensors, sink, **options))


def test_one_state_is_plain_attention():
    tensors = inputs()
    o, lse = merge([reference(*tensors, normalize=False)])
    expected, expected_lse = reference(*tensors, return_lse=True)
    assert o.dtype == torch.float32 and torch.equal(o.bfloat16(), expected) and torch.equal(lse, expected_lse)


def test_every_split_agrees_with_attention_of_kv_lengths_and_sink():
    q, k, v = inputs()
    lengths = torch.tensor([12, 3], dtype=torch.int32)
    sink = randn(HEADS)
    states = [
        reference(q, k[:, first : first + 4], v[:, first : first + 4], normalize=False,
                  kv_lengths=(lengths - first).clamp(0, 4))
        for first in (0, 4, 8)
    ]  # fmt: skip
    expected = reference(q, k, v, kv_lengths=lengths, sink=sink, return_lse=True)
    o, lse = merge(states, sink)
    torch.testing.assert_close(o, expected[0].float(), rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("sink", [None, torch.zeros(HEADS)])
def test_all_states_empty(sink):
    q, k, v = inputs()
    nothing = torch.zeros(2, dtype=torch.int32)
    empty = reference(q, k, v, normalize=False, kv_lengths=nothing)
    o, lse = merge([empty, empty], sink)
    assert (o == 0).all() and (lse == -math.inf).all()


def test_empty_state_changes_nothing():
    q, k, v = inputs()
    state = reference(q, k, v, normalize=False)
    empty = reference(q, k[:, :0], v[:, :0], normalize=False)
    for states in ([state, empty], [empty, state]):
        o, lse = merge(states)
        expected = merge([state])
        assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


def test_row_maxima_hundreds_apart_neither_overflow_nor_vanish():
    q, k, v = inputs()
    state = reference(q, k, v, normalize=False)
    low = state._replace(row_max=state.row_max - 500)
    high = state._replace(row_max=state.row_max + 500)
    o, lse = merge([low, high, low])
    expected = merge([state])
    torch.testing.assert_close(o, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected[1] + 500, rtol=1e-6, atol=1e-4)


def test_any_row_max_a_kernel_chooses_is_right():
    q, k, v = inputs()
    state = reference(q, k, v, normalize=False)
    other = AttentionState(state.o * math.exp(2), state.row_max - 2, state.row_sum * math.exp(2))
    sink = randn(HEADS)
    close(merge([state, other], sink), merge([state, state], sink))


@pytest.mark.parametrize("sinks", [None, (0.5, 100.0, 1e4, math.inf), (-math.inf, -200.0, 3.0, 0.0)])
def test_gradients_flow_through_states_of_results(sinks):
    """As in context parallelism: the gradients of attention over all keys, also of rows that see none of some."""
    leaves = [t.requires_grad_() for t in inputs()]
    sink = None if sinks is None else torch.tensor(sinks, requires_grad=True)
    wanted = [*leaves, *([] if sink is None else [sink])]
    q, k, v = leaves
    states = []
    for first, end in ((0, 3), (3, 3), (3, 9), (9, SEQ_K)):
        start = torch.full((2,), SEQ_K - SEQ_Q - 8 - first, dtype=torch.int32)  # some rows see nothing at all
        part = k[:, first:end], v[:, first:end]
        o, lse = reference(q, *part, causal=True, window=(2, None), q_start=start, return_lse=True)
        states.append(AttentionState(o.float(), lse, torch.ones_like(lse)))
    o, lse = merge(states, sink)
    start = torch.full((2,), SEQ_K - SEQ_Q - 8, dtype=torch.int32)
    expected, expected_lse = reference(
        q, k, v, causal=True, window=(2, None), q_start=start, sink=sink, return_lse=True
    )
    some = expected_lse != -math.inf
    assert torch.equal(some, lse != -math.inf) and not some.all()
    weights = randn(*o.shape, seed=7).float()

    def gradients(o, lse):
        loss = (o.float() * weights).sum() + lse[some].sum()
        return torch.autograd.grad(loss, wanted, retain_graph=True)

    for got, exact in zip(gradients(o, lse), gradients(expected, expected_lse), strict=True):
        assert (got - exact).float().norm() <= 0.05 * exact.float().norm() + 1e-6  # o is rounded to bf16


def test_sink_far_above_and_below():
    q, k, v = inputs()
    state = reference(q, k, v, normalize=False)
    o, lse = merge([state], torch.tensor([1e6, math.inf, -1e6, -math.inf]))
    assert (o[:, :, :2] == 0).all()
    assert torch.equal(o[:, :, 2:], merge([state])[0][:, :, 2:]) and torch.equal(lse, state.lse)


def state(batch=1, seq_q=2, heads=4, dim=64):
    stats = (batch, heads, seq_q)
    return AttentionState(torch.zeros(batch, seq_q, heads, dim), torch.zeros(stats), torch.ones(stats))


@pytest.mark.parametrize(
    ("states", "sink", "error", "name"),
    [
        ([], None, ValueError, "states"),
        (state(), None, TypeError, "states"),
        (3, None, TypeError, "states"),
        ([torch.zeros(1)], None, TypeError, "states"),
        ([state(), state(heads=2)], None, ValueError, "states"),
        ([state(), state()._replace(row_sum=torch.ones(1, 2, 4))], None, ValueError, "states"),
        ([state()._replace(row_max=torch.zeros(1, 2, 4))], None, ValueError, "states"),
        ([state()._replace(o=torch.zeros(1, 2, 4, 64).half())], None, TypeError, "states"),
        ([state()._replace(row_max=None)], None, TypeError, "states"),
        ([state(), state()._replace(o=torch.zeros(1, 2, 4, 64, device="meta"))], None, ValueError, "states"),
        ([state()], torch.zeros(3), ValueError, "sink"),
        ([state()], torch.zeros(4, dtype=torch.int32), TypeError, "sink"),
        ([state()], 1.0, TypeError, "sink"),
        ([state()], torch.zeros(4, device="meta"), ValueError, "sink"),
    ],
)
def test_bad_input_names_the_argument(states, sink, error, name):
    with pytest.raises(error, match=rf"^{name}: "):
        merge(states, sink)
