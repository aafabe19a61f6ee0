"""Calls like an earlier one go past the checks (``ops.key_of``): only where they are alike. On CPU tensors that say
they were CUDA ones, which is what decides whether a call is remembered."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from warpspec.common import repeated
from warpspec.common.backend import BACKEND_VARIABLE
from warpspec.fmha import attention, ops
from warpspec.fmha.operands import Operands
from warpspec.fmha.values import DEBUG_VARIABLE

HEADS, HEADS_KV, DIM = 4, 2, 64


@pytest.fixture(params=[True, False], ids=["guards", "signatures"])
def checks(monkeypatch, request):
    """A list that grows by one with every call that is checked; with torch's guards, and as if torch had none."""
    assert repeated.TensorGuards is not None  # else the first way is not tested
    if not request.param:
        monkeypatch.setattr(repeated, "TensorGuards", None)
    made, check = [], ops.check_call
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(ops, "_checked", repeated.Remembered())
    monkeypatch.setattr(ops, "check_call", lambda *arguments: made.append(1) or check(*arguments))
    monkeypatch.setenv(BACKEND_VARIABLE, "reference")
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    return made


def rows(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(seq_q=3, seq_k=5, batch=2, dtype=torch.bfloat16):
    kv = (batch, seq_k, HEADS_KV, DIM)
    return (
        rows(batch, seq_q, HEADS, DIM, dtype=dtype),
        rows(*kv, dtype=dtype, seed=1),
        rows(*kv, dtype=dtype, seed=2),
    )


def test_a_call_alike_is_not_checked_and_sees_other_values(checks):
    q, k, v = operands()
    sink, lengths = rows(HEADS, dtype=torch.float32), torch.tensor([5, 2], dtype=torch.int32)
    for i in range(1, 4):
        others = q * i, k * i, v * i
        o, lse = attention(*others, sink=sink * i, kv_lengths=lengths - i + 1, return_lse=True)
        expected, its_lse = attention(
            *others, sink=sink * i, kv_lengths=lengths - i + 1, return_lse=True, backend="reference", out=q.clone()
        )  # fmt: skip
        assert torch.equal(o, expected) and torch.equal(lse, its_lse)
    assert len(checks) == 2  # one with out, one without


def test_forgotten_calls_are_checked_again(checks):
    """Also the last one, which is recalled without a look-up."""
    for _ in range(2):
        attention(*operands())
    assert len(checks) == 1
    ops.forget_calls()
    attention(*operands())
    assert len(checks) == 2


def random_call(draw: random.Random) -> tuple[tuple, dict]:
    """Operands and options: of each the usual one or, seldom, another, so that calls often differ in one thing only."""

    def some(usual, *others):
        return draw.choice(others) if draw.random() < 0.15 else usual

    q, k, v = operands(some(3, 1), 8, dtype=some(torch.bfloat16, torch.float16))
    k = some(k, torch.cat([k, k], 1)[:, ::2])  # other strides, the same shape
    v = some(v, v.transpose(1, 2).contiguous().transpose(1, 2), None)
    sink = rows(2 * HEADS, dtype=some(torch.float32, torch.bfloat16))
    lengths = torch.tensor([5, 3, 8, 1], dtype=torch.int32)
    bias = rows(1, HEADS, q.shape[1], 16, dtype=torch.float32)
    options = {
        "causal": some(True, False),
        "window": some(None, (1, None), (1, 0)),
        "scale": some(None, 1, 1.0, -0.5),
        "return_lse": True,
        "sink": some(None, sink[:HEADS], sink[::2]),
        "kv_lengths": some(lengths[:2], None, lengths[::2]),
        "q_start": some(None, lengths[1:3]),
        "bias": some(None, bias[..., :8], bias[..., ::2], bias[..., 1:9], bias[:, :1, :, :8]),
    }
    return (q, k, v), options


def test_no_call_gets_what_was_found_for_another(checks, monkeypatch):
    ran, run = [], ops.run
    monkeypatch.setattr(ops, "run", lambda call, *arguments: ran.append(call) or run(call, *arguments))
    draw = random.Random(0)
    before = random_call(draw)
    for _ in range(300):
        tensors, options = random_call(draw)
        for _ in range(3):  # the call before is the one that the next is compared with
            attention(*before[0], **before[1])
        before = tensors, options
        got = attention(*tensors, **options)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "find", lambda *_: (None, None))
            expected = attention(*tensors, **options)
        assert all(map(torch.equal, got, expected)), options
        assert ran[-2] == ran[-1], options  # what a kernel would be told
    assert 100 < len(ops._checked) == len(checks) - 300 < 250  # some were new, some remembered


def test_a_call_like_the_one_before_needs_no_key(checks, monkeypatch):
    for _ in range(2):
        attention(*operands())
    monkeypatch.setattr(ops, "key_of", None)
    attention(*operands())
    with pytest.raises(TypeError, match="not callable"):
        attention(*operands(seq_q=4))


def test_kinds_of_options_are_told_apart(checks):
    q, k, v = operands()
    for _ in range(2):  # the second is the one that the next key is compared with
        attention(q, k, v, causal=True, window=(1, 0), scale=1, key_stride=1)
    for wrong in (
        {"causal": 1},
        {"window": (1, False)},
        {"window": (1.0, 0)},
        {"scale": True},
        {"key_stride": True},
        {"scale": torch.ones(2)},
        {"softcap": np.ones(2)},
    ):
        with pytest.raises(TypeError, match=f"^{next(iter(wrong))}"):
            attention(q, k, v, **{"causal": True, "window": (1, 0), "scale": 1, "key_stride": 1, **wrong})

    class Pair(tuple):
        pass

    attention(q, k, v, window=Pair((1, 0)))
    with pytest.raises(TypeError, match=r"^window"):
        attention(q, k, v, window=Pair((1, False)))
    attention(q, k, v, window=[1, 0])  # no key, and allowed


def test_rows_that_lose_their_alignment_are_refused(checks):
    memory = rows(2 * 3 * HEADS * DIM + 8)
    _, k, v = operands()
    shape = (2, 3, HEADS, DIM)
    attention(memory[8:].view(shape), k, v)
    attention(memory[:-8].view(shape), k, v)
    assert len(checks) == 1
    with pytest.raises(ValueError, match=r"^q: rows must be aligned"):
        attention(memory[1:-7].view(shape), k, v)


def test_out_is_compared_with_the_inputs_every_time(checks):
    q, k, v = operands(seq_q=5)
    memory = torch.empty(2 * q.numel(), dtype=q.dtype)
    out = memory[: q.numel()].view(q.shape)
    before = out._version
    attention(q, k, v, out=out)
    attention(q, k, v, out=out)
    assert len(checks) == 1 and out._version >= before + 2
    for name in ("q", "sink"):
        inputs = {"q": q, "k": k, "v": v}
        if name == "sink":
            inputs["sink"] = rows(HEADS)
            attention(**inputs, out=out)  # known without an overlap
            inputs["sink"] = out.view(-1)[8 : 8 + HEADS]
        else:
            inputs["q"] = memory[8 : 8 + q.numel()].view(q.shape)
        kept = memory.clone()
        with pytest.raises(ValueError, match=f"^out: must not overlap.* {name}$"):
            attention(**inputs, out=out)
        assert torch.equal(memory.view(torch.int16), kept.view(torch.int16))


def test_gradients_are_asked_for_after_a_call_without(checks):
    q, k, v = operands()
    attention(q, k, v)
    attention(q, k, v, out=torch.empty_like(q))
    q.requires_grad_()
    attention(q, k, v).sum().backward()
    assert q.grad is not None
    with pytest.raises(NotImplementedError, match=r"^out"):
        attention(q, k, v, out=torch.empty_like(q))
    made = len(checks)
    with torch.inference_mode():
        assert not attention(q, k, v).requires_grad
        attention(q, k, v, out=torch.empty_like(q))
    assert len(checks) == made


def test_environment_variables_are_seen_as_they_change(checks, monkeypatch):
    q, k, v = operands()
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    attention(q, k, v, kv_lengths=lengths)
    lengths += 1
    attention(q, k, v, kv_lengths=lengths)  # unchecked, as on a GPU
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    with pytest.raises(ValueError, match=r"^kv_lengths"):
        attention(q, k, v, kv_lengths=lengths)
    monkeypatch.delenv(DEBUG_VARIABLE)
    lengths -= 1
    monkeypatch.setenv(BACKEND_VARIABLE, "nonsense")
    with pytest.raises(ValueError, match=f"^{BACKEND_VARIABLE}"):
        attention(q, k, v, kv_lengths=lengths)


@pytest.mark.parametrize("name", ["q", "k", "sink", "bias", "kv_lengths", "out"])
def test_a_sparse_tensor_is_named(checks, name):
    q, k, v = operands()
    arguments = {
        "q": q, "k": k, "v": v, "sink": rows(HEADS), "bias": rows(1, 1, 3, 5),
        "kv_lengths": torch.tensor([5, 2], dtype=torch.int32), "out": torch.empty_like(q),
    }  # fmt: skip
    attention(**arguments)
    arguments[name] = arguments[name].to_sparse()
    with pytest.raises(TypeError, match=f"^{name}: must be a strided tensor"):
        attention(**arguments)


def test_a_call_that_failed_half_way_does_not_spoil_the_next(checks, monkeypatch):
    q, k, v = operands()
    expected, run = attention(q, k, v, backend="reference"), ops.run

    def broken(*arguments):
        raise RuntimeError("out of memory")

    for _ in range(2):  # checked, then remembered
        monkeypatch.setattr(ops, "run", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            attention(q, k, v)
        monkeypatch.setattr(ops, "run", run)
        assert torch.equal(attention(q, k, v), expected)
    with pytest.raises(TypeError):
        attention(q, k.float(), v)
    with pytest.raises(TypeError):  # what was refused is not remembered
        attention(q, k.float(), v)


def test_threads_that_fill_what_is_remembered(checks, monkeypatch):
    monkeypatch.setattr(repeated, "MOST_REMEMBERED", 2)
    q, k, v = operands()
    scales = [0.1 * i for i in range(1, 6)]
    expected = {scale: attention(q, k, v, scale=scale) for scale in scales}
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(
            lambda scale: torch.equal(attention(q, k, v, scale=scale), expected[scale]), 8 * scales
        )
        assert all(results)
    assert len(ops._checked) <= 2


class TestWhoNeedsTheOperator:
    @pytest.mark.filterwarnings("ignore:.torch.jit.trace")
    def test_jit_trace(self):
        """Past the operator a trace would hold the allocation of o, and nothing that fills it."""
        q, k, v = operands()
        traced = torch.jit.trace(
            lambda q, k, v: attention(q, k, v, backend="sim"), (q, k, v), check_trace=False
        )
        assert "warpspec::fmha_forward" in str(traced.graph)
        assert torch.equal(traced(-q, k, v), attention(-q, k, v, backend="sim"))

    def test_a_negated_view(self):
        """The memory of a negated view holds the other sign."""
        q, k, v = operands()
        got = attention(torch._neg_view(q), k, torch._neg_view(v), backend="sim")
        assert torch.equal(got, attention(-q, k, -v, backend="sim"))

    def test_compiled_and_eager_in_turns(self, checks):
        q, k, v = operands()
        expected = attention(q, k, v, causal=True)
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager"
        )
        for call in (compiled, lambda *tensors: attention(*tensors, causal=True), compiled):
            assert torch.equal(call(q, k, v), expected)


def test_kernels_take_sinks_as_they_are():
    """A conversion would be a launch in front of every call; kernels have no float64."""
    q, k, v = operands()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sink = rows(HEADS, dtype=dtype)
        assert ops.regular_operands(Operands(q, k, v, sink=sink)).sink is sink
    assert ops.regular_operands(Operands(q, k, v, sink=rows(HEADS).double())).sink.dtype is torch.float32
