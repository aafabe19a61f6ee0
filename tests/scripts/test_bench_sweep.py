"""bench_sweep.py without a GPU: the shapes it draws, their tensors, what it says of times, candidates that die."""

import json
import os
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import bench_sweep as sweep
import pytest
import torch
from shared import (
    gpu_bench,
    sweep_calls,
    sweep_compile,
    sweep_gradients,
    sweep_masks,
    sweep_report,
    sweep_timing,
)
from shared.sweep_draws import DECODING, MOST_DECODED, MOST_FLOPS, cliffs, counts, draw_shapes
from shared.sweep_report import OURS
from shared.sweep_shapes import GRADIENTS, KINDS, MOST_BYTES, AttentionShape, RowShape, from_json, to_json

from warpspec.aot.models import CALLS, PACKED, PAGED
from warpspec.common.launch import SIMULATED

H200 = replace(SIMULATED["sm_90a"], device=0)
SPEEDS = gpu_bench.Speeds(copy=4.25, matmul=687.0)  # as measured on an H200


def small(form, **fields):
    """Two requests."""
    queries, keys = ((3, 3), (40, 40)) if form not in PACKED else ((3, 5), (40, 7))
    page_size = 16 if form in PAGED else 0
    fields = {"heads_q": 4, "heads_kv": 2, "head_dim": 64} | fields
    sizes = {"queries": queries, "keys": keys, "page_size": page_size}
    return AttentionShape("prefill", "tiny", form=form, **(sizes | fields))


# Shapes.


def test_shapes_are_as_many_as_asked_for_different_and_repeatable():
    shapes = draw_shapes(128, 7)
    assert len(set(shapes)) == 128 and shapes == draw_shapes(128, 7)
    assert set(shapes).isdisjoint(draw_shapes(128, 8)[:20])
    for shape in shapes:
        assert shape.held_bytes <= MOST_BYTES and shape.flops <= MOST_FLOPS
    drawn = [shape.kind for shape in shapes]
    assert {kind: drawn.count(kind) for kind in KINDS} == counts(128)


def test_shapes_of_a_kind_do_not_depend_on_the_others():
    decoding = [shape for shape in draw_shapes(128, 7) if shape.kind == "decode"]
    assert draw_shapes(len(decoding), 7, ("decode",)) == decoding


def test_calls_of_few_queries_are_drawn_of_every_kind_that_has_them():
    shapes = draw_shapes(40, 3, DECODING, few_queries=True)
    assert {shape.kind for shape in shapes} == set(DECODING)
    assert max(max(shape.queries) for shape in shapes) == MOST_DECODED
    assert max(max(shape.queries) for shape in draw_shapes(40, 3, DECODING)) > MOST_DECODED


@pytest.mark.parametrize("total", [1, 8, 20, 119, 1000])
def test_counts_sum_up(total):
    found = counts(total)
    assert sum(found.values()) == total and (total < len(KINDS) or min(found.values()) > 0)


@pytest.mark.parametrize("length", [512, 700])
@pytest.mark.parametrize(
    "mask", [("documents", 200), ("equal", 300), ("sliding", 260), ("dilated", 2), ("blocks", 5)]
)
def test_visits_of_masks_are_those_of_their_lists(mask, length):
    """So that kernels compiled ahead are those that are timed."""
    assert sweep_masks.visits_of(mask, length) == sweep_calls.made_lists(mask, length, "cpu")[0].visited


def test_shapes_have_what_engines_send():
    shapes = draw_shapes(400, 3)
    attention = [shape for shape in shapes if isinstance(shape, AttentionShape)]
    assert {shape.form for shape in attention} == set(CALLS)
    assert {shape.page_size for shape in attention} == {0, 16, 32, 64, 128, 256}
    assert {shape.head_dim for shape in attention} >= {64, 128, 256, 512}
    assert any(shape.sink for shape in attention) and any(shape.window for shape in attention)
    random = [shape for shape in attention if shape.kind == "decode" and len(set(shape.keys)) > 1]
    assert random and max(shape.batch for shape in attention) > 150
    assert all(shape.queries[0] == 1 and max(shape.queries) > 1 for shape in shapes if shape.kind == "mixed")


def test_json_keeps_shapes():
    for shape in (*draw_shapes(40, 1), *cliffs()):
        assert from_json(json.loads(json.dumps(to_json(shape)))) == shape


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_work_is_that_of_the_visible_pairs(window):
    for queries, keys, causal in ((1, 9, True), (9, 9, True), (4, 9, True), (4, 9, False)):
        if window is not None and not causal:
            continue
        shape = small("plain", queries=(queries,) * 2, keys=(keys,) * 2, window=window, causal=causal)
        position = torch.arange(queries)[:, None] + keys - queries
        key = torch.arange(keys)[None]
        seen = (key <= position) | (not causal)
        if window is not None:
            seen &= key > position - window
        assert shape.flops == 4 * 2 * int(seen.sum()) * 4 * 64
        assert shape.visible_keys == (int(seen.any(0).sum()),) * 2
    q_and_o, k_and_v = 2 * 8 * 4 * 64 * 2, 2 * 47 * 2 * 64 * 2
    assert small("packed").bytes == q_and_o + k_and_v == small("packed").held_bytes


def test_bytes_of_rows():
    assert RowShape("softmax", 3, 100, "bfloat16").bytes == 2 * 600
    assert RowShape("top-k", 3, 100, "float32", k=5).bytes == 1200 + 3 * 5 * 8


# Calls.


def test_every_shape_is_a_call_that_our_kernels_run():
    for shape in (*draw_shapes(100, 11), *cliffs()):
        assert sweep_compile.calls_of(shape).our_kernels(shape, H200), shape.name


@pytest.mark.parametrize("more", [{}, {"causal": False}, {"form": "packed", "window": 3}, {"v_dim": 32}])
def test_gradients_are_those_of_the_call(more):
    """Ours by the reference, and a peer's where torch has one on a CPU, against float64 autograd of each request."""
    form = more.get("form", "plain")
    more = {name: value for name, value in more.items() if name != "form"}
    lengths = (6, 3) if form == "packed" else (6, 6)
    shape = replace(small(form, queries=lengths, keys=lengths, **more), kind=GRADIENTS)
    x = sweep_gradients.inputs(shape, "cpu", 1)
    x.sets, x.options["backend"] = [x], "reference"
    expected = []
    for q, k, v, do in zip(
        *(t.flatten(0, -3).split(shape.queries) for t in (x.q, x.k, x.v, x.do)), strict=True
    ):
        leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
        heads_first = [t.transpose(0, 1).repeat_interleave(4 // t.shape[1], 0) for t in leaves]
        seen = torch.ones(len(q), len(q), dtype=torch.bool).tril(0 if shape.causal else len(q))
        if shape.window:
            seen = seen.triu(1 - shape.window)
        o = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=seen)
        expected.append(torch.autograd.grad(o.transpose(0, 1), leaves, do.double()))
    found = [("ours", sweep_gradients.ours(shape))]
    if shape.form == "plain" and not shape.v_dim:
        found.append((sweep_calls.SDPA, sweep_gradients.peers(shape)[sweep_calls.SDPA]))
    for name, call in found:
        for gradient, wanted in zip(call(x), zip(*expected, strict=True), strict=True):
            wanted = torch.cat(wanted).view(gradient.shape)
            assert sweep_timing.difference((gradient, gradient), (wanted, wanted)) < 1e-2, name
            assert not sweep_timing.difference((gradient, gradient * torch.nan), (wanted, wanted)) < 1e-2


def test_work_of_gradients():
    shape = small("packed")
    of_gradients = replace(shape, kind=GRADIENTS)
    assert of_gradients.flops == 2.5 * shape.flops
    assert replace(of_gradients, v_dim=32).flops == of_gradients.flops * (3 * 64 + 2 * 32) // (5 * 64)
    assert of_gradients.bytes == 2 * shape.bytes and of_gradients.held_bytes == 2 * shape.held_bytes


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("more", [{}, {"window": 5, "sink": True}])
def test_inputs_make_the_call(form, more):
    """All forms of a shape are the same call: the reference gives what it gives for its tensors one by one."""
    shape = small(form, **more)
    x = sweep_calls.attention_inputs(shape, "cpu", 1)
    x.options["backend"] = "reference"
    out = sweep_calls.ours(shape)(x).reshape(-1, 4, 64)
    ends = sweep_calls.starts(shape.queries)
    q = x.q.reshape(-1, 4, 64)
    plain = small("plain", **more)
    for b, (queries, keys) in enumerate(zip(shape.queries, shape.keys, strict=True)):
        if shape.page_size:
            pages = x.options["page_table"][b, : -(-keys // 16)].long()
            k, v = (tensor[pages].reshape(-1, 2, 64)[:keys] for tensor in (x.k, x.v))
        else:
            first = sweep_calls.starts(shape.keys)[b]
            k, v = (tensor.reshape(-1, 2, 64)[first : first + keys] for tensor in (x.k, x.v))
        rows = slice(ends[b], ends[b] + queries)
        one = {"causal": True, "backend": "reference", "sink": x.options.get("sink")}
        one["window"] = x.options.get("window")
        alone = sweep_calls.ours(plain)(
            type(x)(q=q[rows][None], k=k[None].contiguous(), v=v[None].contiguous(), options=one)
        )
        torch.testing.assert_close(out[rows], alone[0], rtol=2e-2, atol=2e-2)
    if shape.page_size:
        used = [x.options["page_table"][b, : -(-keys // 16)] for b, keys in enumerate(shape.keys)]
        assert sorted(torch.cat(used).tolist()) == list(range(len(x.k)))


def test_further_models_are_calls_with_peers(monkeypatch):
    """V of its own size, a part of K, D 512, a soft cap, a mask in lists: peers of a CPU compute what the reference
    does, and work counts both head sizes."""
    monkeypatch.setattr(sweep_calls, "FLASH_MOST_DIM", 0)  # SDPA chooses its backend
    equal = {"queries": (200,) * 2, "keys": (200,) * 2}
    cases = {
        "V": small("plain", **equal, head_dim=192, v_dim=128),
        "latent": small(
            "plain", queries=(1, 1), heads_kv=1, head_dim=576, v_dim=512, shared_kv=True, causal=False
        ),
        "512": small("plain", **equal, head_dim=512),
        "cap": small("plain", **equal, softcap=5.0),
        "lists": small("plain", **equal, causal=False, mask=("equal", 60)),
    }
    for name, shape in cases.items():
        assert from_json(json.loads(json.dumps(to_json(shape)))) == shape
        x = sweep_calls.attention_inputs(shape, "cpu", 1)
        x.options["backend"] = "reference"
        found, peers = sweep_calls.ours(shape)(x), sweep_calls.peers(shape)
        if name == "lists":  # FlexAttention compiles on a GPU; its lists are eager torch's
            seen = torch.arange(200)[:, None] // 60 == torch.arange(200) // 60
            dense = {"attn_mask": seen.tril()}
            expected = sweep_calls.sdpa(x.q, x.k, x.v, **dense)
            assert set(peers) <= {sweep_calls.FLASH, sweep_calls.FLEX}
        elif name == "cap":
            assert sweep_calls.SDPA not in peers
            continue
        else:
            expected = peers[sweep_calls.SDPA](x)
        assert sweep_timing.difference(found, expected) < 1e-2, name
    shape = cases["V"]
    assert shape.flops == 2 * 2 * (200 * 201 // 2) * 4 * (192 + 128)
    assert shape.bytes == 2 * 200 * (4 + 2) * (192 + 128) * 2
    assert cases["latent"].kv_bytes == 576 * 2


def test_peers_of_rows_compute_what_we_do(monkeypatch):
    monkeypatch.setenv("WARPSPEC_BACKEND", "reference")
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    for shape in (
        RowShape("softmax", 5, 96, "float32"),
        RowShape("top-k", 5, 96, "float32", k=7),
        RowShape("top-k", 5, 96, "float32", k=7, renormalize=True),
    ):
        torch.testing.assert_close(sweep_calls.peers(shape)["torch"](x), sweep_calls.ours(shape)(x))


def test_dense_shapes_have_the_peers_that_take_them():
    plain = small("plain", queries=(8, 8), keys=(8, 8))
    assert {sweep_calls.CUDNN, sweep_calls.SDPA} <= set(sweep_calls.peers(plain))
    assert sweep_calls.CUDNN not in sweep_calls.peers(small("plain"))  # is_causal aligns the first positions
    for shape in (small("plain", sink=True), small("plain", window=4), small("paged")):
        assert not {sweep_calls.CUDNN, sweep_calls.SDPA} & set(sweep_calls.peers(shape))


# What is said of times.


def result(times, kind="decode", megabytes=1.0, flops=0, **more):
    found = {"kind": kind, "name": f"{kind} {times}", "bytes": megabytes * 1e6, "flops": flops}
    found |= {"bytes_us": megabytes / SPEEDS.copy, "flops_us": flops / SPEEDS.matmul * 1e-6}
    return found | {"times": times, "errors": dict.fromkeys(times, 1e-3), "missing": {}} | more


def test_ratios_and_shares():
    two = result({OURS: 10.0, "a": 12.0, "b": 9.0}, megabytes=4.25 * 90)
    assert sweep_report.best_peer(two) == "b" and sweep_report.ratio(two) == pytest.approx(0.9)
    assert sweep_report.share(two) == pytest.approx(9.0)
    assert sweep_report.share(result({OURS: 10.0})) is None  # too small
    assert sweep_report.long_share(two) is None  # it takes 10 us
    products = result({OURS: 2000.0}, megabytes=200, flops=1e12)
    assert sweep_report.binding(products) == "products" and sweep_report.binding(two) == "bytes"
    assert (
        sweep_report.long_share(products) == sweep_report.share(products) == pytest.approx(1e6 / 687 / 2000)
    )
    alone, failed = result({OURS: 10.0}, errors={}), result({}, errors={})
    assert sweep_report.ratio(alone) is None and sweep_report.ratio(failed) is None
    assert sweep_report.share(failed | {"bytes": 1e9}) is None
    other, shape = gpu_bench.Speeds(copy=3.03, matmul=500.0), cliffs()[0]  # another GPU
    for speeds in (SPEEDS, other):
        found = sweep_report.result_of(shape, speeds)
        assert found["bytes_us"] == pytest.approx(shape.bytes / (speeds.copy * 1e12) * 1e6)
        assert found["flops_us"] == pytest.approx(shape.flops / (speeds.matmul * 1e12) * 1e6)
    assert sweep_report.suspicious(alone | {"errors": {"a": 1.0}}) and not sweep_report.suspicious(alone)
    assert not sweep_report.suspicious(alone | {"errors": {"plan": 1e-3}, "plans": {"plan": 2.0}})
    assert sweep_report.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    assert sweep_report.geometric_mean([]) is None


def test_the_report_names_the_worst():
    fast = [result({OURS: 10.0, "a": 20.0 + i}, kind="prefill") for i in range(15)]
    slow = result({OURS: 10.0, "a": 9.0})
    large = result({OURS: 1000.0, "a": 1500.0}, megabytes=425)
    failed = result({}, missing={OURS: "ValueError: no"}, errors={})
    text = sweep_report.report([*fast, slow, large, failed])
    worst = text[text.index("worst ratios") : text.index("worst shares")].splitlines()
    assert slow["name"] in worst[2] and len(worst) - 3 == sweep_report.WORST  # title, columns; an empty line
    assert fast[-1]["name"] not in "\n".join(worst)
    assert "ValueError: no" in text
    assert "1 of 17 shapes below 0.97" in text and "1 of 1 calls over 100 MB and 60 us below 90%" in text
    kinds = sweep_report.kinds_table([*fast, slow])
    lines = {line.split()[0]: line.split() for line in kinds.splitlines()[1:]}
    assert lines["decode"][1:6] == ["1", "1", "0.900", "0.900", "1"] and lines["prefill"][5] == "0"
    shares = sweep_report.shares_table([large, result({OURS: 50.0}, megabytes=170), slow])
    assert " ".join(shares.splitlines()[1].split()) == "decode bytes 2 45% 10% 2 1 10% 10% 1"
    assert sweep_report.shares_table([slow]) is None
    assert sweep_report.report([failed])  # nothing to compare


# The processes.


class Pool:
    """Like an executor that never runs anything."""

    def __init__(self):
        self.jobs = []

    def submit(self, *job):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and os.environ["CUTE_DSL_ARCH"] == "sm_90a"
        self.jobs.append(job)
        return Future()


def test_a_kernel_is_compiled_once_for_all_shapes_that_need_it(monkeypatch):
    monkeypatch.setattr(sweep_calls, "find_spec", lambda name: True)  # as if peers were installed
    monkeypatch.setenv("CUTE_DSL_ARCH", "before")
    shapes, pool = draw_shapes(60, 5), Pool()
    waits = sweep_compile.start_compiling(pool, dict.fromkeys(shapes, 0), H200)
    assert os.environ["CUTE_DSL_ARCH"] == "before"
    ours = [job[1:3] for job in pool.jobs if job[0] is sweep_compile.compile_ahead]
    wanted = {shape: set(sweep_compile.calls_of(shape).our_kernels(shape, H200)) for shape in shapes}
    assert set(ours) == set().union(*wanted.values())
    assert len(set(ours)) == len(ours)
    peers = [shape for job in pool.jobs if job[0] is sweep_compile.compile_peers for shape in job[1]]
    assert len(set(peers)) == len(peers) and set(peers) <= set(shapes)
    for shape in shapes:
        assert len(waits[shape].needed) == len(wanted[shape]) + (shape in peers)


def test_compiling_ahead_says_what_is_not_ready(monkeypatch, capsys):
    """One shape whose kernel does not compile, one that is never compiled, one that needs nothing, one whose other
    plan is never compiled."""
    shapes = draw_shapes(20, 5)[:4]
    failed, waiting = Future(), Future()
    failed.set_exception(RuntimeError("no such kernel"))
    waits = [([failed], []), ([waiting], []), ([], []), ([], [waiting])]
    waits = {shape: sweep_compile.Waits(*found) for shape, found in zip(shapes, waits, strict=True)}
    monkeypatch.setattr(sweep_compile, "start_compiling", lambda *_: waits)
    ready = sweep_compile.compile_only(dict.fromkeys(shapes, 2), H200, workers=1, seconds=0.2)
    assert ready == {shapes[2]: 2, shapes[3]: 0}
    printed = capsys.readouterr().out
    assert f"FAILED for {shapes[0].name}: RuntimeError: no such kernel" in printed
    assert "2 of 4 shapes are compiled" in printed


def dies_at_a_peer(connection):
    """Like ``sweep_timing.serve``, with candidates that end the process or hang."""
    connection.send(("ready", None))
    while True:
        fields, missing, speeds, _ = connection.recv()
        assert speeds == SPEEDS
        if missing is None:
            os._exit(3)
        for name in (OURS, "ends", "hangs", "works"):
            connection.send(("at", name))
            if name == "ends" and name not in missing:
                os._exit(3)
            if name == "hangs" and name not in missing:
                time.sleep(60)
        connection.send(("result", {"missing": missing, "shape": fields}))


def ends_at_once(connection):
    os._exit(3)


def test_a_candidate_that_dies_or_hangs_is_left_out(monkeypatch):
    monkeypatch.setattr(sweep_timing, "SHAPE_SECONDS", 0.5)
    timer, shape = sweep_timing.Timer(SPEEDS, dies_at_a_peer, "fork"), cliffs()[0]
    try:
        timer.prepare(shape)
        found = timer.time(shape)
    finally:
        timer.stop()
    assert from_json(found["shape"]) == shape
    assert found["missing"] == {"ends": "ended the process", "hangs": "nothing for 0 s"}


def test_a_process_that_never_starts_costs_the_shape():
    found = sweep_timing.Timer(SPEEDS, ends_at_once, "fork").time(cliffs()[0])
    assert found["missing"] == {OURS: "ended the process"} and not found["times"]


def test_results_are_kept_one_by_one(monkeypatch):
    """Without workers nothing is waited for, and each shape is timed with its number of other plans."""
    shapes, asked, kept = draw_shapes(30, 5)[:3], [], []

    class Told:
        def __init__(self, speeds):
            assert speeds == SPEEDS

        def time(self, shape, plans):
            asked.append((shape, plans))
            return sweep_report.result_of(shape, SPEEDS)

        def stop(self):
            pass

    monkeypatch.setattr(sweep, "Timer", Told)
    monkeypatch.setattr(sweep, "target_of", lambda device: H200)
    wanted = dict(zip(shapes, (2, 0, 1), strict=True))
    found = sweep.sweep(wanted, SPEEDS, workers=0, seconds=60, keep=kept.append)
    assert dict(asked) == wanted and [from_json(one["shape"]) for one in found] == shapes
    assert [len(one) for one in kept] == [1, 2, 3] and kept[-1] == found


def test_flex_attention_is_compiled_while_kernels_are(monkeypatch):
    """In the process that times, for shapes that flash-attn-4 does not take, and never instead of timing."""
    masks = [(64, ("equal", 9)), (64, ("documents", 9)), (256, ("equal", 9))]
    own = {"queries": (200,) * 2, "keys": (200,) * 2, "causal": False}
    shapes = [replace(small("plain", **own), kind="lists", head_dim=d, mask=mask) for d, mask in masks]
    assert [sweep_calls.is_prepared(shape) for shape in shapes] == [False, True, True]
    monkeypatch.setattr(sweep_calls, "find_spec", lambda name: name)
    assert [sweep_calls.peer_kernel(shape) is None for shape in shapes] == [False, True, True]
    assert not sweep_calls.is_prepared(small("plain")) and not sweep_calls.is_prepared(draw_shapes(30, 5)[-1])
    done, asked = Future(), []
    waits = {shape: sweep_compile.Waits([done] if at else [], []) for at, shape in enumerate(shapes)}

    class Told:
        def __init__(self, speeds):
            pass

        def prepare(self, shape):
            asked.append(("prepared", shape))
            done.set_result(None)

        def time(self, shape, plans):
            asked.append(("timed", shape))
            return sweep_report.result_of(shape, SPEEDS)

        def stop(self):
            pass

    monkeypatch.setattr(sweep, "Timer", Told)
    monkeypatch.setattr(sweep, "target_of", lambda device: H200)
    monkeypatch.setattr(
        sweep, "ProcessPoolExecutor", lambda *_, **__: SimpleNamespace(shutdown=lambda **_: 0)
    )
    monkeypatch.setattr(sweep, "start_compiling", lambda *_: waits)
    sweep.sweep(dict.fromkeys(shapes, 0), SPEEDS, workers=1, seconds=60, keep=lambda found: None)
    assert asked == [
        ("timed", shapes[0]),
        ("prepared", shapes[1]),
        ("timed", shapes[1]),
        ("timed", shapes[2]),
    ]


def test_shapes_of_the_options(tmp_path):
    def shapes(*arguments):
        return list(sweep.shapes_of(sweep.parser().parse_args(arguments)))

    assert len(shapes()) >= 120 and len(shapes("--quick")) == sweep.QUICK
    assert {shape.kind for shape in shapes("--only", "mixed", "softmax")} == {"mixed", "softmax"}
    wanted = shapes("--cliffs")
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"results": [sweep_report.result_of(shape, SPEEDS) for shape in wanted]}))
    assert shapes("--cases", str(file)) == wanted == cliffs()
    file.write_text(json.dumps([to_json(wanted[0])]))
    assert shapes("--cases", str(file)) == wanted[:1]
    turns = list(sweep.interleaved(dict.fromkeys(wanted, 0)))
    assert sorted(map(hash, turns)) == sorted(map(hash, wanted)) and turns[0].kind != turns[1].kind


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench_sweep.py"])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        sweep.main()
    monkeypatch.setattr("sys.argv", ["bench_sweep.py", "--compile-ahead", "H300"])
    with pytest.raises(SystemExit, match="H300: the models are H200, H100"):
        sweep.main()
    monkeypatch.setattr("sys.argv", ["bench_sweep.py", "--list", "--quick"])
    sweep.main()
    assert len(capsys.readouterr().out.splitlines()) == sweep.QUICK
