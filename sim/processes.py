"""Shares of a launch: clusters that cannot see each other, on as many processes as there are cores.

The cut depends on the grid alone, so that a seed gives the same run on every machine: the same results, the same
findings, and, of several errors, the first share's.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from warpspec.sim.codegen.program import Program
from warpspec.sim.errors import SimError
from warpspec.sim.grid import Launch
from warpspec.sim.instruction import Sym
from warpspec.sim.machine import Machine
from warpspec.sim.memory import GlobalMemory
from warpspec.sim.order.checker import OrderChecker
from warpspec.sim.order.findings import OrderError
from warpspec.sim.order.launches import Overlap, with_itself
from warpspec.sim.order.shares import conflicts
from warpspec.sim.order.stores import StoreRecorder
from warpspec.sim.order.stores import active as stores_active
from warpspec.sim.reductions import SeenReductions
from warpspec.sim.report import LaunchStats

SHARES = ((64, 8), (16, 4), (4, 2), (0, 1))  # (clusters from which on, parts that the grid is cut into)
SEEDS_APART = 2  # a launch in fewer parts has this many machine seeds per seed
PROGRESS_AFTER = 5.0  # seconds of expected run time from which progress is shown
PROCESSES_VARIABLE = "WARPSPEC_SIM_PROCESSES"  # environment variable: maximum processes of a launch


class Progress:
    """A line on stderr once the run is expected to take longer than PROGRESS_AFTER seconds.

    translation: seconds that the kernel's translation took, which count.
    """

    def __init__(self, name: str, total: int, translation: float = 0.0):
        self.name, self.total, self.translation = name[:40], total, translation
        self.start = self.last = time.monotonic()
        self.shown = False

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        elapsed = now - self.start
        if elapsed < 1 or now - self.last < (0.2 if sys.stderr.isatty() else 10):
            return
        expected = elapsed * self.total / max(done, 1) + self.translation
        elapsed += self.translation
        if not self.shown and expected < PROGRESS_AFTER:
            return
        self.last, self.shown = now, True
        ending = "" if sys.stderr.isatty() else "\n"
        start = "\r" if sys.stderr.isatty() else ""
        text = f"{start}sim {self.name}: {done}/{self.total} clusters, {elapsed:.0f} s of about {expected:.0f} s "
        if self.translation >= 1:
            text += f"({self.translation:.0f} s translation) "
        print(text, end=ending, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.shown and sys.stderr.isatty():
            print(file=sys.stderr)


@dataclass(frozen=True)
class Run:
    """The common data of all shares of a launch. check: "order" or None."""

    program: Program
    gmem: GlobalMemory
    seed: int
    overlap: Overlap
    check: str | None

    def checker(self) -> OrderChecker | None:
        """The checker or recorder of a share's accesses, if any."""
        if stores_active() is not None:
            return StoreRecorder(
                self.program, self.gmem, self.overlap, stores_active(), self.check == "order"
            )
        return OrderChecker(self.program, self.gmem, self.overlap) if self.check == "order" else None


def shares_of(clusters: int) -> int:
    """Number of parts into which a grid of this many independent clusters is cut."""
    return next(parts for least, parts in SHARES if clusters >= least)


@lru_cache(maxsize=64)
def _prints(program: Program) -> bool:
    return any(Sym("vprintf") in ins.operands for ins in program.kernel.instrs)


def processes_of(program: Program, shares: int) -> int:
    """Number of processes for shares: one per core, limited by the environment; one if the order of their output
    matters, as for our sys.stdout and the record of their stores."""
    if _prints(program) or stores_active() is not None:
        return 1
    return max(1, min(shares, _most_processes(shares), len(os.sched_getaffinity(0))))


def _most_processes(default: int) -> int:
    """The limit that the environment sets, or `default`."""
    text = os.environ.get(PROCESSES_VARIABLE) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{PROCESSES_VARIABLE} is {text!r}; a positive int is needed")
    return int(text)


def run_shares(run: Run, launches: list[Launch], clusters: int, translation: float) -> LaunchStats:
    """Run the shares of a launch. clusters: number in all shares. translation: seconds that the kernel's translation
    took.

    Raises what the first share that fails raises.
    """
    processes = processes_of(run.program, len(launches))
    progress = Progress(run.program.name, -(-clusters // processes), translation)
    if stores_active() is not None:
        stores_active().launches += 1
    children: list[_Child] = []
    try:
        children += [_Child(run, launches[first::processes]) for first in range(1, processes)]
        answers = [_run_some(run, launches[::processes], progress)]
        if not isinstance(answers[0][0], Exception):
            answers += [child.answers() for child in children]
    finally:
        for child in children:
            child.stop()
        progress.close()
    parts = []
    for share in range(len(launches)):
        own = answers[share % processes]
        part = own[share // processes]
        if isinstance(part, Exception):
            raise part
        parts.append(part)
    return _joined(run, parts)


def _joined(run: Run, parts: list[LaunchStats]) -> LaunchStats:
    """The counters of all shares, and what they say together."""
    total = parts[0]
    for part in parts:
        for kept in part.kept:
            kept.apply(run.gmem)
        part.kept = []
    touched = [share for part in parts for share in part.touched]
    for one, two in combinations(touched, 2):
        total.findings |= conflicts(one, two)
    for part in parts[1:]:
        total.merge(part)
    if run.check == "order":
        overlap = run.overlap
        overlap.seen = total.seen
        if total.seen.triggered:
            overlap.over(run.program.name, run.gmem, touched)
            if overlap.dependent and overlap.first:
                total.findings |= with_itself(touched)
    return total


def _run_some(run: Run, launches: Sequence[Launch], progress=None) -> list[LaunchStats | Exception]:
    """The outcomes of some shares, in order, up to the first that fails."""
    answers: list[LaunchStats | Exception] = []
    done = 0
    for launch in launches:
        try:
            shown = None if progress is None else lambda clusters, before=done: progress(before + clusters)
            stats, clusters = _run_share(run, launch, shown)
        except Exception as error:
            answers.append(error)
            break
        answers.append(stats)
        done += clusters
    return answers


def _run_share(run: Run, launch: Launch, progress) -> tuple[LaunchStats, int]:
    """Counters and clusters of one share."""
    stats, order = LaunchStats(), run.checker()
    seed = run.seed * max(launch.share[1], SEEDS_APART) + launch.share[0]
    machine = Machine(run.program, launch, run.gmem, seed, stats, order)
    machine.on_cluster_done = progress
    try:
        with machine.reductions or nullcontext():
            machine.run()
        if machine.reductions is not None:
            stats.kept = machine.reductions.kept
    except SimError as error:
        for text in stats.warnings.values():
            error.add_note(f"warning: {text}")
        errors = [] if order is None else [f for f in order.found.values() if not f.tolerated]
        if not errors or isinstance(error, OrderError):
            raise
        raise OrderError(errors, run.program.name) from error
    if order is not None:
        stats.findings = order.all_found()
        stats.seen = order.seen
        if run.check == "order" and (launch.share[1] > 1 or order.seen.triggered):
            stats.touched = [order.summary()]
    return stats, machine.done


class _Child:
    """Shares of a launch that run in a forked process."""

    def __init__(self, run: Run, launches: Sequence[Launch]):
        self._reading, writing = os.pipe()
        self._pid: int | None = os.fork()
        if self._pid:
            os.close(writing)
            return
        try:  # in any case, this process must not continue as its parent would
            os.close(self._reading)
            try:
                answers = [answer if isinstance(answer, LaunchStats | SimError | SeenReductions) else _strange(answer)
                           for answer in _run_some(run, launches)]  # fmt: skip
            except BaseException as error:  # the parent re-raises what the child cannot handle
                answers = [_strange(error)]
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answers, pipe)
        finally:
            os._exit(0)

    def answers(self) -> list[LaunchStats | Exception]:
        """Wait for the shares to end; returns the outcomes, up to the first that failed."""
        with os.fdopen(self._reading, "rb", closefd=False) as pipe:
            data = pipe.read()
        return pickle.loads(data) if data else [RuntimeError("a simulator process died without an answer")]

    def stop(self) -> None:
        """End the process, done or not (another share failed, or the user interrupts), and release it."""
        if self._pid is not None:
            os.close(self._reading)
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = None


def _strange(error: BaseException) -> RuntimeError:
    """An error that may not survive pickling to the parent, with its traceback."""
    text = "".join(traceback.format_exception(error))
    return RuntimeError(f"in a simulator process:\n{text}")
