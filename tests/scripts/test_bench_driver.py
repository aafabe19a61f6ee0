"""Every script that needs a GPU can be imported without one, and says so when it is run; unknown cases are refused."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = sorted(
    path.stem
    for path in (Path(__file__).parents[2] / "scripts").glob("bench_*.py")
    if path.stem != "bench_sim"  # measures a CPU
)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [*((name, []) for name in SCRIPTS), ("measure_clocks", ["x.json"]), ("sanitize", [])],
)
def test_without_a_gpu(name, arguments, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit, match=f"{name}.py needs an NVIDIA GPU"):
        importlib.import_module(name).main()


@pytest.mark.parametrize("name", ["sanitize", "record_silicon", "record_attention"])
def test_unknown_case(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "no such case"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 2
    assert "no such case" in capsys.readouterr().err
