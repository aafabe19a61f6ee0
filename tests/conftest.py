"""Settings every test runs under."""

import gc
import os

# Before torch is imported: workers and the simulator's own threads share the machine's few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# No test may reach out: checkpoints and configurations are made by the tests themselves.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch
from progress import Progress

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# Examples that run a kernel in the simulator take seconds; the same ones every time, so CI cannot flicker.
hypothesis.settings.register_profile("warpspec", deadline=None, derandomize=True)
hypothesis.settings.load_profile("warpspec")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", action="store_true", help="one line that says how far the run is, no dots")


@pytest.hookimpl(trylast=True)  # the terminal reporter is there by then
def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist: the process that starts them reports
    if config.getoption("progress") and not is_worker:
        config.pluginmanager.register(Progress(config), "progress")


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look through it each time a kernel is compiled. It looks
    less often, too: a sixth of the time of a run with compiled kernels on disk was its."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)


@pytest.fixture
def check_order(monkeypatch):
    """Every run in the simulator checks memory order, too. It costs up to three times the run: one test of each kernel
    has it; WARPSPEC_SIM_CHECK=order checks all."""
    from warpspec import sim

    monkeypatch.setenv(sim.CHECK_VARIABLE, "order")
