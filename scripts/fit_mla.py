"""Fits the constants by which plans of MLA's decode are chosen to results of bench_mla.py, and says what choices lose.

    python scripts/fit_mla.py FILE ... --judge [FILE ...]     fit to the first, judge what that loses on the others
    python scripts/fit_mla.py --judge FILE ...                what the constants lose as they are

FILE: of ``bench_mla.py --ways all --write``; packed by xz or not. A kernel's constants (``latent.gathered.cost``, and
``fmha.sm90.choices.LATENT_COSTS`` over rows of bf16) are moved at random, as long as the time is, and kept where that
is better: less lost by the choice among the ways that were timed, losses above 5% counting half as much again, times
closer to those that were measured, and constants close to what they were.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from fit_plans import text_of
from shared import mla_calls, mla_plans
from shared.mla_draws import BF16, E4M3, from_json

from warpspec.common.hardware import MODELS
from warpspec.common.launch import Target
from warpspec.fmha.plan.cost import Constants
from warpspec.fmha.sm90.choices import LATENT_COSTS
from warpspec.latent.gathered import cost, launch

KERNELS = {
    **cost.COSTS,
    **{f"{rows}, clusters": found for rows, found in cost.OF_CLUSTERS.items()},
    "e4m3, few rows": cost.TRANSPOSED,
    "e4m3, q in e4m3": cost.RAW,
    mla_plans.KERNEL: LATENT_COSTS,
}
Costs = cost.Costs | Constants
MOVED = tuple(name for name in cost.Costs._fields if name != "overhead")  # which is the kernel's
LARGE, WEIGHT, FAR, CLOSENESS = 0.05, 0.5, 0.3, 0.3  # of losses; of errors of times
PULL = 0.002  # for each factor of e by which a constant moves, squared


class Timed(NamedTuple):
    """A call that was timed in several ways. kernel: of KERNELS. work: tasks, KV tiles of the longest, and rows.
    mean: KV tiles of a task on average. times: microseconds of each number of splits, 0 for shared out."""

    name: str
    kernel: str
    work: tuple[int, int, int]
    ctas: int
    known: bool
    mean: float
    times: dict[int, float]


def loaded(paths: list[Path]) -> list[Timed | mla_plans.Planned]:
    found = []
    for path in paths:
        for result in map(json.loads, text_of(path).splitlines()):
            call = from_json(result["call"])
            target = Target.of_model(next(gpu for gpu in MODELS if gpu.name in result["on"]))
            if call.rows == BF16:
                found.append(mla_plans.planned(call, result["times"], target))
                continue
            problem = mla_calls.gathered_problem(call)
            with mock.patch.object(launch, "takes_line", return_value=False) as asked:
                launch.make_plan.__wrapped__(problem, target)
            _, _, _, tasks, tiles, _ = asked.call_args.args
            lengths = call.keys if call.rows == E4M3 else call.lists
            mean = sum(-(-keys // mla_calls.PAGE) for keys in lengths) / len(lengths)
            times = {number_of(name): us for name, us in result["times"].items()}
            work = (tasks, tiles, problem.tokens * problem.heads)
            costs = launch.costs_of(problem, target)
            kernel = next(name for name, own in KERNELS.items() if own is costs)
            known = not any(problem.lengths)
            found.append(Timed(call.name, kernel, work, target.sm_count, known, mean, times))
    return found


def number_of(way: str) -> int:
    """Number of splits of a way's name, 0 for a line."""
    named = {"line": 0, "whole": 1}
    return named[way] if way in named else int(way.removeprefix("split"))


def expected(one: Timed | mla_plans.Planned, costs: Costs, splits: int | str) -> float:
    """The model's microseconds, as far as the host knows the lengths. splits: key of ``times``."""
    if one.kernel == mla_plans.KERNEL:
        return math.exp(one.logarithm(costs, splits))
    tasks, tiles, _ = one.work
    if splits:
        return cost.expected_equal(costs, *one.work, splits, one.ctas, one.known)
    if tasks > cost.MOST_TASKS * one.ctas:
        return math.inf
    return cost.expected_shared(costs, tasks, tiles, one.ctas, one.known)


def by_lengths(one: Timed, costs: cost.Costs, splits: int) -> float:
    """The model's microseconds, by true lengths."""
    tasks, tiles, _ = one.work
    if splits:
        return cost.equal_time(costs, *one.work, splits, one.ctas, one.mean)
    return cost.shared_time(costs, tasks, one.mean, tiles, one.ctas)


def loss(one: Timed | mla_plans.Planned, costs: Costs) -> float:
    """Logarithm of the chosen way's time over the best one's."""
    chosen = min(one.times, key=lambda splits: expected(one, costs, splits))
    return math.log(one.times[chosen] / min(one.times.values()))


def error(one: Timed | mla_plans.Planned, costs: Costs) -> float:
    """Mean square of the logarithm of the model's time, by true lengths, over the measured one, slow ways less."""
    if one.kernel == mla_plans.KERNEL:
        return one.error(costs)
    best, total, weights = min(one.times.values()), 0.0, 0.0
    for splits, us in one.times.items():
        found = by_lengths(one, costs, splits)
        weight = (best / us) ** 2
        total += weight * min(abs(math.log(found / us)), FAR) ** 2
        weights += weight
    return total / weights


def badness(calls: list, costs: Costs) -> float:
    losses = [loss(one, costs) for one in calls]
    more = WEIGHT * sum(max(found - LARGE, 0) for found in losses)
    return (sum(losses) + more + CLOSENESS * sum(error(one, costs) for one in calls)) / len(calls)


def fit(calls: list, start: Costs, seconds: float) -> Costs:
    draw, best, until = random.Random(0), start, time.monotonic() + seconds
    names, least = [name for name in moved_names(start) if getattr(start, name)], badness(calls, start)
    while time.monotonic() < until:
        width, some = draw.choice((0.05, 0.2, 0.5)), draw.sample(names, draw.choice((1, 1, 2, 3)))
        moved = changed(best, {name: getattr(best, name) * math.exp(draw.gauss(0, width)) for name in some})
        far = sum(math.log(getattr(moved, name) / getattr(start, name)) ** 2 for name in names)
        found = badness(calls, moved) + PULL * far
        if found < least:
            best, least = moved, found
    return best


def moved_names(costs: Costs) -> tuple[str, ...]:
    return mla_plans.MOVED if isinstance(costs, Constants) else MOVED


def changed(costs: Costs, numbers: dict[str, float]) -> Costs:
    if isinstance(costs, Constants):
        return replace(costs, **numbers)
    costs = costs._replace(**numbers)
    return costs._replace(evens=min(costs.evens, 1.0))


def judged(calls: list, costs: Costs) -> str:
    losses = {one.name: loss(one, costs) for one in calls}
    most = max(losses, key=losses.get)
    mean = math.exp(sum(losses.values()) / len(losses)) - 1
    close = math.sqrt(sum(error(one, costs) for one in calls) / len(calls))
    where = f"at most {math.exp(losses[most]) - 1:.1%} ({most})"
    return f"{len(calls)} calls lose {mean:.2%}, {where}; times off by {close:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=[])
    parser.add_argument("--judge", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each kernel's fit")
    options = parser.parse_args()
    if not options.files + options.judge:
        parser.error("needs files of bench_mla.py")
    given, judges = loaded(options.files), loaded(options.judge)
    for kernel, costs in KERNELS.items():
        fitted, held = ([one for one in calls if one.kernel == kernel] for calls in (given, judges))
        if fitted:
            print(f"{kernel}, fitted: {judged(fitted, costs)}", flush=True)
            costs = fit(fitted, costs, options.seconds)
            named = {name: getattr(costs, name) for name in moved_names(costs)}
            print("  " + ", ".join(f"{name}={number:.3g}" for name, number in named.items()))
            print(f"  then {judged(fitted, costs)}")
        if held:
            print(f"{kernel}, judged: {judged(held, costs)}", flush=True)


if __name__ == "__main__":
    main()
