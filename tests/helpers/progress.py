"""One line that says how far a test run is, in place of a dot for every test: ``pytest --progress``.

A terminal has the line rewritten; a log gets one every ten seconds. How long is left is estimated from what each test
took last time, which pytest's cache keeps, and from this run's average for tests it does not know.
"""

from __future__ import annotations

import time

import pytest

DURATIONS = "warpspec/durations"  # seconds by test, in pytest's cache
LOG_SECONDS = 10
TERMINAL_SECONDS = 0.2


def minutes(seconds: float) -> str:
    """ "4:05"."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class Progress:
    """pytest plugin of the process that reports, with or without pytest-xdist."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.reporter = config.pluginmanager.get_plugin("terminalreporter")
        self.pause = TERMINAL_SECONDS if self.reporter.isatty else LOG_SECONDS
        self.known: dict[str, float] = config.cache.get(DURATIONS, {})
        self.seconds: dict[str, float] = {}  # of this run's tests, their set-up and tear-down too
        self.left: set[str] = set()
        self.total = self.done = self.failed = 0
        self.start = self.written = time.monotonic()

    def workers(self) -> int:
        return len(getattr(self.config.option, "tx", None) or [0])

    def expect(self, tests: list[str]) -> None:
        self.total, self.left = len(tests), set(tests)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids: list[str]) -> None:
        if not self.total:  # every worker collects the same
            self.expect(ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report):
        """No letter to print for a test; the word stands in the summary of failures."""
        category, _, word = yield
        return category, "", word

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed += 1
            self.clear()
            self.reporter.write_line(f"FAILED {report.nodeid} ({report.when})")
        if report.when == "teardown":
            self.left.discard(report.nodeid)
            self.done += 1
            if time.monotonic() - self.written >= self.pause:
                self.write()

    def seconds_left(self) -> float:
        """Seconds left by the clock."""
        mean = sum(self.seconds.values()) / max(self.done, 1)
        return sum(self.known.get(test, mean) for test in self.left) / self.workers()

    def line(self) -> str:
        elapsed = time.monotonic() - self.start
        ends = minutes(elapsed + self.seconds_left())
        return f"{self.done} of {self.total} tests, {self.failed} failed, {minutes(elapsed)} of about {ends}"

    def write(self) -> None:
        self.written = time.monotonic()
        if self.reporter.isatty:
            self.reporter.rewrite(self.line(), erase=True)
        else:
            self.reporter.write_line(self.line())

    def clear(self) -> None:
        if self.reporter.isatty:
            self.reporter.rewrite("", erase=True)
            self.reporter.rewrite("")

    def pytest_sessionfinish(self) -> None:
        self.clear()
        self.config.cache.set(DURATIONS, {**self.known, **self.seconds})
