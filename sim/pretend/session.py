"""A record of what ran on the pretended device: calls of compiled functions, reports and findings."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

from warpspec.sim import simulation
from warpspec.sim.clocks import record
from warpspec.sim.errors import SimError, TooManyCtas
from warpspec.sim.memory import keeping_originals
from warpspec.sim.order import stores
from warpspec.sim.order.findings import Finding, OrderError, grouped_text
from warpspec.sim.order.launches import Stream
from warpspec.sim.pretend.repeats import Repeats, tensors_of
from warpspec.sim.report import SimReport
from warpspec.sim.runs import CHECK_VARIABLE, one_stream, remember

SOURCE = re.compile(r"from (\S+:\d+)")  # in a warning: lines of source


@dataclass
class Session:
    """Settings of the runs, and what they found.

    seed, seeds, check: as `sim.run` takes them. collect: findings of the order checker are kept and the caller goes on;
    False: they are raised. report: all launches. errors: what the checker found. calls: of compiled functions. seconds:
    in the simulator.
    """

    seed: int = 0
    seeds: int | None = None
    check: str | None = None
    collect: bool = True
    report: SimReport = field(default_factory=SimReport)
    errors: list[OrderError] = field(default_factory=list)
    calls: int = 0
    seconds: float = 0.0
    failed: SimError | None = None
    stream: Stream = field(default_factory=Stream)
    repeats: Repeats = field(default_factory=Repeats)

    def torch_runs(self) -> None:
        """Note that torch runs a kernel of its own, which overlaps neither those before it nor those after it."""
        self.stream = Stream()

    def call(self, compiled: object, args: tuple, kwargs: dict) -> SimReport:
        """Run a compiled function in the simulator. Returns the report of its launches."""
        self.calls += 1
        start = time.monotonic()
        try:
            several = (self.seeds or 1) > 1  # each run of a call would follow the one before it
            stream = nullcontext() if several else one_stream(self.stream)
            with torch._C.DisableTorchFunction(), _disable_current_modes(), stream:
                report = self._run(compiled, args, kwargs)
        except OrderError as error:
            if not isinstance(error.launch, SimReport) or not self.collect:
                self.failed = error
                raise
            self.errors.append(error)
            report = error.launch
        except TooManyCtas:  # the script's to handle: some try how many fit
            raise
        except SimError as error:
            self.failed = error
            raise
        finally:
            self.seconds += time.monotonic() - start
        self.report = self.report + report
        return report

    def _run(self, compiled: object, args: tuple, kwargs: dict) -> SimReport:
        """Run a compiled function, or give it the results of a call that it repeats."""
        options = dict(seed=self.seed, seeds=self.seeds, check=self.check)
        checked = self.check or os.environ.get(CHECK_VARIABLE)
        watched = checked or stores.active() is not None or record.captures()
        given = None if watched or (self.seeds or 1) > 1 else tensors_of(args, kwargs, record.active())
        if given is None or not self.repeats.expects(compiled, given):
            return simulation.run(compiled, *args, **options, **kwargs)
        report = self.repeats.find(compiled, given)
        if report is None:
            with keeping_originals() as originals:
                report = simulation.run(compiled, *args, **options, **kwargs)
            self.repeats.add(compiled, given, originals, report)
        return remember(report)

    @property
    def findings(self) -> list[Finding]:
        """All findings of the order checker, without repetitions."""
        return list(dict.fromkeys(finding for error in self.errors for finding in error.findings))

    def summary(self) -> str:
        """A text that says what ran and what was found."""
        launches = self.report.launches
        kernels = dict.fromkeys(launch.function or launch.kernel for launch in launches)
        plural = "" if len(launches) == 1 else "es"
        lines = [
            f"warpspec.sim: {len(launches)} launch{plural} in {self.seconds:.1f} s: {', '.join(kernels) or 'none'}"
        ]
        if self.failed is not None:
            lines.append(f"stopped by {type(self.failed).__name__}, see above")
        if self.findings:
            lines.append(f"memory order: {len(self.findings)} finding{'s' * (len(self.findings) > 1)}")
            lines += [f"  {row}" for row in grouped_text(self.findings)]
        elif self.check and self.failed is None:
            lines.append("memory order: nothing found")
        lines += _warnings(text for launch in launches for text in launch.warnings)
        return "\n".join(lines)


def _warnings(texts: Iterable[str]) -> list[str]:
    """Warnings of a run, each kind between the same lines of source once."""
    alike: dict[tuple, list[str]] = {}
    for text in dict.fromkeys(texts):
        alike.setdefault((text.partition(" at PTX line")[0], *SOURCE.findall(text)), []).append(text)
    lines = []
    for first, *others in alike.values():
        lines.append(f"warning: {first}")
        if others:
            lines.append(f"    alike   {len(others)} more of these lines of source")
    return lines
