"""Packed batches on the reference: each request as ``attention`` of it alone, bad input, torch's view of the calls."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.varlen_cases import Packed, random_batch

from warpspec.fmha import AttentionState, attention, attention_varlen, merge, ops, reference
from warpspec.fmha.operands import INPUTS, Operands, Options
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.values import DEBUG_VARIABLE, request_rows

MIXED = Packed("mixed", seq_q=(70, 1, 0, 1, 5), seq_k=(70, 150, 40, 0, 90), causal=True)
PAGED = replace(MIXED, id="mixed-paged", page_size=16)


def run(batch: Packed, **changes):
    arguments = batch.arguments() | changes
    out = arguments.pop("out", batch.poisoned_out())
    return attention_varlen(**arguments, out=out, return_lse=batch.normalize, backend="reference")


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed):
    batch = random_batch(seed)
    batch.check(run(batch))


FEATURES = {
    "paged": {"page_size": 16},
    "causal": {"causal": True},
    "window": {"window": (20, 3)},
    "sink": {"sink": True},
    "state": {"normalize": False},
    "q_start": {"q_start": (3, 140, 0, -1, 60)},
    "splits": {"num_splits": 3},
    "shared_kv": {"shared_kv": True},
    "scale": {"scale": -0.2},
    "fp16": {"dtype": torch.float16},
    "key_stride": {"key_stride": 4},
    "sliced": {"layout": "sliced"},
    "interleaved": {"layout": "interleaved"},
    "prefix": {"prefix": 32},
    "poisoned": {"poisoned": (1, 4)},
    "hint": {"hint_q": 1, "hint_k": 10**6},
}
EXCLUDE = ({"sink", "state"}, {"window", "key_stride"}, {"sliced", "interleaved"}, {"prefix", "poisoned"})


@pytest.mark.parametrize("pair", [
    "+".join(pair) for pair in itertools.combinations(FEATURES, 2) if set(pair) not in EXCLUDE
])  # fmt: skip
def test_every_pair_of_features(pair):
    first, second = pair.split("+")
    batch = replace(MIXED, **{"causal": False, **FEATURES[first], **FEATURES[second]})
    batch.check(run(batch))


def test_one_request_is_the_rectangle():
    batch = Packed("one", (33,), (90,), causal=True, sink=True)
    arguments = batch.arguments()
    o, lse = run(batch)
    q, k, v = arguments["q"][None, :33], arguments["k"][None, :90], arguments["v"][None, :90]
    options = {"causal": True, "sink": arguments["sink"], "return_lse": True, "backend": "reference"}
    expected, expected_lse = attention(q, k, v, **options)
    assert torch.equal(o[:33], expected[0]) and torch.equal(lse[:, :33], expected_lse[0])


@pytest.mark.parametrize("batch", [MIXED, PAGED], ids=lambda batch: batch.id)
def test_hints_say_nothing_about_the_result(batch):
    expected = run(batch)
    for most_q, most_k in ((0, 0), (1, 1), (1000, 10**6), (70, None)):
        got = run(batch, max_seqlen_q=most_q, max_seqlen_k=most_k)
        assert all(a.equal(b) for a, b in zip(got, expected, strict=True) if a is not got[0])
        assert torch.equal(got[0].nan_to_num(9.0), expected[0].nan_to_num(9.0))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("layout", ["no keys packed", "no pages", "no slots", "no requests", "no rows"])
def test_nothing_to_compute(layout, normalize):
    q, k = torch.zeros(5, 4, 64).bfloat16(), torch.zeros(0, 2, 64).bfloat16()
    arguments = {"q": q, "k": k, "cu_seqlens_q": int32(0, 1, 3), "cu_seqlens_k": int32(0, 0, 0)}
    covered = 3
    if layout in ("no pages", "no slots"):
        pages, slots = (0, 3) if layout == "no pages" else (7, 0)
        table = torch.full((2, slots), -1, dtype=torch.int32)
        arguments |= {"k": torch.zeros(pages, 16, 2, 64).bfloat16(), "cu_seqlens_k": None}
        arguments |= {"page_table": table, "kv_lengths": int32(0, 0)}
    elif layout == "no requests":
        covered = 0
        arguments |= {
            "cu_seqlens_q": int32(0),
            "cu_seqlens_k": int32(0),
            "k": torch.zeros(9, 2, 64).bfloat16(),
        }
    elif layout == "no rows":
        covered = 0
        arguments |= {"q": q[:0], "cu_seqlens_q": int32(0, 0, 0)}
    out = torch.full(arguments["q"].shape, torch.nan, dtype=torch.bfloat16 if normalize else torch.float32)
    for backend in ("reference", "sim"):
        result = attention_varlen(
            **arguments,
            max_seqlen_q=2,
            normalize=normalize,
            return_lse=True,
            out=out.clone(),
            backend=backend,
        )
        o, lse = result if normalize else (result.o, result.lse)
        assert (o[:covered] == 0).all() and o[covered:].isnan().all()
        assert lse.shape == (4, len(o)) and (lse[:, :covered] == -torch.inf).all()


def test_states_of_two_key_sets_merge():
    whole = Packed("whole", (40, 1, 3), (64, 200, 0), sink=True)
    arguments = whole.arguments()
    sink = arguments.pop("sink")
    starts = arguments["cu_seqlens_k"]
    states = []
    for first in (True, False):
        middle = (starts[1:] + starts[:-1]) // 2
        pieces = [
            slice(a, m) if first else slice(m, b) for a, m, b in zip(starts, middle, starts[1:], strict=False)
        ]
        part = {name: torch.cat([arguments[name][piece] for piece in pieces]) for name in "kv"}
        lengths = [0, *itertools.accumulate(piece.stop - piece.start for piece in pieces)]
        part["cu_seqlens_k"] = int32(*map(int, lengths))
        states.append(attention_varlen(**{**arguments, **part, "normalize": False}, backend="reference"))
    assert all(isinstance(state, AttentionState) and state.o.dim() == 3 for state in states)
    o, lse = merge(states, sink)
    whole.check((o, lse), untouched=False)


@pytest.mark.parametrize("wrong", [(0, 2, 100, 5), (7, 3, 1, 2), (-5, 2, 4, -9), (0, 2**31 - 1, -(2**31), 3)])
def test_unchecked_starts_stay_within_the_tensors(wrong):
    rows = request_rows(int32(*wrong), 5)
    assert len(rows) == 3 and all(0 <= r.start <= r.stop <= 5 for r in rows)
    q, k = torch.zeros(5, 2, 64).bfloat16(), torch.zeros(5, 2, 64).bfloat16()
    operands = Operands(q, k, None, cu_seqlens_q=int32(*wrong), cu_seqlens_k=int32(*wrong))
    problem = AttentionProblem.of(
        q, k, cu_seqlens_q=int32(*wrong), cu_seqlens_k=int32(*wrong), max_seqlen_q=5, memory=False
    )
    state = reference.forward(problem, operands._replace(q=q[None], k=k[None], v=k[None]))
    assert state.o.shape == problem.o_shape == (1, 5, 2, 64) and state.o.isfinite().all()


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


def good():
    return {
        "q": half(9, 4, 64), "k": half(12, 2, 64), "v": half(12, 2, 64), "cu_seqlens_q": int32(0, 5, 8),
        "cu_seqlens_k": int32(0, 5, 12), "max_seqlen_q": 5,
    }  # fmt: skip


PAGES = {
    "k": half(9, 4, 2, 64), "v": half(9, 4, 2, 64), "cu_seqlens_k": None, "kv_lengths": int32(7, 3),
    "page_table": torch.tensor([[0, 8], [2, -1]], dtype=torch.int32),
}  # fmt: skip

# id: (changed arguments, error, argument that the message starts with, words of the message)
BAD = {
    "q-rank-4": ({"q": half(1, 9, 4, 64)}, ValueError, "q", r"3 dimensions \[rows, heads, head size\], got \[1, 9"),
    "k-rank-4": ({"k": half(1, 12, 2, 64)}, ValueError, "k", r"3 dimensions \[keys"),
    "pages-rank-3": ({**PAGES, "k": half(36, 2, 64)}, ValueError, "k", r"4 dimensions \[pages"),
    "v-shape": ({"v": half(11, 2, 64)}, ValueError, "v", r"\[12, 2, 64\], got \[11, 2, 64\]"),
    "k-dtype": ({"k": half(12, 2, 64).bfloat16()}, TypeError, "k", "float16.*bfloat16"),
    "k-device": ({"k": half(12, 2, 64).to("meta")}, ValueError, "k", "cpu.*meta"),
    "head-size": ({"q": half(9, 4, 264), "k": half(12, 2, 264), "v": half(12, 2, 264)}, ValueError, "q", "got 264"),
    "heads": ({"k": half(12, 3, 64), "v": half(12, 3, 64)}, ValueError, "k", "4, got 3"),
    "q-strided": ({"q": half(9, 4, 128)[..., ::2]}, ValueError, "q", "contiguous"),
    "cu_seqlens_q-none": ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q", "torch.Tensor, got None"),
    "cu_seqlens_q-list": ({"cu_seqlens_q": [0, 5, 8]}, TypeError, "cu_seqlens_q", "torch.Tensor"),
    "cu_seqlens_k-list": ({"cu_seqlens_k": [0, 5, 8]}, TypeError, "cu_seqlens_k", "torch.Tensor"),
    "cu_seqlens_q-int64": ({"cu_seqlens_q": int32(0, 5, 8).long()}, TypeError, "cu_seqlens_q", "int32.*int64"),
    "cu_seqlens_q-rank": ({"cu_seqlens_q": int32([0, 5, 8])}, ValueError, "cu_seqlens_q", r"\[B \+ 1\], got \[1, 3\]"),
    "cu_seqlens_q-empty": ({"cu_seqlens_q": int32()}, ValueError, "cu_seqlens_q", r"\[B \+ 1\], got \[0\]"),
    "cu_seqlens_q-device": ({"cu_seqlens_q": int32(0, 5, 8).to("meta")}, ValueError, "cu_seqlens_q", "cpu.*meta"),
    "cu_seqlens_k-shape": ({"cu_seqlens_k": int32(0, 5)}, ValueError, "cu_seqlens_k", r"\[B \+ 1 = 3\], got \[2\]"),
    "cu_seqlens_q-start": ({"cu_seqlens_q": int32(1, 5, 8)}, ValueError, "cu_seqlens_q", "at first, got 1 at index 0"),
    "cu_seqlens_q-descends": (
        {"cu_seqlens_q": int32(0, 8, 5)}, ValueError, "cu_seqlens_q", "ascending order, got 5 at index 2"),
    "cu_seqlens_q-past": (
        {"cu_seqlens_q": int32(0, 5, 10)}, ValueError, "cu_seqlens_q", r"0..9 \(q has 9 rows\), got 10 at index 2"),
    "cu_seqlens_k-past": ({"cu_seqlens_k": int32(0, 13, 13)}, ValueError, "cu_seqlens_k", r"k has 12 rows\), got 13"),
    "cu_seqlens_k-negative": ({"cu_seqlens_k": int32(0, -3, 4)}, ValueError, "cu_seqlens_k", "ascending.*got -3"),
    "no-keys": ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k", "page_table"),
    "both-keys": ({**PAGES, "cu_seqlens_k": int32(0, 5, 12)}, ValueError, "cu_seqlens_k", "None with a page_table"),
    "kv_lengths-packed": ({"kv_lengths": int32(3, 3)}, ValueError, "kv_lengths", "None with cu_seqlens_k"),
    "page_table-alone": ({**PAGES, "kv_lengths": None}, ValueError, "page_table", "needs kv_lengths"),
    "page_table-batch": ({**PAGES, "page_table": int32([0, 1])}, ValueError, "page_table", r"B=2.*\[1, 2\]"),
    "page_table-beyond": ({**PAGES, "kv_lengths": int32(7, 5)}, ValueError, "page_table", r"got -1 at index \[1, 1\]"),
    "kv_lengths-beyond": ({**PAGES, "kv_lengths": int32(7, 9)}, ValueError, "kv_lengths", r"0..8 \(Sk\), got 9"),
    "q_start-shape": ({"q_start": int32(0)}, ValueError, "q_start", r"B=2\], got \[1\]"),
    "max_seqlen_q-none": ({"max_seqlen_q": None}, TypeError, "max_seqlen_q", "int, got None"),
    "max_seqlen_q-tensor": ({"max_seqlen_q": torch.tensor(5)}, TypeError, "max_seqlen_q", "int"),
    "max_seqlen_q-negative": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q", "0..2147483647, got -1"),
    "max_seqlen_k-float": ({"max_seqlen_k": 5.0}, TypeError, "max_seqlen_k", "int"),
    "max_seqlen_k-negative": ({"max_seqlen_k": -2}, ValueError, "max_seqlen_k", "got -2"),
    "sink-shape": ({"sink": torch.zeros(2)}, ValueError, "sink", "Hq=4"),
    "sink-state": ({"sink": torch.zeros(4), "normalize": False}, ValueError, "sink", "merge"),
    "out-shape": ({"out": half(8, 4, 64)}, ValueError, "out", r"\[T, Hq, D\] = \[9, 4, 64\], got \[8, 4, 64\]"),
    "out-dtype": ({"out": half(9, 4, 64).float()}, TypeError, "out", "float16, got torch.float32"),
    "causal-int": ({"causal": 1}, TypeError, "causal", "bool"),
    "window-key_stride": ({"window": (3, 0), "key_stride": 4}, ValueError, "window", "key_stride 1"),
    "backend": ({"backend": "sm80"}, ValueError, "backend", "got 'sm80'"),
}  # fmt: skip


@pytest.mark.parametrize("changes, error, name, words", BAD.values(), ids=BAD.keys())
def test_raises_and_names_the_argument(changes, error, name, words, monkeypatch):
    def fail(*_):
        raise AssertionError("a backend ran")

    monkeypatch.setattr(reference, "forward", fail)
    out = torch.full(
        (9, 4, 64), 3.0, dtype=torch.float32 if changes.get("normalize") is False else torch.float16
    )
    for backend in ("reference", "sim"):
        with pytest.raises(error, match=rf"(?s)^{name}: .*{words}"):
            attention_varlen(**{"backend": backend, "out": out, **good(), **changes})
    assert (out == 3.0).all()


def test_good_arguments_pass():
    """So that each bad case fails for what it changes."""
    for changes in ({}, PAGES, {"max_seqlen_k": 0, "out": half(9, 4, 64)}, {"q_start": int32(-3, 5)}):
        attention_varlen(**{**good(), **changes}, backend="reference")


class TestTorch:
    def test_compiles_without_graph_breaks(self):
        arguments = replace(PAGED, sink=True).arguments()
        tensors = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor)}
        options = {name: value for name, value in arguments.items() if name not in tensors}

        def layer(q, **others):
            o, lse = attention_varlen(q * 2, **others, **options, return_lse=True, backend="reference")
            return o[:70] + 1, lse[:, :70]

        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for got, expected in zip(compiled(**tensors), layer(**tensors), strict=True):
            assert torch.equal(got, expected)

    def test_out_compiles_and_keeps_rows_of_no_request(self):
        arguments = MIXED.arguments()
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda q, out: attention_varlen(**{**arguments, "q": q}, out=out, return_lse=True, backend="reference"),
            fullgraph=True, backend="aot_eager",
        )  # fmt: skip
        out = MIXED.poisoned_out()
        o, lse = compiled(arguments["q"], out)
        assert o.data_ptr() == out.data_ptr()
        MIXED.check((out, lse))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_one_compilation_serves_any_number_of_rows(self, dtype):
        torch._dynamo.reset()
        counts = torch._dynamo.utils.counters["stats"]
        counts.clear()
        layer = torch.compile(
            lambda q, k, v, starts, most: attention_varlen(
                q, k, v, starts, cu_seqlens_k=starts, max_seqlen_q=most, causal=True, backend="reference"
            ),
            fullgraph=True, backend="aot_eager", dynamic=True,
        )  # fmt: skip
        for lengths in ((3, 4), (9, 2, 5), (1, 30)):
            batch = Packed("self", lengths, lengths, causal=True)
            arguments = batch.arguments()
            arguments |= {name: arguments[name].to(dtype) for name in "kv"}
            q, k, v, starts = (arguments[name] for name in ("q", "k", "v", "cu_seqlens_q"))
            o = layer(q, k, v, starts, max(lengths))
            expected = attention_varlen(**arguments, backend="reference")
            assert torch.equal(o[: sum(lengths)], expected[: sum(lengths)])
        assert counts["unique_graphs"] == 1

    def test_schemas_and_fake_implementations_are_right(self):
        arguments = replace(PAGED, seq_q=(4, 1, 0, 1, 5)).arguments()
        arguments["q"] = arguments["q"][:11].clone()  # every row is written, so that runs compare
        operands = Operands(**{name: arguments.get(name) for name in INPUTS})
        call = ops.flat(operands, Options.of(causal=True, return_lse=True, max_seqlen_q=4), "reference")
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.warpspec.fmha_forward, call, test_utils=checks)
        out = torch.zeros_like(arguments["q"])
        torch.library.opcheck(torch.ops.warpspec.fmha_forward_out, (*call, out), test_utils=checks)

    def test_gradients_with_out_are_refused(self):
        arguments = MIXED.arguments()
        arguments["q"].requires_grad_()
        with pytest.raises(NotImplementedError, match=r"^out: gradients"):
            attention_varlen(**arguments, out=MIXED.poisoned_out(), backend="reference")


def test_a_repeated_call_looks_at_values_again_only_in_debug_mode(monkeypatch):
    """CPU tensors stand for a GPU's, whose calls are remembered."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(ops, "_checked", type(ops._checked)())
    checked = []
    monkeypatch.setattr(
        ops, "check_call", lambda *call, check=ops.check_call: checked.append(call) or check(*call)
    )
    expected = run(MIXED)
    for _ in range(2):
        for a, b in zip(run(MIXED), expected, strict=True):
            assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
    assert len(checked) == 1
    run(MIXED, max_seqlen_k=9)
    run(PAGED)
    run(MIXED, cu_seqlens_q=int32(0, 70, 71, 71), cu_seqlens_k=int32(0, 70, 220, 260))
    assert len(checked) == 4
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: .*ascending"):
        run(MIXED, cu_seqlens_q=int32(0, 70, 3, 71, 71, 76))
