"""Calls of MLA over bf16 rows that were timed in several ways, as ``fit_mla.py`` takes them: what the model of plans
expects of each way, by constants that are being fitted."""

from __future__ import annotations

import math
from typing import NamedTuple

from warpspec.common.launch import Target
from warpspec.fmha.plan import candidates
from warpspec.fmha.plan.cost import Constants, microseconds
from warpspec.fmha.plan.scenarios import scenarios
from warpspec.fmha.plan.work import work_of

from . import mla_calls
from .mla_draws import MlaCall

KERNEL = "bf16"
MOVED = (
    *("line", "chunk", "scan", "scan_requests", "add", "add_more", "add_rows"),
    *("uneven", "launch", "alone", "round_", "spread", "combine", "combine_bytes", "combine_round"),
    *("tile", "memory", "reading", "serial_mma", "mma"),
)
FAR, SLOW = 0.3, 4  # of errors; exponent of the weight of slow ways


class Planned(NamedTuple):
    """A call that was timed in several ways. works: of each way, its candidate and the work in each scenario. times:
    microseconds of each way."""

    name: str
    kernel: str
    target: Target
    works: dict[str, tuple]
    times: dict[str, float]

    def logarithm(self, costs: Constants, way: str) -> float:
        """Logarithm of the model's microseconds, over all lengths that requests may have (``plan.expectation``)."""
        one, works = self.works[way]
        weights = [1.0, *[costs.uneven] * (len(works) - 1)]
        found = (
            math.log(microseconds(work, one.tiling, one.way, one.splits, self.target, costs))
            for work in works
        )
        return sum(weight * each for weight, each in zip(weights, found, strict=True)) / sum(weights)

    def error(self, costs: Constants) -> float:
        """Mean square by which the logarithms of the ways' times are further apart than the model says, of slow ways
        less: how long all of them take follows from lengths that the host does not know."""
        best = min(self.times.values())
        off = {way: self.logarithm(costs, way) - math.log(us) for way, us in self.times.items()}
        weights = {way: (best / us) ** SLOW for way, us in self.times.items()}
        mean = sum(weights[way] * off[way] for way in off) / sum(weights.values())
        squares = (weights[way] * min(abs(off[way] - mean), FAR) ** 2 for way in off)
        return sum(squares) / sum(weights.values())


def planned(call: MlaCall, times: dict[str, float], target: Target) -> Planned:
    """A call whose ways took so many microseconds; of those that plans still choose among."""
    choices = mla_calls.attention_launch.ATTENTION.of(target.architecture).CHOICES
    problem, works = mla_calls.attention_problem(call), {}
    cases = scenarios(problem)
    for one in candidates(choices, problem, target):
        name = mla_calls.way_name(one)
        if name in times and name not in works:
            works[name] = one, [work_of(problem, one.tiling, case) for case in cases]
    return Planned(call.name, KERNEL, target, works, {name: times[name] for name in works})
