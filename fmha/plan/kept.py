"""Plans that were timed on this machine's GPU, kept on disk (``fmha.tuning``).

A kept plan applies to calls with an equal ``AttentionProblem`` on a GPU with the same name. The file holds the fields
of the candidate, so another version of the candidates finds the candidate again or ignores the file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import torch

from warpspec.common.disk_cache import DiskCache
from warpspec.common.hardware import MIB
from warpspec.common.launch import Target
from warpspec.fmha.plan import Plan, expectation, plan_of
from warpspec.fmha.plan.candidates import Candidate, candidates
from warpspec.fmha.plan.choices import Choices
from warpspec.fmha.problem import AttentionProblem

ROUNDS = 9  # rounds in which each plan is launched, in turn
KEPT = DiskCache("plans", limit=16 * MIB)
# That new calls time; 0: they time none.
plans_wanted: ContextVar[int] = ContextVar("plans_wanted", default=0)


def name_of(problem: AttentionProblem, target: Target) -> str:
    """Name of the file with the plan for this problem on this GPU."""
    compared = [
        field.name for field in dataclasses.fields(problem) if field.compare and field.name != "device"
    ]
    gpu = torch.cuda.get_device_name(target.device) if torch.cuda.is_available() else ""
    about = [str(getattr(problem, name)) for name in compared], compared, gpu, target.arch, target.sm_count
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def fields_of(candidate: Candidate) -> list:
    """A candidate's fields as JSON values."""
    shape = list(dataclasses.astuple(candidate.shape))
    return [shape, list(candidate.tiling), candidate.way.name, candidate.splits]


@functools.lru_cache(maxsize=4096)
def kept_plan(choices: Choices, problem: AttentionProblem, target: Target) -> Plan | None:
    """The plan that was timed fastest; None where none was, or where it is no candidate any more. choices: the
    target architecture's."""
    content = KEPT.read(name_of(problem, target)) if target.native else None
    if content is None:
        return None
    wanted = json.loads(content)
    for candidate in candidates(choices, problem, target):
        if fields_of(candidate) == wanted:
            return plan_of(choices, problem, target, candidate)
    return None


def plans_to_time(problem: AttentionProblem, target: Target) -> int:
    """Number of plans that a new call has to time."""
    wanted = plans_wanted.get()
    if not wanted or not target.native or torch.cuda.is_current_stream_capturing():
        return 0
    return 0 if name_of(problem, target) in KEPT else wanted


def keep_fastest(
    choices: Choices,
    problem: AttentionProblem,
    target: Target,
    plans: int,
    launching: Callable[[Plan], Callable],
) -> None:
    """Time the ``plans`` plans with the least predicted time, and keep the fastest.

    launching: takes a plan, and returns a function without arguments that launches it.
    """
    time, found = expectation(choices, problem, target), {}
    for candidate in sorted(candidates(choices, problem, target), key=time):
        found.setdefault(plan_of(choices, problem, target, candidate), candidate)
        if len(found) == plans:
            break
    times = launch_times([launching(plan) for plan in found], target)
    fastest = list(found.values())[times.index(min(times))]
    KEPT.write(name_of(problem, target), json.dumps(fields_of(fastest)).encode())
    kept_plan.cache_clear()


def launch_times(launches: Sequence[Callable], target: Target) -> list[float]:
    """Median milliseconds of each launch. The launches take turns, and L2 holds none of their data."""
    other = torch.empty(2 * target.l2_bytes, dtype=torch.uint8, device=torch.device("cuda", target.device))
    events = [[] for _ in launches]
    for round_ in range(1 + ROUNDS):  # the first one warms up
        for launch, found in zip(launches, events, strict=True):
            other.fill_(round_)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            end.record()
            found.append((start, end))
    torch.cuda.synchronize(target.device)
    return [statistics.median(start.elapsed_time(end) for start, end in found[1:]) for found in events]
