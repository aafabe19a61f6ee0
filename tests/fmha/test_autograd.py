"""What autograd records of attention: a Function where nobody watches, torch's operators where somebody does."""

from dataclasses import replace

import pytest
import torch
from helpers.gradient_cases import Case
from helpers.recorder import Recorder
from torch.utils.checkpoint import checkpoint

from warpspec.common import repeated
from warpspec.common.backend import BACKEND_VARIABLE
from warpspec.fmha import attention, ops
from warpspec.fmha.backward import call as backward_call
from warpspec.fmha.backward import ops as backward_ops
from warpspec.fmha.values import DEBUG_VARIABLE

EVERYTHING = Case(
    "everything", seq_q=9, seq_k=12, causal=True, sink=True, bias=(False, True), through="o+lse"
)
PACKED = Case("packed", lengths_q=(5, 0, 4), lengths_k=(9, 3, 4), causal=True, sink=True, through="o+lse")


def same(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


@pytest.mark.parametrize("case", [EVERYTHING, PACKED], ids=lambda case: case.id)
def test_operators_and_function_are_the_same(case):
    tensors = case.tensors()
    with Recorder() as seen:
        through = case.gradients(tensors, backend="reference")
    assert seen.names == ["fmha_forward", "fmha_backward"]
    found = case.gradients(tensors, backend="reference")
    if case.packed:  # rows of no request hold anything
        found, through = ({n: t[:-2] for n, t in grads.items()} for grads in (found, through))
    assert same(found, through)


def test_a_mode_that_comes_with_backward_sees_its_operator():
    tensors = EVERYTHING.tensors()
    o, _ = EVERYTHING.call(tensors, backend="reference")
    expected = torch.autograd.grad(o.sum(), tensors["q"], retain_graph=True)
    with Recorder() as seen:
        found = torch.autograd.grad(o.sum(), tensors["q"])
    assert seen.names == ["fmha_backward"] and torch.equal(*expected, *found)


def test_lse_is_a_result_of_its_own():
    """Changing o or lse in place is noticed where backward needs it, and allowed where it does not."""
    tensors = Case("plain").tensors()
    for which in (0, 1):
        results = attention(**tensors, return_lse=True, backend="reference")
        results[which].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            results[which].sum().backward()
    with torch.no_grad():
        _, lse = attention(**tensors, return_lse=True, backend="reference")
    lse += 1
    assert lse._base is None


def test_a_graph_is_walked_twice_only_if_kept():
    tensors = Case("plain").tensors()
    loss = attention(**tensors, backend="reference").float().square().sum()
    first = torch.autograd.grad(loss, tensors["k"], retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(loss, tensors["k"]))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, tensors["k"])


def strided(tensor):
    """Copy a tensor into every other head of a larger one."""
    if tensor.dim() < 4:
        return tensor.clone()
    return torch.cat([tensor, torch.full_like(tensor, torch.nan)], dim=2)[:, :, : tensor.shape[2]]


@pytest.mark.parametrize("unpack", [torch.clone, strided])
def test_hooks_of_saved_tensors(unpack):
    case = replace(EVERYTHING, bias=None)
    tensors = case.tensors()
    expected = case.gradients(tensors, backend="reference")
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.detach(), unpack):
        assert same(case.gradients(tensors, backend="reference"), expected)
    assert len(packed) == 6  # q, k, v, sink, o, lse


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    tensors = Case("plain", causal=True).tensors()

    def step(q, k, v):
        return attention(q, k, v, causal=True, backend="reference").float().square().sum()

    expected = torch.autograd.grad(step(**tensors), list(tensors.values()))
    checkpoint(step, *tensors.values(), use_reentrant=reentrant).backward()
    assert all(torch.equal(t.grad, e) for t, e in zip(tensors.values(), expected, strict=True))


def test_second_derivatives_are_refused_where_they_are_asked_for():
    tensors = Case("plain").tensors()
    loss = attention(**tensors, backend="reference").float().square().sum()
    expected = torch.autograd.grad(loss, tensors["q"], retain_graph=True)
    (first,) = torch.autograd.grad(loss, tensors["q"], create_graph=True)
    assert first.requires_grad and torch.equal(*expected, first)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        first.sum().backward()


def test_tensors_without_memory():
    """Fake and meta ones, and batches of gradients, for which there is no rule."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = Case("plain", heads_q=4, heads_kv=2).tensors()
    plain = {name: t.detach() for name, t in tensors.items()}
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(t).requires_grad_() for name, t in plain.items()}
        loss = attention(**fakes).sum()
    found = [torch.autograd.grad(loss, list(fakes.values()))]
    metas = {name: t.to("meta").requires_grad_() for name, t in plain.items()}
    found.append(torch.autograd.grad(attention(**metas).sum(), list(metas.values())))
    for gradients in found:
        assert [g.shape for g in gradients] == [t.shape for t in tensors.values()]
    with torch.no_grad():
        assert attention(**metas).is_meta
    o = attention(**tensors, backend="reference")
    with pytest.raises(RuntimeError, match="Batching rule not implemented for warpspec::fmha_backward"):
        torch.autograd.grad(o, tensors["q"], torch.stack([o, o]).detach(), is_grads_batched=True)


@pytest.fixture
def checks(monkeypatch):
    """A list that grows by one with every backward call that is checked; CPU tensors say they were CUDA ones, which is
    what decides whether a call is remembered."""
    made, check = [], backward_call.check
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(ops, "_checked", repeated.Remembered())
    monkeypatch.setattr(backward_ops, "_checked", repeated.Remembered())
    monkeypatch.setattr(
        backward_call, "check", lambda *arguments: made.append(arguments) or check(*arguments)
    )
    monkeypatch.setenv(BACKEND_VARIABLE, "reference")
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    return made


class TestRemembered:
    def test_a_call_alike_is_not_checked_and_sees_other_values(self, checks):
        for seed in range(3):
            tensors = EVERYTHING.tensors(seed=seed)
            tensors = {
                name: t.detach().nan_to_num(neginf=-2.0).requires_grad_() for name, t in tensors.items()
            }
            found = EVERYTHING.gradients(tensors)
            assert same(found, EVERYTHING.gradients(tensors, backend="reference"))
        assert len(checks) == 2  # one for each backend that was asked for

    def test_what_differs_is_checked(self, checks, monkeypatch):
        tensors = Case("plain", through="o+lse").tensors()
        o, lse = attention(**tensors, return_lse=True)
        do, every = torch.randn_like(o), list(tensors.values())
        wider = torch.cat([do, do], dim=-1)[..., : do.shape[-1]]
        moved = torch.empty(do.numel() + 4, dtype=do.dtype)[4:].view(do.shape).copy_(do)

        def gradients(results, inputs, seeds):
            return torch.autograd.grad(results, inputs, seeds, retain_graph=True)

        expected = gradients([o], every, [do])
        for seed in (do, do.clone(), wider, wider.clone(), moved, torch.randn_like(o)):
            found = gradients([o], every, [seed])
            assert torch.equal(seed, do) == all(map(torch.equal, found, expected))
        assert len(checks) == 3  # contiguous, of other strides, of another alignment
        gradients([lse], every, [torch.ones_like(lse)])
        gradients([o, lse], every, [do, torch.ones_like(lse)])
        assert len(checks) == 5
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        gradients([o], every, [do])
        assert len(checks) == 6
        monkeypatch.setenv(BACKEND_VARIABLE, "nonsense")
        with pytest.raises(ValueError, match=f"^{BACKEND_VARIABLE}"):
            gradients([o], every, [do])

    def test_calls_with_and_without_gradients_are_told_apart(self, checks):
        tensors = Case("plain").tensors()
        for _ in range(2):
            assert attention(**tensors).requires_grad
            with torch.no_grad():
                assert not attention(**tensors).requires_grad
            assert not attention(**{name: t.detach() for name, t in tensors.items()}).requires_grad
        calls = list(ops._checked.values())
        assert [call.recorded for call in calls] == [True, False]
        assert [len(call.results) for call in calls] == [2, 1]  # o, and lse

    def test_operators_remember_calls_of_their_own(self, checks, monkeypatch):
        """With lse asked for, the operator's call and the Function's differ in nothing but who autograd records."""
        forward, check = [], ops.check_call
        monkeypatch.setattr(ops, "check_call", lambda *call: forward.append(call) or check(*call))
        case = replace(EVERYTHING, bias=None)
        for seed in range(3):
            tensors = case.tensors(seed=seed)
            expected = case.gradients(tensors, backend="reference")
            with Recorder():
                assert same(case.gradients(tensors), expected)
            assert same(case.gradients(tensors), expected)
        assert len(forward) == len(checks) == 3  # by backend "reference", the operators and the Function
        del expected["k"]
        with Recorder():
            assert same(case.gradients(tensors | {"k": tensors["k"].detach()}), expected)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        with Recorder():
            case.gradients(tensors)
        assert len(checks) == 5  # other gradients are wanted; they are to be deterministic

    def test_what_failed_fails_again(self, checks):
        tensors = Case("plain").tensors()
        for _ in range(2):
            o, _, _ = attention(**tensors, normalize=False)
            with pytest.raises(NotImplementedError, match=r"^normalize"):
                o.sum().backward()
        assert len(checks) == 2
