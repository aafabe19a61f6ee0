"""Gradient calls whose launches pick their arguments (``direct``) get those that are put together for the others."""

import operator

import pytest
import torch
from helpers.gradient_cases import Case

from warpspec.common.launch import Kernel
from warpspec.fmha.backward import call, launch
from warpspec.fmha.backward.problem import DIFFERENTIABLE
from warpspec.fmha.operands import Options

LONG = {"seq_q": 600, "seq_k": 600, "batch": 2, "heads_q": 4}
PACKED = {"lengths_q": (5, 0, 300), "lengths_k": (9, 3, 300), "heads_q": 4}
DIRECT = [
    Case("dense", heads_kv=2, causal=True),
    Case("cut", **LONG, head_dim=128),
    Case("deterministic", **LONG, causal=True, deterministic=True),
    Case("some", wanted=("q", "v"), kv_lengths=(20,), q_start=(3,), through="o+lse"),
    Case("keys-alone", **LONG, wanted=("k",), v_dim=128, head_dim=192),
    Case("one-tensor", seq_q=66, head_dim=512, shared_kv=True),
    Case("sink", sink=True, softcap=5.0),
    Case("sink-alone", sink=True, wanted=("sink",)),
    Case("bias-without-gradient", bias=(False, True), wanted=("q", "k", "v")),
    Case("packed", **PACKED, causal=True, through="o+lse"),
    Case("packed-runs", **PACKED, head_dim=128),
    Case("packed-sink", **PACKED, sink=True, wanted=("q", "v", "sink"), window=(7, 0)),
]
OTHERS = [
    Case("lse", through="lse"),
    Case("bias", bias=(False, True)),
    Case("sliced", sliced=True),
    Case("ranges", **PACKED, images=((2, 6),), causal=True),
    Case("no-keys", seq_k=0),
]


@pytest.fixture
def launched(monkeypatch, simulate_gradients_as) -> list:
    """Launches, each the kernel's name and its arguments, which do nothing else."""
    found = []
    monkeypatch.setattr(
        Kernel,
        "launcher",
        lambda kernel, *_, **__: lambda *arguments: found.append((kernel.name, arguments)),
    )
    monkeypatch.setattr(launch, "prepare", launch.prepare.__wrapped__)
    simulate_gradients_as("sm_90a")
    return found


def checked_call(case: Case, monkeypatch) -> tuple:
    """(what ``call.check`` returns, operands, do, dlse) of a case's backward pass."""
    seen, check = [], call.check

    def checking(operands, options, backend, wanted, do, dlse):
        seen.append((check(operands, options, backend, wanted, do, dlse), operands, do, dlse))
        return seen[-1][0]

    monkeypatch.setattr(call, "check", checking)
    case.gradients(case.tensors(), backend="reference")
    return seen[0]


@pytest.mark.parametrize("case", DIRECT, ids=lambda case: case.id)
def test_launches_take_what_others_do(case, launched, monkeypatch):
    checked, operands, do, dlse = checked_call(case, monkeypatch)
    assert checked.direct is not None
    found = launched.copy()
    launched.clear()
    call.run(checked._replace(direct=None), operands, do, dlse)
    inputs, stands_for = {id(t) for t in (*operands, do, dlse) if t is not None}, {}
    assert [name for name, _ in found] == [name for name, _ in launched]
    for (_, own), (_, expected) in zip(found, launched, strict=True):
        for a, b in zip(own, expected, strict=True):
            if not isinstance(b, torch.Tensor):
                assert a is None if b is None else a == b
            elif id(b) in inputs:
                assert a is b
            else:  # what each call has allocated
                assert stands_for.setdefault(id(b), id(a)) == id(a)
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    assert len(set(stands_for.values())) == len(stands_for)


def test_one_tensor_for_all_is_told_from_three(launched, monkeypatch):
    """What was found for a call whose q, k and v are the same tensor holds for others of its shape."""
    _, operands, do, _ = checked_call(Case("plain", heads_kv=2), monkeypatch)
    one, wanted = operands._replace(k=operands.q, v=operands.q), [name in "qkv" for name in DIFFERENTIABLE]
    checked = call.check(one, Options(), "auto", wanted, do, None)
    launched.clear()
    call.run(checked, operands, do, None)
    rows, main, *_ = (arguments for _, arguments in launched)
    assert rows[0] is operands.o and all(map(operator.is_, main[:3], operands[:3]))


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.id)
def test_what_has_more_to_do_is_not_direct(case, launched, monkeypatch):
    checked, *_ = checked_call(case, monkeypatch)
    assert checked.direct is None
