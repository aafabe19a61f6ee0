"""Attention's gradients: the definition against float64 autograd and finite differences; autograd's rules."""

from dataclasses import replace

import pytest
import torch
from helpers.gradient_cases import CASES, NAMES, REFERENCE_TOLERANCE, Case, definition

from warpspec.fmha import attention, attention_varlen, merge
from warpspec.fmha.backward import call as backward_call
from warpspec.fmha.operands import Operands, Options
from warpspec.fmha.ops import flat

EVERYTHING = Case(
    "everything", seq_q=9, seq_k=12, causal=True, sink=True, bias=(False, True), through="o+lse"
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_float64_autograd(case):
    case.judge(REFERENCE_TOLERANCE, backend="reference")


def test_finite_differences():
    """Along random directions: (f(x + h u) - f(x - h u)) / 2 h against the gradient's product with u."""
    case = replace(EVERYTHING, dtype=torch.float16)
    tensors = case.tensors()
    tensors["bias"] = torch.randn_like(tensors["bias"]).requires_grad_()  # without -inf
    gradients = case.gradients(tensors, backend="reference")
    seeds = [case.seed_of(t).double() for t in case.call(tensors, backend="reference")]
    leaves = {name: t.detach().double() for name, t in tensors.items()}

    def value(moved):
        args = moved["q"][0], moved["k"][0], moved["v"][0], moved["sink"], moved["bias"][0]
        o, lse = definition(case, *args, None)
        return (o * seeds[0][0]).sum() + (lse * seeds[1][0]).sum()

    for name, leaf in leaves.items():
        direction, h = torch.randn_like(leaf), 1e-5
        ends = [value({**leaves, name: leaf + sign * h * direction}) for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * h)
        gradient = gradients[name].double()
        typical = gradient.norm()  # of the product with a random direction
        assert abs((gradient * direction).sum() - slope) <= 6e-3 * typical


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("sink",), ("bias",), ("q", "bias"), ("k", "v")])
def test_only_what_is_asked_for_is_computed(wanted, monkeypatch):
    asked = []
    check = backward_call.BackwardProblem.check
    monkeypatch.setattr(
        backward_call.BackwardProblem,
        "check",
        lambda *a, **kw: asked.append(found := check(*a, **kw)) or found,
    )
    case = replace(EVERYTHING, wanted=wanted)
    tensors = case.tensors()
    found = case.gradients(tensors, backend="reference")
    assert set(found) == set(wanted)
    assert [problem.wanted for problem in asked] == [wanted]
    whole = replace(case, wanted=NAMES).gradients(replace(case, wanted=NAMES).tensors(), backend="reference")
    assert all(torch.equal(found[name], whole[name]) for name in wanted)


def test_compiled_training_step_and_checkpointing():
    case = replace(EVERYTHING, through="o")
    tensors = case.tensors()

    def step(q, k, v, sink, bias):
        return (
            attention(q * 2, k, v, sink=sink, bias=bias, causal=True, backend="reference")
            .float()
            .square()
            .sum()
        )

    expected = torch.autograd.grad(step(**tensors), list(tensors.values()))
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    again = torch.autograd.grad(compiled(**tensors), list(tensors.values()))
    kept = torch.utils.checkpoint.checkpoint(step, *tensors.values(), use_reentrant=False)
    recomputed = torch.autograd.grad(kept, list(tensors.values()))
    for a, b, c in zip(expected, again, recomputed, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_operator_is_registered_right():
    case = EVERYTHING
    tensors = {name: t.detach() for name, t in case.tensors().items()}
    o, lse = case.call(tensors, backend="reference")
    arguments = flat(Operands(**tensors), Options.of(causal=True, return_lse=True, softcap=2.0), "reference")
    call = (torch.randn_like(o), torch.randn_like(lse), o, lse, [True] * len(NAMES), *arguments)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.warpspec.fmha_backward, call, test_utils=checks)


class TestRefusals:
    def test_second_derivatives(self):
        case = Case("plain")
        tensors = case.tensors()
        o, _ = case.call(tensors, backend="reference")
        (first,) = torch.autograd.grad(o.sum(), tensors["q"], create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            first.sum().backward()

    def test_states_and_pages(self):
        tensors = Case("plain").tensors()
        o, _ = merge([attention(**tensors, normalize=False, backend="reference")])
        with pytest.raises(NotImplementedError, match=r"^normalize: gradients are not implemented"):
            o.sum().backward()
        pages = {
            "page_table": torch.tensor([[0]], dtype=torch.int32),
            "kv_lengths": torch.tensor([24], dtype=torch.int32),
        }
        with pytest.raises(NotImplementedError, match=r"^page_table: gradients are not implemented"):
            attention(**tensors, **pages, backend="reference").sum().backward()

    def test_out(self):
        tensors = Case("plain").tensors()
        with pytest.raises(NotImplementedError, match=r"^out: gradients"):
            attention(**tensors, out=torch.empty_like(tensors["q"]), backend="reference")


@pytest.mark.parametrize(("rows", "keys", "requests"), [(0, 6, 2), (0, 0, 2), (4, 0, 2), (0, 6, 0)])
def test_packed_batches_of_nothing(rows, keys, requests):
    """No rows or no keys at all: zeros, without a kernel."""
    q, k, v = (
        torch.zeros(n, heads, 64, dtype=torch.bfloat16, requires_grad=True)
        for n, heads in ((rows, 4), (keys, 2), (keys, 2))
    )
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    o = attention_varlen(q, k, v, starts, cu_seqlens_k=starts, max_seqlen_q=4, backend="sim")
    for gradient, tensor in zip(torch.autograd.grad(o.sum(), (q, k, v)), (q, k, v), strict=True):
        assert gradient.shape == tensor.shape and not gradient.any()
