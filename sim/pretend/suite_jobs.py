"""Tests of a suite on several processes, forked once they are collected: `pytest --warpspec-jobs N`.

Collecting a suite of kernels takes half a minute and imports a gigabyte, so that workers which collect for themselves
(pytest-xdist's) cost more than many tests. These share what the parent has imported. A worker takes the next test when
it has finished one. A test that ends its process fails, and the others go on in a new process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import pytest
import torch

from warpspec.sim.pretend import dsl
from warpspec.sim.processes import PROCESSES_VARIABLE

FORK = multiprocessing.get_context("fork")
Take = Callable[[], object]  # what the plug-in has gathered during a test, and forgets


class _Sender:
    """The reporting plug-in of a worker: it collects the reports of the running test."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.reports: list[dict] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_data = self.config.hook.pytest_report_to_serializable
        self.reports.append(to_data(config=self.config, report=report))


@dataclass
class _Worker:
    """A worker process, the parent's end of its pipe, and the test that it runs."""

    process: ForkProcess
    pipe: Connection
    item: pytest.Item


def _serve(session: pytest.Session, pipe: Connection, take: Take) -> None:
    """Run the tests whose numbers arrive, in a worker, and send back their reports and what the plug-in gathered."""
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:  # the files that it writes are the parent's, and other workers'
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    config.pluginmanager.unregister(name="terminalreporter")
    sender = _Sender(config)
    config.pluginmanager.register(sender)
    torch.set_num_threads(1)
    os.environ[PROCESSES_VARIABLE] = "1"
    dsl.dump_to(tempfile.mkdtemp(dir=os.environ["CUTE_DSL_DUMP_DIR"]))
    take()
    parent = os.getppid()
    while True:
        while not pipe.poll(1.0):
            if os.getppid() != parent:  # which was killed; other workers have its end of the pipe, too
                os._exit(1)
        if (number := pipe.recv()) is None:
            return
        item = session.items[number]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        pipe.send((sender.reports, take()))
        sender.reports = []


def _start(session: pytest.Session, take: Take, number: int) -> _Worker:
    """Fork a worker and give it a test."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_serve, args=(session, theirs, take), daemon=False)
    process.start()
    theirs.close()
    ours.send(number)
    return _Worker(process, ours, session.items[number])


def _died(worker: _Worker) -> pytest.TestReport:
    """A failure report for a test that ended its process."""
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return pytest.TestReport(
        worker.item.nodeid, worker.item.location, {}, "failed", f"the test's process ended with {how}", "call"
    )


def run(session: pytest.Session, jobs: int, take: Take) -> Iterator[object]:
    """Run the collected tests on this many processes, and report them to this one's plug-ins; yields what `take`
    returned in a worker after each test."""
    hook, config = session.config.hook, session.config
    numbers = iter(range(len(session.items)))
    workers = [_start(session, take, number) for _, number in zip(range(jobs), numbers, strict=False)]
    try:
        while workers:
            for pipe in wait([worker.pipe for worker in workers]):
                worker = next(worker for worker in workers if worker.pipe is pipe)
                item, gathered, alive = worker.item, None, True
                try:
                    data, gathered = pipe.recv()
                    from_data = hook.pytest_report_from_serializable
                    reports = [from_data(config=config, data=one) for one in data]
                except (EOFError, ConnectionResetError):
                    reports, alive = [_died(worker)], False
                hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
                for report in reports:
                    hook.pytest_runtest_logreport(report=report)
                hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
                if gathered is not None:
                    yield gathered
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
                number = next(numbers, None)
                if number is not None and alive:
                    worker.item = session.items[number]
                    pipe.send(number)
                    continue
                workers.remove(worker)
                if number is not None:
                    workers.append(_start(session, take, number))
                elif alive:
                    pipe.send(None)
                    worker.process.join()
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
            worker.process.join()
