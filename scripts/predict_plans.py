"""Which plan of an attention call the simulator would choose, of those that a GPU has timed, and what that loses.

    python scripts/predict_plans.py TRACES [--seed N] [--problems N] [--plans N] [--workers N] [--seconds N]
    python scripts/predict_plans.py TRACES --predict OUT.json ...
    python scripts/predict_plans.py --list

docs/data has the times of many plans of random problems: calls in a CUDA graph, one after the other
(``collect_plans.py``), or in turn (``bench_sweep.py --regret``). Problems are drawn from these; of each, the fastest
plan that today's code has and others at random run in the simulator, a few clusters of each kernel, and leave their
traces in the folder TRACES. These are then timed for the GPU that the plans were timed on. Nothing needs a GPU.
OUT.json: a problem a row with what was measured and predicted, in microseconds, for ``clock_errors.py --plans``.

A call's prediction is that of its kernels without the launch that the table of constants has, which is ncu's, and with
the time of an empty kernel in a graph, which files of plans say.
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fit_plans
import torch
from shared.plan_calls import describe, planned_call
from shared.sweep_calls import OURS, attention_inputs
from shared.sweep_regret import PLAN, problem_of
from shared.sweep_shapes import from_json

from warpspec import sim
from warpspec.common.hardware import MODELS
from warpspec.common.launch import Target, simulating
from warpspec.fmha.launch import ATTENTION
from warpspec.fmha.plan import Candidate, Plan, plan_of
from warpspec.fmha.plan.candidates import partitions_fit
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.problem import AttentionProblem
from warpspec.sim.clocks.chips import chip, table_digest
from warpspec.sim.clocks.record import captured
from warpspec.sim.clocks.store import load, save
from warpspec.sim.clocks.waves import Grid

DATA = Path(__file__).resolve().parent.parent / "docs" / "data"
MOST_BYTES = 4e8  # of a problem's tensors, which the host must fill
PROBLEMS, PLANS, SAMPLE = 40, 5, 3
TINY_US = 1.0  # of an empty kernel in a graph, where a file does not say it
LEAST = 3  # plans of a problem that are worth a choice
SECTION = 8  # place of a section of tiles in a plan's description, which today's plan need not share


class Timed(NamedTuple):
    """A problem whose plans a GPU has timed. number: of the problem among all; chip: of the model; tiny_us: of an empty
    kernel in a graph; line: as in the file."""

    number: int
    chip: str
    tiny_us: float
    line: dict


def timed_problems() -> Iterator[Timed]:
    """All problems of docs/data of which three plans or more were timed, in order."""
    number = 0
    for path in sorted(DATA.glob("*-plans-*.jsonl.xz")):
        about, lines = fit_plans.timings(path)
        for line in lines:
            times = {
                plan: us
                for plan, us in line["times"].items()
                if plan != "flash" and not _stale(json.loads(plan), about["header"])
            }
            if len(times) >= LEAST:
                yield Timed(
                    number, _gpu(about["header"]), about.get("tiny_us", TINY_US), line | {"times": times}
                )
            number += 1
    for path in sorted(DATA.glob("*-sweep-h*.json.xz")):
        sweep = json.loads(lzma.decompress(path.read_bytes()))
        for result in sweep["results"]:
            times = _times_of_plans(result)
            if len(times) >= LEAST:
                line = {"shape": result["shape"], "times": times}
                yield Timed(number, _gpu(sweep["header"]), TINY_US, line)
            number += 1


def _gpu(header: str) -> str:
    """The chip that a file's header names."""
    return "h200" if "H200" in header else "h100"


def _times_of_plans(result: dict) -> dict[str, float]:
    """Microseconds of the plans of a call of a sweep, the chosen one among them."""
    times = {
        name.removeprefix(PLAN): us
        for name, us in result.get("plans", {}).items()
        if name.startswith(PLAN + "[")
    }
    if times and result.get("chosen") and OURS in result["times"]:
        times[json.dumps(result["chosen"])] = result["times"][OURS]
    return times


def _stale(plan: list, header: str) -> bool:
    return len(plan) == SECTION + 1 and fit_plans.stale(plan[5], header)


def drawn(seed: int, problems: int, plans: int, only: str = "") -> list[tuple[Timed, list[str]]]:
    """(Problem, names of the plans to predict) of a GPU or of any: the fastest that today has, and others."""
    draw = random.Random(f"plans {seed}")
    small = [one for one in timed_problems() if only in one.chip and _shape(one).held_bytes <= MOST_BYTES]
    found = []
    for one in draw.sample(small, len(small)):
        if len(found) == problems:
            break
        problem, target = _problem_and_target(one)
        times = {name: us for name, us in one.line["times"].items() if plan_named(name, problem, target)}
        if len(times) < LEAST:
            continue
        best = min(times, key=times.get)
        others = sorted(set(times) - {best})
        found.append((one, [best, *draw.sample(others, min(plans - 1, len(others)))]))
    return found


def _problem_and_target(one: Timed) -> tuple[AttentionProblem, Target]:
    """A timed problem, with its tensors on the host, and the GPU that it was timed on."""
    problem = problem_of(_shape(one))
    object.__setattr__(problem, "device", torch.device("cpu"))
    return problem, Target.of_model(next(gpu for gpu in MODELS if gpu.name.lower() == one.chip))


def _shape(one: Timed):
    return from_json({"model": ""} | one.line["shape"])


def plan_named(name: str, problem: AttentionProblem, target: Target) -> Plan | None:
    """The plan of a description; None if today's code has no such kernel."""
    wanted = json.loads(name)
    schedule, splits, single = wanted[5], wanted[6], wanted[7] in (1, fit_plans.MANY_CTAS)
    way = Way.SINGLE if single else Way[schedule]
    if splits > 1:
        way = Way.PARTITIONS if schedule == "QUEUE" else Way.SPLIT
    choices = ATTENTION.of(target.architecture).CHOICES
    for shape, tiling in choices.tilings(problem):
        fits = way is not Way.PARTITIONS or partitions_fit(problem, tiling)
        if not fits or way not in choices.ways(problem, shape):
            continue
        plan = plan_of(choices, problem, target, Candidate(shape, tiling, way, splits))
        if _alike(describe(plan), wanted):
            return plan
    return None


def _alike(plan: list, wanted: list) -> bool:
    """Whether two descriptions are of one kernel; older ones do not say whether idle consumers leave the SM."""
    skips = len(wanted) == SECTION + 1 or plan[SECTION + 1] == wanted[SECTION + 1]
    return plan[:7] == wanted[:7] and skips


def path_of(one: Timed, name: str, folder: Path) -> Path:
    """The file of a plan's traces."""
    plain = name.replace('"', "")
    return folder / f"{one.number} {plain}.xz"


def record(one: Timed, name: str, folder: Path, sample: int) -> str:
    """Run a plan and keep its traces; says what was recorded."""
    problem, target = _problem_and_target(one)
    plan = plan_named(name, problem, target)
    with simulating(target), sim.recording(sample):
        call, inputs = planned_call(problem, target, plan), attention_inputs(_shape(one), "cpu")
        with captured() as traces:
            call(inputs)
    save(traces, path_of(one, name, folder))
    return f"{[len(trace.ctas) for trace in traces]} CTAs"


def predict(one: Timed, name: str, folder: Path) -> float:
    """Microseconds that a plan is predicted to take."""
    of = chip(one.chip)  # a cache of which has the code since the call before
    of = of.with_constants(code_hbm_latency=of.clocks("code_near_latency"))
    launches = [Grid(trace, of, cold=True).predict(of) for trace in load(path_of(one, name, folder))]
    return sum((launch.clocks - launch.overhead) / of.ghz / 1e3 + one.tiny_us for launch in launches)


def work(task: tuple) -> tuple[Timed, str, object, float]:
    """(Problem, the plan's name, the answer or why there is none, seconds that it took) of one task."""
    function, one, name, *more = task
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        found = function(one, name, *more)
    except Exception as error:  # one plan that fails must not lose the others
        found = f"{type(error).__name__}: {str(error)[:200]}"
    return one, name, found, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="?")
    parser.add_argument("--predict", type=Path, metavar="OUT.json")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chip", choices=("h100", "h200"), default="", help="problems of this GPU alone")
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--plans", type=int, default=PLANS, help="of a problem, the fastest among them")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="clusters of each kernel")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e6, help="wait for no answer after this many")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    found = drawn(options.seed, options.problems, options.plans, options.chip)
    if options.list:
        for one, names in found:
            print(one.number, one.chip, one.line["shape"])
            print(*(f"    {name}: {one.line['times'][name]}" for name in names), sep="\n")
        return
    folder = options.traces
    if folder is None:
        parser.error("the folder TRACES is missing")
    folder.mkdir(parents=True, exist_ok=True)
    every = [(one, name) for one, names in found for name in names]
    there = [path_of(one, name, folder).exists() for one, name in every]
    if options.predict:
        tasks = [(predict, *pair, folder) for pair, kept in zip(every, there, strict=True) if kept]
    else:
        recorded = zip(every, there, strict=True)
        tasks = [(record, *pair, folder, options.sample) for pair, kept in recorded if not kept]
    rows, until = {}, time.monotonic() + options.seconds
    constants = {name: table_digest(chip(name)) for name in ("h100", "h200")}
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=8) as pool:
        answers = pool.imap_unordered(work, tasks)
        for _ in tasks:
            try:
                one, name, answer, took = answers.next(max(0.1, until - time.monotonic()))
            except multiprocessing.TimeoutError:
                print("no time left", flush=True)
                break
            measured = one.line["times"][name]
            print(one.number, one.chip, name, measured, answer, f"[{took:.0f} s]", flush=True)
            if options.predict and isinstance(answer, float):
                row = {"seed": options.seed, "chip": one.chip, "shape": one.line["shape"], "plans": {}}
                row = rows.setdefault(str(one.number), row)
                row["plans"][name] = [measured, round(answer, 3)]
        pool.terminate()
    if options.predict:
        options.predict.write_text(json.dumps({"constants": constants, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
