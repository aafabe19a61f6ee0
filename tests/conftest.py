"""Settings every test runs under."""

import contextlib
import gc
import os
import sys
from pathlib import Path

# Before torch is imported: workers and the simulator's own threads share the machine's few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# No test may reach out: checkpoints and configurations are made by the tests themselves.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch
from helpers.progress import Progress

GPU_TESTS = Path(__file__).parent / "gpu"

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# Examples that run a kernel in the simulator take seconds; the same ones every time, so CI cannot flicker.
hypothesis.settings.register_profile("warpspec", deadline=None, derandomize=True)
hypothesis.settings.load_profile("warpspec")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", action="store_true", help="one line that says how far the run is, no dots")
    parser.addoption("--part", type=part_of, help="K/N: of the chosen tests every N-th, from the K-th on")


def part_of(text: str) -> tuple[int, int]:
    """(K, N) of "K/N". ValueError, which the command line reports, unless 1 <= K <= N."""
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


@pytest.hookimpl(trylast=True)  # what marks and names leave out is gone by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("part"):
        part, parts = config.getoption("part")
        items[:] = items[part - 1 :: parts]


@pytest.hookimpl(trylast=True)  # the terminal reporter is there by then
def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist: the process that starts them reports
    if config.getoption("progress") and not is_worker:
        config.pluginmanager.register(Progress(config), "progress")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that need a GPU are not even imported where none of them can be chosen."""
    return True if collection_path == GPU_TESTS and "not gpu" in config.option.markexpr else None


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look through it each time a kernel is compiled. It looks
    less often, too: a sixth of the time of a run with compiled kernels on disk was its."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)


@pytest.fixture(autouse=True)
def no_added_waits():
    """In no kernel that a test compiles, or finds on disk, does ptxas add waits for products of a warpgroup, but for
    trees under a window at head sizes of 512 and more, which no model has."""
    compile = sys.modules.get("warpspec.common.compile")  # which the test may be the first to import
    before = set(compile._compiled) if compile else set()
    yield
    compile = sys.modules.get("warpspec.common.compile")
    for key in compile._compiled.keys() - before if compile else ():
        known = all(text in repr(key) for text in ("has_left=True", "has_tree=True", "HeadSizes(qk=5"))
        assert known or not compile.kernels_with_added_waits(compile._compiled[key]), key


@pytest.fixture
def simulate_as():
    """``simulate_as("sm_90a", sm_count=2, seed=1)``: from now on backend "sim" runs the kernels for this target.

    Attention's tiles are whole ones. small: on sm_90a, they are of one consumer, as is best for the few tiles of a
    test; otherwise of several, as is best for many.
    """
    from helpers.simulate import choosing

    from warpspec.common.launch import simulating

    with contextlib.ExitStack() as contexts:

        def choose(arch: str, *, small: bool = False, **changes) -> None:
            groups = small or arch != "sm_90a"
            contexts.enter_context(choosing(wanted=lambda one: groups == (one.tiling.row_groups == 1)))
            contexts.enter_context(simulating(arch, **changes))

        yield choose


@pytest.fixture
def simulate_gradients_as():
    """``simulate_gradients_as("sm_90a", seed=1)``: from now on gradients are computed by the kernels for this target in
    the simulator, whatever backend computed the results."""
    from helpers.simulate import simulating_gradients

    with contextlib.ExitStack() as contexts:
        yield lambda arch, **changes: contexts.enter_context(simulating_gradients(arch, **changes))


@pytest.fixture
def check_order(monkeypatch):
    """Every run in the simulator checks memory order, too, and raises at its first finding, warnings included: they
    say, for example, that a proxy fence is missing. It costs up to three times the run: one test of each kernel has it;
    WARPSPEC_SIM_CHECK=order checks all, where warnings are reported."""
    from warpspec import sim
    from warpspec.sim.order.checker import OrderChecker

    monkeypatch.setenv(sim.CHECK_VARIABLE, "order")
    monkeypatch.setattr(OrderChecker, "first_only", True)


@pytest.fixture
def compiled_anew(monkeypatch, request):
    """Kernels are compiled as the test changes them, and forgotten after it."""
    from warpspec.common import compile, kernel_cache
    from warpspec.fmha import launch

    monkeypatch.setattr(kernel_cache, "SOURCES", f"{kernel_cache.SOURCES} {request.node.name}")
    monkeypatch.setattr(compile, "_compiled", {})
    launch.prepare.cache_clear()
    yield
    launch.prepare.cache_clear()
