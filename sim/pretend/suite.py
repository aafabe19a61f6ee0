"""Test suites of GPU kernels under pytest, without a GPU: `pytest --warpspec-sim` (its options:
common/pytest_plugin.py)."""

from __future__ import annotations

import contextlib
import math
import random
import re
import signal
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from warpspec.sim.errors import HostError, PtxSyntaxError, SimError, UnsupportedInstruction
from warpspec.sim.order.findings import grouped_text
from warpspec.sim.pretend import intercept, suite_jobs
from warpspec.sim.pretend.frames import to_callers
from warpspec.sim.pretend.session import Session
from warpspec.sim.report import SimReport
from warpspec.sim.views import sarif

COMPILATION = 8.0  # seconds predicted for compiling a test's kernels
SECONDS_OF_WORK = 5e-8  # predicted for each unit of `work`, before the test has run once
REMINDER = 2.0  # seconds until OverLimit is raised again: Python drops what is raised in a finalizer
SIZES = 3  # how many of a test's parameters count for its work: the largest
KEPT = "warpspec/costs"  # in pytest's cache: seconds by test
LAUNCHES = "warpspec_launches"  # property of a test's report, in JUnit files too
CANNOT = (UnsupportedInstruction, PtxSyntaxError, HostError)
NO_DEVICE = re.compile(  # what other packages raise where they need a real device, or torch its CUDA build
    r"libcuda|no kernel image|not compiled with CUDA|CUDA driver|not implemented for '\w+'|is not supported on CPU|"
    r"does not support backward|Could not run '.*' with arguments from the 'CPU'|triton is not installed|nvidia-smi"
)


class OverLimit(BaseException):
    """A test takes longer than --warpspec-limit; no `except Exception` of the test catches it."""


class Suite:
    """The plug-in of one pytest run."""

    def __init__(self, options: Namespace):
        self.options = options
        self.start = time.monotonic()
        self.results: list[sarif.Result] = []
        self.seconds: dict[str, float] = {}
        self.launches = 0
        self.chosen = ""
        baseline = options.warpspec_baseline
        self.accepted = sarif.fingerprints(Path(baseline)) if baseline else set()
        self._stack = contextlib.ExitStack()
        self.session: Session = self._stack.enter_context(
            intercept(
                options.warpspec_arch,
                seed=options.warpspec_seed,
                seeds=options.warpspec_seeds or 1,  # MMAs are summed one by one: some tests compare bits
                check=options.warpspec_check,
            )
        )

    # Which tests

    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(hookwrapper=True)
    def pytest_generate_tests(self, metafunc) -> Iterator[None]:
        yield
        wanted = self.options.warpspec_sample
        calls = getattr(metafunc, "_calls", None)
        if wanted and calls is not None and len(calls) > wanted:  # a function may have 100,000 cases
            draw = random.Random(f"{self.options.warpspec_seed} {metafunc.definition.nodeid}")
            calls[:] = draw.sample(calls, wanted)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        sample, budget = self.options.warpspec_sample, self.options.warpspec_budget
        if not sample and not budget:
            return
        cache = getattr(config, "cache", None)  # there is none under -p no:cacheprovider
        known = cache.get(KEPT, {}) if cache else {}
        chosen, predicted, beyond = [], 0.0, 0
        for item in in_turn(items, self.options.warpspec_seed):
            cost = known.get(item.nodeid) or predicted_seconds(item)
            if sample and len(chosen) == sample:
                break
            if cost > self.options.warpspec_limit:
                beyond += 1
                continue
            if budget and predicted + cost > budget:
                continue
            chosen.append(item)
            predicted += cost
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        self.chosen = f"{len(chosen)} of {len(items)} tests chosen, {predicted:.0f} s predicted"
        if beyond:
            self.chosen += f"; {beyond} left out, predicted to take over {self.options.warpspec_limit:.0f} s"
        items[:] = chosen  # as drawn, so that what an interrupted run has run is a fair sample, too

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        jobs = min(self.options.warpspec_jobs, len(session.items))
        if jobs < 2 or session.config.option.collectonly or session.testsfailed:
            return None
        for gathered in suite_jobs.run(session, jobs, self._take):
            results, seconds, launches, simulated = gathered
            self.results += results
            self.seconds |= seconds
            self.launches += launches
            self.session.seconds += simulated
        return True

    def _take(self) -> tuple[list[sarif.Result], dict[str, float], int, float]:
        """Return what was gathered since the last call, and start anew."""
        gathered = self.results, self.seconds, self.launches, self.session.seconds
        self.results, self.seconds, self.launches, self.session.seconds = [], {}, 0, 0.0
        return gathered

    # A test

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        session = self.session
        session.report, session.errors, session.failed = SimReport(), [], None
        session.torch_runs()
        budget = self.options.warpspec_budget
        if budget and time.monotonic() - self.start > budget:
            pytest.skip(f"warpspec: the budget of {budget:.0f} s is spent")
        start = time.monotonic()
        with self._limited():
            outcome = yield
        self.seconds[item.nodeid] = time.monotonic() - start
        launches = len(session.report.launches)
        self.launches += launches
        item.user_properties.append((LAUNCHES, launches))
        error = outcome.excinfo[1] if outcome.excinfo else None
        if error is None or isinstance(error, pytest.skip.Exception):
            self._look_at_findings(outcome)
            return
        reason = self._cannot(error)
        if reason:
            outcome.force_exception(pytest.skip.Exception(f"warpspec: {reason}"))
            return
        if self.session.findings:
            item.add_report_section("call", "memory order", "\n".join(grouped_text(self.session.findings)))
            self.results += [sarif.of_finding(finding) for finding in self.session.findings]
        for cause in _causes(error):
            if isinstance(cause, SimError):
                cause.__traceback__ = to_callers(cause.__traceback__)
                self.results += sarif.of_error(cause)
                break

    def _look_at_findings(self, outcome) -> None:
        """Fail a test that passed if the order checker found something new in it."""
        found = {finding: sarif.of_finding(finding) for finding in self.session.findings}
        new = [finding for finding, result in found.items() if result.fingerprint not in self.accepted]
        self.results += found.values()
        if new:
            text = "\n".join([f"memory order: {len(new)} finding{'s' * (len(new) > 1)}", *grouped_text(new)])
            outcome.force_exception(pytest.fail.Exception(text, pytrace=False))

    def _cannot(self, error: BaseException) -> str:
        """The reason why a test cannot run here, or "" if it ran and failed."""
        if isinstance(error, OverLimit):
            return f"over {self.options.warpspec_limit:.0f} s of CPU time"
        failed = self.session.failed
        for cause in (*_causes(error), *([failed] if failed is not None else [])):
            if isinstance(cause, CANNOT):
                return f"{type(cause).__name__}: {_first_line(cause)}"
            if isinstance(
                cause, (RuntimeError, NotImplementedError, ImportError, FileNotFoundError)
            ) and NO_DEVICE.search(str(cause)):
                return f"{type(cause).__name__}: {_first_line(cause)}"
        return ""

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Raise OverLimit in what takes more of this process's CPU time than the limit."""

        def stop(*_: object) -> None:
            raise OverLimit

        before = signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, self.options.warpspec_limit, REMINDER)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    # The end

    def pytest_terminal_summary(self, terminalreporter) -> None:
        options, taken = self.options, time.monotonic() - self.start
        terminalreporter.section("warpspec.sim")
        terminalreporter.line(
            f"{options.warpspec_arch}, {self.launches} launches, {self.session.seconds:.0f} s in the simulator of "
            f"{taken:.0f} s" + (f"; {self.chosen}" if self.chosen else "")
        )
        counts = {kind: len(terminalreporter.getreports(kind)) for kind in ("passed", "failed", "skipped")}
        total = sum(counts.values()) or 1
        terminalreporter.line(", ".join(f"{n} {kind} ({n / total:.1%})" for kind, n in counts.items()))
        reasons: dict[str, int] = {}
        for report in terminalreporter.getreports("skipped"):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if "warpspec: " in text:
                reason = text.partition("warpspec: ")[2]
                reasons[reason] = reasons.get(reason, 0) + 1
        for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]):
            terminalreporter.line(f"  {count} skipped: {reason}")
        unique = {result.fingerprint: result for result in self.results}
        if unique:
            plural = "s" if len(unique) > 1 else ""
            terminalreporter.line(f"{len(unique)} finding{plural} by kind and lines")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.options.warpspec_sarif:
            sarif.write(Path(self.options.warpspec_sarif), self.results, session.config.rootpath)
        cache = getattr(session.config, "cache", None)
        if cache:
            known = cache.get(KEPT, {})
            cache.set(KEPT, known | {name: round(s, 1) for name, s in self.seconds.items()})

    def pytest_unconfigure(self) -> None:
        self._stack.close()


def in_turn(items: Iterable[pytest.Item], seed: int) -> list[pytest.Item]:
    """Order tests at random: one of each test function, then a second one of each, and so on."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    draw = random.Random(seed)
    names = sorted(functions)
    draw.shuffle(names)
    columns = [draw.sample(functions[name], len(functions[name])) for name in names]
    longest = max((len(column) for column in columns), default=0)
    return [column[i] for i in range(longest) for column in columns if i < len(column)]


def predicted_seconds(item: pytest.Item) -> float:
    """Predict the seconds a test takes from the numbers among its parameters."""
    return COMPILATION + SECONDS_OF_WORK * work(getattr(getattr(item, "callspec", None), "params", {}))


def work(parameters: dict[str, object]) -> float:
    """The product of the largest numbers among a test's parameters, such as queries x keys x head dimension."""
    numbers = sorted((float(n) for value in parameters.values() for n in _numbers(value)), reverse=True)
    return math.prod(numbers[:SIZES]) if numbers else 0.0


def _numbers(value: object) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _numbers(item)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the chain of its causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
