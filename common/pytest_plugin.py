"""The pytest plug-in's options. It loads the simulator only where `--warpspec-sim` asks for it."""

from __future__ import annotations

import importlib

import pytest

SUITE = "warpspec.sim.pretend.suite"  # the module that does the work


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("warpspec", "GPU kernels in a simulator (warpspec)")
    group.addoption(
        "--warpspec-sim",
        action="store_true",
        help="run tests as on a GPU: cuda tensors in this machine's memory, CuTe DSL kernels in the simulator",
    )
    group.addoption("--warpspec-arch", default="sm_100a", help="target to compile for (default sm_100a)")
    group.addoption(
        "--warpspec-check", choices=["order"], help="order: findings of memory order are failures"
    )
    group.addoption("--warpspec-seed", type=int, default=0, help="draws schedules, and the sample")
    group.addoption(
        "--warpspec-seeds", type=int, help="run each launch under this many schedules and compare"
    )
    group.addoption(
        "--warpspec-sample",
        type=int,
        metavar="N",
        help="run N of the tests, drawn in turn from each function's",
    )
    group.addoption(
        "--warpspec-budget", type=float, metavar="SECONDS",
        help="run the tests whose predicted cost fits in this many seconds, drawn in turn from each function's",
    )  # fmt: skip
    group.addoption("--warpspec-jobs", type=int, default=1, metavar="N", help="run tests on N processes (1)")
    group.addoption(
        "--warpspec-limit",
        type=float,
        default=120,
        metavar="SECONDS",
        help="skip a test that takes more CPU time (120)",
    )
    group.addoption("--warpspec-sarif", metavar="FILE", help="write what was found as SARIF")
    group.addoption(
        "--warpspec-baseline",
        metavar="FILE",
        help="SARIF of an earlier run: findings that it has are no failures",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if early_config.known_args_namespace.warpspec_sim:  # before test files ask whether there is a GPU
        suite = importlib.import_module(SUITE)
        early_config.pluginmanager.register(suite.Suite(early_config.known_args_namespace), "warpspec-suite")
