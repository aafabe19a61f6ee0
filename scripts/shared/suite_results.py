"""A pytest plug-in that writes what came of each test to a file as it comes, and runs only tests that it has not.

The environment variable SUITE_RESULTS names the file: a JSON object a line, `test`, `outcome` (passed, failed,
skipped), `why`, `seconds`,
`launches` of kernels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE = Path(os.environ["SUITE_RESULTS"])


def read(file: Path) -> dict[str, dict]:
    """Results by test; a later line of a test replaces an earlier one."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["test"]: row for row in map(json.loads, lines)}


@pytest.hookimpl(hookwrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    yield
    if config.option.collectonly:
        return
    done = read(FILE)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


_call: dict[str, pytest.TestReport] = {}  # the report that decides, of tests that run


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if os.environ.get("SUITE_RESULTS_PARENT") != str(os.getpid()):
        return  # a worker, whose reports the parent gets
    if report.when == "call" or report.outcome != "passed":
        _call.setdefault(report.nodeid, report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    report = _call.pop(nodeid, None)
    if report is None or os.environ.get("SUITE_RESULTS_PARENT") != str(os.getpid()):
        return
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    launches = dict(report.user_properties).get("warpspec_launches", 0)
    row = dict(
        test=nodeid,
        outcome=report.outcome,
        why=why[-4000:],
        seconds=round(report.duration, 1),
        launches=launches,
    )
    with FILE.open("a") as file:
        file.write(json.dumps(row) + "\n")


os.environ["SUITE_RESULTS_PARENT"] = str(os.getpid())
