"""Fits the constants of ``latent.gathered.cost`` to results of bench_mla.py, and says what choices lose on them.

    python scripts/fit_mla.py FILE ... --judge [FILE ...]     fit to the first, judge what that loses on the others
    python scripts/fit_mla.py --judge FILE ...                what the constants lose as they are

FILE: of ``bench_mla.py --ways all --write``, over rows of e4m3 or V3.2; packed by xz or not. A kernel's constants are
moved at random, as long as the time is, and kept where that is better: less lost by the choice among the ways that were
timed, losses above 5% counting half as much again, and times closer to those that were measured.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from fit_plans import text_of
from shared import mla_calls
from shared.mla_draws import E4M3, from_json

from warpspec.common.hardware import MODELS
from warpspec.common.launch import Target
from warpspec.latent.gathered import cost, launch

KERNELS = {
    **cost.COSTS,
    **{f"{rows}, clusters": found for rows, found in cost.OF_CLUSTERS.items()},
    "e4m3, few rows": cost.TRANSPOSED,
}
MOVED = tuple(name for name in cost.Costs._fields if name != "overhead")  # which is the kernel's
LARGE, WEIGHT, FAR, CLOSENESS = 0.05, 0.5, 0.3, 0.3  # of losses; of errors of times


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


def loaded(paths: list[Path]) -> list[Timed]:
    found = []
    for path in paths:
        for result in map(json.loads, text_of(path).splitlines()):
            call = from_json(result["call"])
            model = next(gpu for gpu in MODELS if gpu.name in result["on"])
            target, problem = Target.of_model(model), mla_calls.gathered_problem(call)
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


def expected(one: Timed, costs: cost.Costs, splits: int) -> float:
    """The model's microseconds, as far as the host knows the lengths."""
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


def loss(one: Timed, costs: cost.Costs) -> float:
    """Logarithm of the chosen way's time over the best one's."""
    chosen = min(one.times, key=lambda splits: expected(one, costs, splits))
    return math.log(one.times[chosen] / min(one.times.values()))


def error(one: Timed, costs: cost.Costs) -> float:
    """Mean square of the logarithm of the model's time, by true lengths, over the measured one, slow ways less."""
    best, total, weights = min(one.times.values()), 0.0, 0.0
    for splits, us in one.times.items():
        found = by_lengths(one, costs, splits)
        weight = (best / us) ** 2
        total += weight * min(abs(math.log(found / us)), FAR) ** 2
        weights += weight
    return total / weights


def badness(calls: list[Timed], costs: cost.Costs) -> float:
    losses = [loss(one, costs) for one in calls]
    more = WEIGHT * sum(max(found - LARGE, 0) for found in losses)
    return (sum(losses) + more + CLOSENESS * sum(error(one, costs) for one in calls)) / len(calls)


def fit(calls: list[Timed], start: cost.Costs, seconds: float) -> cost.Costs:
    draw, best, until = random.Random(0), start, time.monotonic() + seconds
    least = badness(calls, best)
    while time.monotonic() < until:
        names = draw.sample(MOVED, draw.choice((1, 1, 2, 3)))
        width = draw.choice((0.05, 0.2, 0.5))
        moved = best._replace(
            **{name: getattr(best, name) * math.exp(draw.gauss(0, width)) for name in names}
        )
        moved = moved._replace(evens=min(moved.evens, 1.0))
        found = badness(calls, moved)
        if found < least:
            best, least = moved, found
    return best


def judged(calls: list[Timed], costs: cost.Costs) -> str:
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
            print(f"  {', '.join(f'{number:.3g}' for number in costs)}\n  then {judged(fitted, costs)}")
        if held:
            print(f"{kernel}, judged: {judged(held, costs)}", flush=True)


if __name__ == "__main__":
    main()
