"""Every benchmark of a GPU can be imported without one, and says so when it is run."""

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


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match=f"{name}.py needs an NVIDIA GPU"):
        importlib.import_module(name).main()
