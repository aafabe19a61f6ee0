"""What a call of attention spends beyond the time of its bytes or products, by the plans' model of the time.

Parts are taken out of the model one after another; what the model's time shrinks by is the part's. What then still is
missing to the bytes' or products' time is the steady state's, whose largest term says what binds it.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from warpspec.common.hardware import Speeds, gpu_model
from warpspec.common.launch import Target
from warpspec.fmha.launch import ATTENTION
from warpspec.fmha.plan import Candidate, candidates, cost, plan_of
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.plan.scenarios import Requests
from warpspec.fmha.plan.work import Tiling, Work
from warpspec.fmha.problem import AttentionProblem

from .gpu_bench import table
from .plan_calls import describe
from .sweep_calls import OURS
from .sweep_regret import problem_of
from .sweep_shapes import from_json

LARGE = 100e6  # bytes
NOTHING = 1e-9  # for constants by which the model divides, and logarithms of which are taken
# Part: constants without it.
WITHOUT = {
    "second launch": {
        "combine": NOTHING,
        "combine_bytes": 1 / NOTHING,
        "combine_round": NOTHING,
        "scan": NOTHING,
        "scan_requests": NOTHING,
        "join": NOTHING,
        "join_bytes": 1 / NOTHING,
        "line": 1.0,
    },
    "launch": {"launch": NOTHING, "alone": NOTHING, "partition_scan": NOTHING},
    "starts and ends": {"tile": NOTHING, "tile_row": NOTHING, "chunk": NOTHING, "queue": NOTHING, "idle": NOTHING},
    "masks": {"mask": NOTHING},
}  # fmt: skip
PARTS = (*WITHOUT, "imbalance", "steady state", "not explained")


def balanced(work: Work, target: Target, tiling: Tiling) -> Work:
    """The work cut into so many equal tiles that every CTA gets as many."""
    resident = target.sm_count * tiling.ctas_per_sm
    share = resident * 64 / max(work.tiles, 1)  # 64 tiles a CTA: no rest of a round counts
    mean = work.kv / max(work.tiles, 1) / max(share, 1)
    tiles = max(work.tiles, resident * 64)
    return work._replace(tiles=tiles, longest=mean, shortest=mean, spread=0.0, idle=0.0)


def parts(
    problem: AttentionProblem,
    requests: Sequence[Requests],
    candidate: Candidate,
    target: Target,
    measured: float,
    limit: float,
) -> dict[str, float]:
    """Microseconds of each of PARTS; with ``limit`` their sum is ``measured``. requests: the call's true ones.
    measured: microseconds that it took. limit: those of its bytes or products."""
    c = ATTENTION.of(target.architecture).CHOICES.costs
    tiling, way, splits = candidate.tiling, candidate.way, candidate.splits
    work = cost.work_of(problem, tiling, requests)
    found, before = {}, cost.microseconds(work, tiling, way, splits, target, c)
    found["not explained"] = measured - before
    for name, changed in WITHOUT.items():
        c = replace(c, **changed)
        time = cost.microseconds(work, tiling, way, splits, target, c)
        found[name], before = before - time, time
    time = cost.microseconds(balanced(work, target, tiling), tiling, Way.PERSISTENT, 1, target, c)
    found["imbalance"], found["steady state"] = before - time, time - limit
    return {name: found[name] for name in PARTS}


def parts_of_results(found: dict) -> Iterator[tuple[dict, float, dict[str, float]]]:
    """(result, microseconds of its bytes or products, parts) of the calls over LARGE bytes in a file of
    ``bench_sweep.py --regret --json``."""
    model = gpu_model(found["header"].split(",")[1].strip())
    for result in found["results"]:
        measured, limit = result["times"].get(OURS), max(result["bytes_us"], result["flops_us"])
        if (
            measured is None
            or "chosen" not in result
            or result["bytes_us"] * found["speeds"]["copy"] < LARGE / 1e6
        ):
            continue
        shape = from_json(result["shape"])
        problem = problem_of(shape)
        target = replace(Target.of_model(model), speeds=Speeds(**found["speeds"]))
        choices = ATTENTION.of(target.architecture).CHOICES
        for candidate in candidates(choices, problem, target):
            plan = plan_of(choices, problem, target, candidate)
            if describe(plan)[:8] == result["chosen"][:8]:  # whatever the section
                requests = [Requests(1, q, k) for q, k in zip(shape.queries, shape.keys, strict=True)]
                yield result, limit, parts(problem, requests, candidate, target, measured, limit)
                break


def parts_table(files: Sequence[dict], share: float = 0.9, markdown: bool = False) -> str:
    """A table, by kind and by what limits them, of calls over LARGE bytes that take longer than their limit /
    ``share``: the mean of their shares, and the mean of each part in percent of the time. files: contents of
    ``parts_of_results``."""
    rows = defaultdict(list)
    for result, limit, of in itertools.chain.from_iterable(map(parts_of_results, files)):
        time = result["times"][OURS]
        if limit < share * time:
            which = "bytes" if limit == result["bytes_us"] else "products"
            rows[result["kind"], which].append([limit / time, *(us / time for us in of.values())])
    columns = ("kind", "limit", "calls", *(f"{name} %" for name in ("share", *PARTS)))
    lines = []
    for (kind, which), values in rows.items():
        means = [f"{100 * statistics.mean(column):.0f}" for column in zip(*values, strict=True)]
        lines.append([kind, which, len(values), *means])
    return table(columns, lines, markdown=markdown)
