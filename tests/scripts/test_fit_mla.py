"""fit_mla.py on results that are made up."""

import json
import math
from dataclasses import replace

import fit_mla
import pytest
from shared import mla_calls, mla_plans
from shared.mla_draws import draw_calls, to_json

from warpspec.common.hardware import MODELS
from warpspec.common.launch import Target
from warpspec.fmha.sm90.choices import LATENT_COSTS
from warpspec.latent.gathered import cost


@pytest.fixture
def results(tmp_path):
    """A file of calls over V3.2's lists, timed whole, split and shared out."""
    lines = []
    for call in (call for call in draw_calls(60, 5, "v3.2") if call.heads < 128):
        times = {"whole": 40.0, "split4": 20.0, "line": 30.0}
        lines.append(json.dumps({"call": to_json(call), "on": "today, NVIDIA H200, tree 1", "times": times}))
    (file := tmp_path / "results.jsonl").write_text("\n".join(lines))
    return file


def test_results_are_read(results):
    calls = fit_mla.loaded([results])
    assert len(calls) > 40 and all(one.times == {1: 40.0, 4: 20.0, 0: 30.0} for one in calls)
    assert {one.kernel for one in calls} == {cost.LISTS}
    assert all(one.mean <= one.work[1] and one.ctas == 132 for one in calls)


def test_a_fit_finds_costs_that_choose_what_was_fast(results):
    truth = cost.COSTS[cost.LISTS]._replace(second=9.0, state=1.5, add=0.4, scan=6.0)
    calls = [
        one._replace(times={splits: fit_mla.expected(one, truth, splits) for splits in (0, 1, 2, 4, 8)})
        for one in fit_mla.loaded([results])
    ]
    calls = [one._replace(times={n: us for n, us in one.times.items() if us < math.inf}) for one in calls]
    assert all(fit_mla.loss(one, truth) == 0 for one in calls)
    start = cost.COSTS[cost.LISTS]
    lost = sum(fit_mla.loss(one, start) for one in calls)
    fitted = fit_mla.fit(calls, start, 1.5)
    assert lost > 0.3 and sum(fit_mla.loss(one, fitted) for one in calls) < lost / 2
    assert " calls lose 0.00%, at most 0.0%" in fit_mla.judged(calls, truth)


def test_plans_of_bf16_rows():
    """A fit finds constants by which plans are chosen that were fast, and names them by the ways that are chosen."""
    truth, calls = replace(LATENT_COSTS, line=0.8, combine_bytes=2.0e6), []
    target = Target.of_model(next(gpu for gpu in MODELS if gpu.name == "H200"))
    for call in draw_calls(30, 6, "bf16"):
        found = mla_calls.attention_ways(call, target)
        one = mla_plans.planned(call, dict.fromkeys((way.name for way in found), 1.0), target)
        assert min(one.times, key=lambda way: fit_mla.expected(one, LATENT_COSTS, way)) == found[0].name
        calls.append(one._replace(times={way: fit_mla.expected(one, truth, way) for way in one.times}))
    lost = sum(fit_mla.loss(one, LATENT_COSTS) for one in calls)
    fitted = fit_mla.fit(calls, LATENT_COSTS, 3.0)
    assert lost > 0.1 and sum(fit_mla.loss(one, fitted) for one in calls) < lost / 2
    assert all(fit_mla.error(one, truth) < 1e-9 for one in calls)


def test_command(results, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fit_mla.py", "--judge", str(results)])
    fit_mla.main()
    assert capsys.readouterr().out.startswith("v3.2-fp8, judged: ")
    monkeypatch.setattr("sys.argv", ["fit_mla.py"])
    with pytest.raises(SystemExit):
        fit_mla.main()
