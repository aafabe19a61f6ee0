"""The decision whether keys and values in codes are dequantised by a launch of their own (``expand``), or by a
converter in the attention kernel."""

from __future__ import annotations

from warpspec.common.launch import Target
from warpspec.fmha.expand import expanded, expanding_bytes, leaves_out, may_expand, passes, wide_rows
from warpspec.fmha.plan import least_time
from warpspec.fmha.plan.choices import Choices
from warpspec.fmha.plan.scenarios import scenarios
from warpspec.fmha.problem import AttentionProblem

EMPTY = 0.17  # a key for which the first launch has room, and nothing to do, takes so much of another's time


def expands(choices: Choices, problem: AttentionProblem, target: Target) -> bool:
    """Whether keys and values are dequantised first: whether that launch and attention to 16-bit keys are expected to
    take less time than attention to codes. choices: the target architecture's.

    Raises UnsupportedProblem naming what the kernel does not support.
    """
    times = expected_times(choices, problem, target)
    return times is not None and times[0] < times[1]


def likely_ways(
    choices: Choices, problem: AttentionProblem, target: Target, margin: float
) -> tuple[bool, ...]:
    """The answers of ``expands`` whose expected time is at most ``1 + margin`` times the least; its own is among them.
    Arguments and errors as for ``expands``."""
    times = expected_times(choices, problem, target)
    if times is None:
        return (False,)
    most = (1 + margin) * min(times)
    return tuple(first for first, time in zip((True, False), times, strict=True) if time <= most)


def expected_times(choices: Choices, problem: AttentionProblem, target: Target) -> tuple[float, float] | None:
    """Expected microseconds if keys and values are dequantised first, and if the attention kernel reads them as they
    are; None where only the latter is possible. Arguments and errors as for ``expands``."""
    if choices.expanding is None or not may_expand(problem):
        return None
    choices.config.check(problem, target)
    if not choices.converts(problem):
        return None
    cases, left = scenarios(problem), problem.window_left if leaves_out(problem) else None
    each = (
        requests.count * (requests.keys if left is None else min(requests.keys, left + requests.queries))
        for case in cases
        for requests in case
    )
    batch, room = wide_rows(problem)
    if left is not None:
        room = min(room, left + (problem.least_q if problem.requests.packed_q else problem.seq_q))
    keys = sum(each) / len(cases)
    keys += EMPTY * max(batch * room - keys, 0)
    first = expanding_bytes(problem, keys) / (target.speeds.copy * 1e6)
    attention = least_time(choices, expanded(problem), target)
    return first + passes(problem) * (choices.expanding + attention), least_time(choices, problem, target)
