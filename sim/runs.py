"""Shared by all ways to run kernels: options and their checks, runs under several seeds, the last report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager

from warpspec.sim.errors import ScheduleDependence, SimError, WrongResult
from warpspec.sim.memory import keeping_originals
from warpspec.sim.order.findings import OrderError
from warpspec.sim.order.launches import Stream
from warpspec.sim.order.stores import recording_stores
from warpspec.sim.outcomes import Outcomes
from warpspec.sim.report import SimReport

CHECK_VARIABLE = "WARPSPEC_SIM_CHECK"  # environment variable: the check of runs that do not set one

_last: SimReport | None = None
_stream: Stream | None = None


def run_with_options(
    once: Callable[[int, str | None], SimReport],
    arguments: Callable[[], Mapping[str, object]],
    *,
    seed: int,
    seeds: int | None,
    check: str | None,
    timeline: str | os.PathLike | None,
) -> SimReport:
    """Run `once(seed, check)` with the options of `sim.run`; remembers and returns the (last) report.

    arguments: gives the tensors that runs write, by name; they are compared where there are several `seeds`.
    Raises ValueError for an option that is out of range, ScheduleDependence, and what `once` raises.
    """
    check = checked_options(seed, seeds, check)
    if seeds is None:
        report = once(seed, check)
    else:
        report = _run_seeds(once, Outcomes(dict(arguments())), range(seed, seed + seeds), check)
    if timeline is not None:
        report.timeline(timeline)
    return remember(report)


def checked_options(seed: int, seeds: int | None, check: str | None) -> str | None:
    """Check the options of runs; returns the check, None replaced by the environment's. Raises ValueError."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r}; a non-negative int is needed")
    if seeds is not None and (isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1):
        raise ValueError(f"seeds is {seeds!r}; a positive int or None is needed")
    name = "check"
    if check is None:
        name, check = CHECK_VARIABLE, os.environ.get(CHECK_VARIABLE) or None
    if check not in (None, "order"):
        allowed = 'None or "order"' if name == "check" else '"order" or nothing'
        raise ValueError(f"{name} is {check!r}; {allowed} is needed")
    return check


def _run_seeds(once, outcomes: Outcomes, seeds: range, check: str | None) -> SimReport:
    """Run under several seeds and compare the resulting tensor arguments."""
    for seed in seeds:
        outcomes.restore()
        try:
            if outcomes.originals or len(seeds) == 1:
                report = once(seed, check)
            else:
                with keeping_originals() as outcomes.originals:
                    report = once(seed, check)
        except SimError as error:
            if len(seeds) > 1:
                error.add_note(f"under seed {seed}, the number {seed - seeds.start + 1} of {len(seeds)}")
            raise
        try:
            outcomes.compare(seed)
        except ScheduleDependence as error:
            for text in dict.fromkeys(text for launch in report.launches for text in launch.warnings):
                error.add_note(f"warning: {text}")
            if check is None:
                _say_what_races(error, once, outcomes, seed)
            _say_which_store(error, once, outcomes, seed)
            raise
    return report


def _say_what_races(error: ScheduleDependence, once, outcomes: Outcomes, seed: int) -> None:
    """Add the order checker's findings in a run of the seed to an error, and leave the tensors unchanged."""
    results = outcomes.now()
    outcomes.restore()
    try:
        once(seed, "order")
        error.add_note(
            'check="order" finds nothing: not a missing barrier, perhaps a wrong phase or byte count'
        )
    except OrderError as order:
        error.add_note(f'check="order" finds: {order}')
    except SimError as other:
        error.add_note(f'check="order" stops with {type(other).__name__}: {other}')
    finally:
        outcomes.put(results)


def _say_which_store(error: ScheduleDependence, once, outcomes: Outcomes, seed: int) -> None:
    """Add to an error which store of a run of the seed left what is not the first run's, and leave the tensors as they
    were."""
    results = outcomes.now()
    outcomes.restore()
    try:
        with recording_stores() as stores:
            once(seed, None)
        outcomes.against_first(stores)
    except WrongResult as wrong:
        error.add_note(f"the first store that differs, under seed {seed}: {wrong}")
    except SimError:
        pass  # what it says has been said
    finally:
        outcomes.put(results)


def stream_of_run() -> Stream:
    """The stream that a run's launches go into: that of `one_stream`, or one of the run's own."""
    return _stream or Stream()


@contextmanager
def one_stream(stream: Stream | None = None):
    """A context whose runs launch into one stream with nothing between them, as far as `check="order"` is concerned.

    A launch with the attribute programmatic_stream_serialization may then overlap launches of the run before. Outside
    of this context, only launches of the same run may overlap. stream: goes on with an earlier context's.
    """
    global _stream
    before, _stream = _stream, _stream or stream or Stream()
    try:
        yield
    finally:
        _stream = before


def last_report() -> SimReport | None:
    """The report of the latest successful `run` in this process, or None."""
    return _last


def remember(report: SimReport) -> SimReport:
    """Set the report of several joined runs as `last_report`; returns it."""
    global _last
    _last = report
    return report
