"""attention as a torch operator: torch.compile, fake tensors, gradients."""

import inspect

import pytest
import torch
from helpers.recorder import Recorder

import warpspec.fmha
from warpspec.fmha import AttentionState, DecodeSchedule, attention, attention_varlen, merge
from warpspec.fmha.operands import Operands, Options
from warpspec.fmha.ops import flat, unobserved

OPTIONS = {"causal": True, "window": (3, None), "backend": "reference"}


def inputs(seq_q=5, seq_k=7, batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (batch, seq_q, 4, 64), "k": (batch, seq_k, 2, 64), "v": (batch, seq_k, 2, 64)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("call", [attention, attention_varlen])
def test_each_argument_reaches_the_field_of_its_name(call, monkeypatch):
    """An argument that is handed on to no field, or to another one, would be ignored or misread."""
    seen = []
    monkeypatch.setattr(warpspec.fmha, "_call", lambda *handed: seen.extend(handed))
    names = inspect.signature(call).parameters.keys() - {"block_mask"}
    given = {name: torch.zeros(1) for name in names}
    if "schedule" in names:
        given["schedule"] = DecodeSchedule.__new__(DecodeSchedule)
        given["schedule"].cuts, given["schedule"].made_for = torch.zeros(1), "a call"
    call(**given)
    if "schedule" in names:
        given["cuts"], given["cut_for"] = given.pop("schedule").operand
    operands, options, _, backend = seen
    fields = {**operands._asdict(), **options._asdict(), **options.logits._asdict(), "backend": backend}
    fields["out"] = fields.pop("o")
    assert all(fields.pop(name) is value for name, value in given.items())
    assert fields.pop("logits") is options.logits and set(fields.values()) == {None}


def test_compiles_without_graph_breaks():
    sink, lengths = torch.randn(4), torch.tensor([7, 3], dtype=torch.int32)

    def layer(q, k, v, sink, lengths):
        o, lse = attention(q * 2, k, v, sink=sink, kv_lengths=lengths, return_lse=True, **OPTIONS)
        return o + 1, lse

    arguments = (*inputs().values(), sink, lengths)
    o, lse = compiled(layer)(*arguments)
    expected, expected_lse = layer(*arguments)
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse)


def test_one_compilation_serves_any_size():
    layer = compiled(lambda q, k, v: attention(q, k, v, **OPTIONS), dynamic=True)
    for sizes in ({}, {"seq_q": 3}, {"seq_k": 20, "batch": 3}):
        arguments = inputs(**sizes)
        assert torch.equal(layer(**arguments), attention(**arguments, **OPTIONS))


def test_state_and_merge_compile():
    def layer(q, k, v):
        halves = [
            attention(q, k[:, keys], v[:, keys], normalize=False, backend="reference")
            for keys in (slice(0, 3), slice(3, None))
        ]
        return merge(halves)

    arguments = inputs()
    o, lse = compiled(layer)(**arguments)
    expected, expected_lse = attention(**arguments, return_lse=True, backend="reference")
    torch.testing.assert_close(o, expected.float(), rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=2e-6)


def test_out_compiles_and_is_written_in_place():
    arguments = inputs()
    out = torch.full_like(arguments["q"], torch.nan)
    got, lse = compiled(lambda q, k, v, out: attention(q, k, v, out=out, return_lse=True, **OPTIONS))(
        **arguments, out=out
    )
    expected, expected_lse = attention(**arguments, return_lse=True, **OPTIONS)
    assert torch.equal(out, expected) and torch.equal(got, expected) and torch.equal(lse, expected_lse)
    assert got.data_ptr() == out.data_ptr()


def test_schemas_and_fake_implementations_are_right():
    arguments = list(inputs().values())
    options = Options.of(causal=True, window=(3, None), return_lse=True)
    call = flat(Operands(*arguments), options, "reference")
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.warpspec.fmha_forward, call, test_utils=checks)
    out = torch.empty_like(arguments[0])
    torch.library.opcheck(torch.ops.warpspec.fmha_forward_out, (*call, out), test_utils=checks)


def test_modes_see_the_operators():
    arguments = inputs()
    with Recorder() as seen:
        expected = attention(**arguments, **OPTIONS)
        attention(**arguments, **OPTIONS, out=torch.empty_like(expected))
    assert seen.names == ["fmha_forward", "fmha_forward_out"]
    assert torch.equal(attention(**arguments, **OPTIONS), expected)  # past the dispatcher


def test_a_write_to_out_counts_as_one():
    arguments = inputs()
    out = torch.empty_like(arguments["q"])
    before = out._version
    attention(**arguments, **OPTIONS, out=out)
    assert out._version > before
    with torch.inference_mode():
        attention(**arguments, **OPTIONS, out=torch.empty_like(out))  # has no version


def test_vmap_and_subclasses_do_not_pass_unseen():
    class Wrapped(torch.Tensor):
        pass

    q, k, v = inputs().values()
    assert unobserved(Operands(q, k, v))
    assert not unobserved(Operands(q.as_subclass(Wrapped), k, v))
    seen = []
    torch.vmap(lambda q: seen.append(unobserved(Operands(q, k, v))) or q)(q)
    assert seen == [False]


def test_fake_tensors_get_the_right_results_without_running():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        arguments = {name: mode.from_tensor(t) for name, t in inputs().items()}
        o, lse = attention(**arguments, return_lse=True)  # no backend chosen: nothing runs
        state = attention(**arguments, normalize=False)
        with pytest.raises(ValueError, match=r"^k: head size"):
            attention(arguments["q"], arguments["k"].repeat(1, 1, 1, 2))
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == (
        (2, 5, 4, 64),
        torch.bfloat16,
        (2, 4, 5),
        torch.float32,
    )
    assert isinstance(state, AttentionState)
    assert [part.dtype for part in state] == [torch.float32] * 3
    assert [part.shape for part in state] == [(2, 5, 4, 64), (2, 4, 5), (2, 4, 5)]


class TestGradients:
    def test_out_raises_at_once(self):
        arguments = inputs()
        out = torch.full_like(arguments["q"], 3.0)
        arguments["q"].requires_grad_()
        with pytest.raises(NotImplementedError, match=r"^out: gradients"):
            attention(**arguments, out=out, **OPTIONS)
        assert (out == 3.0).all()
        with torch.no_grad():
            assert attention(**arguments, out=out, **OPTIONS) is out
        assert not (out == 3.0).any()

    def test_no_grad_result_does_not_require_grad(self):
        arguments = inputs()
        arguments["q"].requires_grad_()
        with torch.no_grad():
            assert not attention(**arguments, **OPTIONS).requires_grad
