"""bench_mla.py without a GPU: the calls it draws, their ways and tensors, what it says of times."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import bench_mla
import pytest
import torch
from shared import mla_calls, mla_draws, mla_report
from shared.mla_draws import ROWS, MlaCall, draw_calls, from_json, said, to_json

from warpspec.common.launch import SIMULATED
from warpspec.fmha import launch as attention_launch
from warpspec.latent.gathered import launch as gathered_launch

H200 = replace(SIMULATED["sm_90a"], device=0)


@pytest.mark.parametrize("rows", ROWS)
def test_calls_are_different_repeatable_and_within_bounds(rows):
    calls = draw_calls(200, 7, rows)
    assert len(set(calls)) == 200 and draw_calls(50, 7, rows) == calls[:50]
    assert set(calls).isdisjoint(draw_calls(50, 8, rows))
    assert {call.heads for call in calls} == {8, 16, 32, 64, 128}
    assert {call.queries for call in calls} == {1, 2, 3, 4}
    assert max(call.batch for call in calls) > 100 and min(call.batch for call in calls) == 1
    assert (
        min(min(call.keys) for call in calls) >= 1 and 16384 < max(max(call.keys) for call in calls) <= 32768
    )
    assert all(call.pages <= mla_draws.MOST_PAGES for call in calls)
    unequal = sum(len(set(call.keys)) > 1 for call in calls)
    assert 60 < unequal < 160
    assert all(from_json(json.loads(json.dumps(to_json(call)))) == call for call in calls)


def test_calls_that_are_said():
    (call,) = said(["B5 q2 k3..900 16/1"], 1, "bf16")
    assert (call.batch, call.queries, call.heads) == (5, 2, 16) and call.name == "B5 q2 k3..900 16/1"
    assert {3, 900} <= set(call.keys)
    for rows, lines in mla_draws.NAMED.items():
        assert [call.name for call in said(["named"], 3, rows)] == list(lines)
    for wrong in (
        "B5 q2 k3 16",
        "B5 q4 k3 16/1",
        "B0 q1 k3 16/1",
        "B1 q1 k9..3 8/1",
        "B1 q1 k9 256/1",
        "B160 q1 k99999 8/1",
    ):
        with pytest.raises(ValueError, match=wrong.split()[0]):
            list(said([wrong], 1, "bf16"))


def test_rows_that_a_call_reads():
    assert MlaCall("v3.2", 64, 3, (3, 5000)).lists == (1, 2, 3, 2048, 2048, 2048)
    assert MlaCall("v3.2", 64, 2, (2049,)).bytes == 2 * 2048 * 656 + 2 * 2 * 64 * (576 + 512)
    assert MlaCall("bf16", 8, 1, (65, 1)).pages == 3 and MlaCall("e4m3", 8, 1, (65, 1)).read_keys == 66


@pytest.mark.parametrize("rows", ROWS)
def test_the_chosen_way_is_the_plan_of_the_call(rows):
    kinds = set()
    for call in draw_calls(20, 3, rows):
        every, few = (mla_calls.ways(call, H200, wanted) for wanted in (["all"], ["line", "whole", "split"]))
        chosen = next(iter(every.values()))
        if rows == "bf16":
            expected = attention_launch.plan(mla_calls.attention_problem(call), H200)
        else:
            expected = gathered_launch.make_plan(mla_calls.gathered_problem(call), H200)
        assert chosen.plan == expected and next(iter(few.values())) == chosen
        assert set(few) <= set(every) and mla_calls.ways(call, H200, ["auto"]) == {chosen.name: chosen}
        assert len({way.kind for way in few.values()}) == len(few)
        assert len({way.plan for way in every.values()}) == len(every)
        assert mla_calls.kernels(call, H200, every.values())
        kinds |= {way.kind for way in every.values()}
    assert kinds == set(mla_calls.WAYS)


@pytest.fixture
def on_cpu(monkeypatch):
    for name, value in (("DEVICE", "cpu"), ("MOST_PAGES", 12), ("V32_PAGES", 8)):
        monkeypatch.setattr(mla_calls, name, value)
    mla_calls.cache_of.cache_clear()
    yield
    mla_calls.cache_of.cache_clear()


@pytest.mark.parametrize("rows", ROWS)
def test_inputs_are_those_of_the_call(rows, on_cpu):
    call = MlaCall(rows, 4, 2, (130, 2, 65))
    if rows == "v3.2":
        x = mla_calls.listed(call, None, 0)
        assert (x.key_set.slots >= 0).sum(1).tolist() == list(call.lists) == x.key_set.lengths.tolist()
    else:
        order = torch.randperm(12).int()
        x, other = (mla_calls.paged(call, order, number) for number in (0, 1))
        tables = torch.cat([x.table, other.table])
        taken = [*tables[[0, 3]].flatten(), *tables[[1, 4], 0], *tables[[2, 5], :2].flatten()]
        assert sorted(map(int, taken)) == list(range(12))  # no page has two places
        assert x.lengths.tolist() == [130, 2, 65]
    o = mla_calls.ours(call, backend="reference")(x)
    assert mla_calls.reference_error(call, x, o) < 1e-6
    o[..., -1, :] = 0
    assert mla_calls.reference_error(call, x, o) > 0.1
    assert mla_calls.difference(torch.full_like(o, torch.nan), o) == torch.inf


def result(name="B1 q1 k64 8/1", peer=9.0, wrong=(), chosen="split4 h8", **others):
    times = {chosen: 10.0} | others
    errors = {"reference": 1e-3, "peer": 2e-3}
    found = {
        "name": name,
        "chosen": chosen,
        "times": times,
        "peer": peer,
        "errors": errors,
        "wrong": list(wrong),
    }
    return found | {"expected": {}, "scheduled": None}


def test_what_is_said_of_times():
    few = result(peer=9.8, line=8.0)
    assert mla_report.kind(few) == "split" and round(mla_report.ratio(few), 9) == 0.98
    assert mla_report.loss(few) == 1.25 and mla_report.loss(result()) is None
    assert "loses 25.0%; line 8.0" in mla_report.line(few)
    results = [
        few,
        result("B2 q1 k64 8/1", 20.0, line=10.0, chosen="whole h8"),
        result("B3 q1 k64 8/1", None),
    ]
    text = mla_report.summary([*results, result("B4 q1 k64 8/1", 1.0, ["peer"])])
    assert "at most 25.0% (B1 q1 k64 8/1)" in text and "loses 11.80% on average of 2 calls" in text
    rows = {row.split()[0]: row.split()[1:] for row in text.splitlines()[1:4]}
    assert rows["split"] == ["3", "1", "0.980", "0", "1", "0.980", "(B1", "q1", "k64", "8/1)"]
    assert rows["all"][:5] == ["4", "2", "1.400", "0", "1"]
    assert "schedule" not in text
    results[0] = few | {"scheduled": 7.0}
    assert "with a schedule 7.0 us, 1.400" in mla_report.line(results[0])
    text = mla_report.summary([*results, result("B4 q1 k64 8/1", 1.0, ["peer"])])
    (scheduled,) = (row for row in text.splitlines() if row.strip().startswith("line with a schedule"))
    assert scheduled.split()[4:8] == ["1", "1", "1.400", "0"]
    assert "1 calls differ" in text and "WRONG: differs from peer 2.0e-03" in text


def test_a_run(monkeypatch, on_cpu, capsys, tmp_path):
    """Everything but kernels and clocks, whose place the reference and set times take."""
    reference = partial(mla_calls.ours, backend="reference")
    sets = [(mla_calls.paged(MlaCall("bf16", 4, 2, (130, 2, 65)), torch.randperm(12).int(), 0),)]

    def times(calls, inputs):
        assert all(call(*inputs[0]).shape == (3, 2, 4, 512) for call in calls.values())
        return {name: 10.0 - place for place, name in enumerate(calls)}

    for owner, name, value in (
        (mla_calls, "in_one_way", lambda call, *_: reference(call)),
        (mla_calls, "scheduled", lambda call, _: reference(call)),
        (mla_calls, "peer", lambda call, _: lambda x: reference(call)(x) * 1.05),
        (mla_calls, "input_sets", lambda _: sets),
        (bench_mla, "target_of", lambda _: H200),
        (bench_mla, "compile_ahead", lambda *_: 0),
        (bench_mla, "ProcessPoolExecutor", lambda workers, **_: ThreadPoolExecutor(workers)),
        (bench_mla.driver, "need_gpu", lambda _: None),
        (bench_mla.driver, "begin", lambda *_: "this GPU"),
        (bench_mla.gpu_bench, "graph_times", times),
    ):
        monkeypatch.setattr(owner, name, value)
    ours = mla_calls.ours
    monkeypatch.setattr(
        mla_calls, "ours", lambda call, **more: ours(call, **({"backend": "reference"} | more))
    )
    file = tmp_path / "results.jsonl"
    options = ["--shapes", "B3 q2 k2..130 4/1", "--ways", "line", "--schedule", "--write", str(file)]
    monkeypatch.setattr("sys.argv", ["bench_mla.py", *options])
    with pytest.raises(SystemExit, match="1"):  # the peer's result is not ours
        bench_mla.main()
    (kept,) = map(json.loads, file.read_text().splitlines())
    (first, other), errors = kept["times"].items(), kept["errors"]
    assert first[1] == 10 and other[0].startswith("line") and other[1] == 9
    assert kept["scheduled"] == 8 and kept["peer"] == 7 and kept["on"].startswith("this GPU, tree ")
    assert kept["wrong"] == ["peer"] and errors["reference"] < 1e-6 and 0.04 < errors["peer"] < 0.06
    said_ = capsys.readouterr().out
    assert "with a schedule 8.0 us, 0.875" in said_ and "loses 11.1%" in said_


def test_commands(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_mla.py", "--list", "--calls", "3"])
    bench_mla.main()
    assert len(capsys.readouterr().out.splitlines()) == 3
    monkeypatch.setattr("sys.argv", ["bench_mla.py", "--list", "--shapes", "B3"])
    with pytest.raises(SystemExit, match="--shapes: a call is said as"):
        bench_mla.main()
