"""scripts/demo.py, what `make demo` runs, at a small size in the simulator."""

import json
import sys

import demo
import pytest


def test_demo_prints_what_ran_and_leaves_its_files(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "OUT", tmp_path / "demo")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--seq", "40", "--experts", "1"])
    assert demo.main() == 0

    printed = capsys.readouterr().out
    assert "passed" in printed
    assert "registers" in printed and "tcgen05.mma" in printed
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert results["backend"] == "sim" and results["passed"] is True
    assert (tmp_path / "demo" / "error.png").stat().st_size > 0
    assert "experts of gpt-oss-20b" in printed and "GroupedGemm" in printed
    assert results["moe"]["passed"] is True and results["moe"]["layers"][0]["rows_by_expert"] == [8]
    trace = json.loads((tmp_path / "demo" / "moe.trace.json").read_text())
    threads = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"0 epilogue", "4 MMA", "5 load", "6 schedule"} <= threads
    for kind in ("sliding_attention", "full_attention"):
        trace = json.loads((tmp_path / "demo" / f"{kind}.trace.json").read_text())
        threads = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
        assert {"0 softmax", "4 MMA", "5 load"} <= threads
        assert any("tcgen05.mma" in event["name"] for event in trace["traceEvents"])


@pytest.mark.parametrize("hopper", [True, False])
def test_a_hopper_gpu_runs_the_layers_natively_too(monkeypatch, capsys, hopper):
    ran = []
    monkeypatch.setattr(demo, "has_hopper", lambda: hopper)
    monkeypatch.setattr(demo.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(demo.validate_layer, "run", lambda options, console: ran.append(options) or ["layer"])
    options = demo.validate_layer.parser().parse_args(["--seq", "40"])
    assert demo.run_natively(options, demo.Console()) == (["layer"] if hopper else [])
    assert [(of.backend, of.seq) for of in ran] == ([("sm90", 40)] if hopper else [])
    assert ("NVIDIA H200" in capsys.readouterr().out) is hopper
