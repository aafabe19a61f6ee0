"""Fits the constants of ``fmha.plan.cost`` to timings, and says what its choices lose.

    python scripts/fit_plans.py FILE ... [--held N]     fit to the files, judged on the templates of number N modulo 4
    python scripts/fit_plans.py FILE ... --judge        of the constants as they are
    python scripts/fit_plans.py FILE ... --parts        what calls over 100 MB spend beyond their bytes or products

FILE: of ``collect_plans.py``, or of ``bench_sweep.py --regret --json``; packed by xz or not. Files whose plans do not
say whether idle consumers leave the SM are older than queues whose tiles are taken late and longest first: their QUEUE
timings are left out. So are splits in persistent CTAs where plans give each a CTA (``plan.has_cta_each``), and
partitions of requests of equal lengths, whose size the device chooses since.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from shared.plan_parts import parts_table
from shared.sweep_calls import OURS
from shared.sweep_regret import problem_of
from shared.sweep_report import best_peer
from shared.sweep_shapes import from_json

from warpspec.common.hardware import MODELS
from warpspec.common.launch import Target
from warpspec.fmha.plan import cost, has_cta_each
from warpspec.fmha.plan.cost import Constants, Way
from warpspec.fmha.plan.scenarios import Requests
from warpspec.fmha.plan.work import Tiling, Work, work_of

WAYS = list(Way)
MANY_CTAS = 99999
OLD_JOIN = "2026-11-24, NVIDIA H200"  # timings before pieces were joined by as many CTAs as now
L2_ROOM = Target.of_model(MODELS[0]).l2_room  # of an H200, and of an H100
COMMON = 0.7  # part of a problem's mean error that does not count: it is no candidate's


def text_of(path: Path) -> str:
    content = path.read_bytes()
    return (lzma.decompress(content) if path.suffix == ".xz" else content).decode()


def timings(path: Path) -> tuple[dict, list[dict]]:
    """What a file says about its GPU, and the timings of each problem, as ``collect_plans.py`` writes them."""
    text = text_of(path)
    if '"results"' not in text:
        about, *lines = map(json.loads, text.splitlines())
        return about, lines
    found, lines = json.loads(text), []
    for number, result in enumerate(found["results"]):
        if not result.get("plans") or OURS not in result["times"]:
            continue
        present = json.dumps(result["chosen"])
        times = {present: result["times"][OURS]}
        times |= {name[name.index("[") :]: us for name, us in result["plans"].items() if "[" in name}
        peer = best_peer(result)
        if peer is not None:
            times["flash"] = result["times"][peer]
        row = {"i": [number, 0], "shape": result["shape"], "present": result["chosen"], "times": times}
        lines.append(row)
    return found, lines


def stale(schedule: str, header: str) -> bool:
    """Whether a timing whose plan does not say if idle consumers leave the SM is of a kernel that is slower by now."""
    return schedule == "QUEUE" or (schedule == "LINE" and OLD_JOIN in header)


class Data:
    """Timings in columns."""

    def __init__(self, paths):
        self.row, self.us, self.names, self.meta, self.problems = [], [], [], [], []
        self.way, self.splits, work, tiling, bytes_us, sms = [], [], [], [], [], []
        for number, path in enumerate(paths):
            about, lines = timings(path)
            for line in lines:
                shape = from_json({"model": ""} | line["shape"])
                problem = problem_of(shape)
                requests = [Requests(1, q, k) for q, k in zip(shape.queries, shape.keys, strict=True)]
                index = len(self.meta)
                self.meta.append(
                    SimpleNamespace(
                        shape=shape,
                        file=number,
                        template=line["i"][0],
                        flash=line["times"].get("flash"),
                        present=json.dumps(line["present"]),
                    )
                )
                self.problems.append(problem)
                for name, us in line["times"].items():
                    if name == "flash":
                        continue
                    consumers, tile_n, stages, per_sm, pack, schedule, splits, ctas, _, *later = json.loads(
                        name
                    )
                    if not later and stale(schedule, about["header"]):
                        continue
                    skips, apart = bool(later and later[0]), len(later) > 1 and later[1]
                    parts, heads = 2 if problem.head_dim > 256 else 1, consumers if apart else 1
                    sizes = (consumers // parts // heads, 64, parts, tile_n, stages // heads)
                    t = Tiling(*sizes, per_sm * heads, pack, skips, heads)
                    way = Way[schedule]
                    if splits > 1:
                        way = Way.PARTITIONS if schedule == "QUEUE" else Way.SPLIT
                    if schedule == "PERSISTENT" and splits == 1 and ctas in (1, MANY_CTAS):
                        way = Way.SINGLE
                    persistent = ctas not in (1, MANY_CTAS)
                    if way is Way.SPLIT and persistent and has_cta_each(problem, way, t):
                        continue
                    if way is Way.PARTITIONS and len(set(shape.keys)) == 1:
                        continue
                    self.row.append(index)
                    self.us.append(us)
                    self.names.append(name)
                    self.way.append(WAYS.index(way))
                    self.splits.append(splits)
                    tiling.append(t)
                    of = work_of(problem, t, requests)
                    work.append(of._replace(masked=of.masked * about.get("mask", 1.0)))
                    bytes_us.append(about["speeds"]["copy"])
                    sms.append(132)
        self.row, self.us, self.way, self.splits = map(np.array, (self.row, self.us, self.way, self.splits))
        self.work = Work(*(np.array(column, float) for column in zip(*work, strict=True)))
        self.tiling = Tiling(*(np.array(column, float) for column in zip(*tiling, strict=True)))
        self.bytes_us, self.sms = np.array(bytes_us), np.array(sms, float)
        self.kind = np.array([self.meta[i].shape.kind for i in self.row])
        self.template = np.array([self.meta[i].template for i in self.row])

    def times(self, constants: Constants) -> np.ndarray:
        found = np.empty(len(self.us))
        for way in Way:
            some = self.way == WAYS.index(way)
            if some.any():
                work = Work(*(column[some] for column in self.work))
                tiling = Tiling(*(column[some] for column in self.tiling))
                target = SimpleNamespace(
                    sm_count=self.sms[some],
                    l2_room=L2_ROOM,
                    speeds=SimpleNamespace(copy=self.bytes_us[some]),
                )
                found[some] = cost.microseconds(work, tiling, way, self.splits[some], target, constants, np)
        return found


def fit(data: Data, start: Constants, taken: np.ndarray, steps: int = 60) -> Constants:
    """Least squares of the logarithm of times, by Levenberg and Marquardt; all constants stay positive."""
    names = [name for name, value in asdict(start).items() if value > 0]

    def constants(x):
        return replace(start, **dict(zip(names, map(float, np.exp(x)), strict=True)))

    number = np.unique(data.row[taken], return_inverse=True)[1]
    count = np.bincount(number)
    best = np.full(len(count), np.inf)
    np.minimum.at(best, number, data.us[taken])
    weight = 1 / (data.us[taken] / best[number])

    def residual(x):
        error = np.log(data.times(constants(x))[taken] / data.us[taken])
        error = (
            error - COMMON * (np.bincount(number, error * weight) / np.bincount(number, weight))[number]
        ) * weight
        return np.concatenate(
            [np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2 / 0.02) - 1) * 0.02), (x - x0) * 0.05]
        )

    x0 = x = np.log([getattr(start, name) for name in names])
    r = residual(x)
    damping = 1.0
    for _ in range(steps):
        jacobian = np.stack([(residual(x + 1e-4 * e) - r) / 1e-4 for e in np.eye(len(x))], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ r
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), -gradient)
            tried = residual(x + np.clip(step, -0.5, 0.5))
            if tried @ tried < r @ r:
                x, r, damping = x + np.clip(step, -0.5, 0.5), tried, damping / 3
                break
            damping *= 4
        else:
            break
    return constants(x)


def judge(data: Data, predicted: np.ndarray, only=None) -> None:
    """Prints errors, and regrets by kind."""
    error = np.log(predicted / data.us)
    groups = defaultdict(list)
    for i, row in enumerate(data.row):
        if only is None or only[i]:
            groups[row].append(i)
    regrets, present, flash = defaultdict(list), defaultdict(list), defaultdict(list)
    worst = []
    for row, members in groups.items():
        meta = data.meta[row]
        best = min(data.us[i] for i in members)
        chosen = min(members, key=lambda i: predicted[i])
        for kind in (meta.shape.kind, "all"):
            regrets[kind].append(data.us[chosen] / best)
            mine = [data.us[i] for i in members if data.names[i] == meta.present]
            if mine:
                present[kind].append(mine[0] / best)
            if meta.flash:
                flash[kind].append((meta.flash / best, meta.flash / data.us[chosen]))
        worst.append(
            (
                data.us[chosen] / best,
                meta.shape.name,
                data.names[chosen],
                data.us[chosen],
                data.names[min(members, key=lambda i: data.us[i])],
                best,
                predicted[chosen],
            )
        )
    for kind in regrets:
        some = [i for i in range(len(data.us)) if (only is None or only[i]) and kind in ("all", data.kind[i])]
        of = np.array(regrets[kind])
        text = f"{kind:12} {len(of)} problems, {len(some)} timings: error {np.std(error[some]):.3f} "
        text += f"(bias {np.mean(error[some]):+.3f}); regret mean {np.exp(np.mean(np.log(of))):.3f}, "
        text += f"p90 {np.quantile(of, 0.9):.3f}, worst {of.max():.2f}, above 3%: {np.mean(of > 1.03):.0%}"
        of = np.array(present[kind])
        text += f"; present mean {np.exp(np.mean(np.log(of))):.3f} p90 {np.quantile(of, 0.9):.3f} worst {of.max():.2f}"
        if flash[kind]:
            best, ours = np.array(flash[kind]).T
            text += f"; of {len(best)} with a peer below 0.97 with the best {np.mean(best < 0.97):.0%}, "
            text += f"with the chosen {np.mean(ours < 0.97):.0%}"
        print(text)
    worst.sort(reverse=True)
    for one in worst[:12]:
        print("   ", *one)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--held", type=int, default=None)
    parser.add_argument("--judge", action="store_true", help="fit nothing")
    parser.add_argument(
        "--parts", action="store_true", help="of large calls' times, by bench_sweep.py's files"
    )
    options = parser.parse_args()
    if options.parts:
        print(parts_table([json.loads(text_of(path)) for path in options.files], markdown=True))
        return
    data = Data(options.files)
    if options.judge:
        return judge(data, data.times(Constants()))
    held = data.template % 4 == options.held if options.held is not None else np.zeros(len(data.us), bool)
    found = fit(data, Constants(), ~held)
    for name, value in asdict(found).items():
        print(f"    {name}: float = {value:.4g}")
    print("fitted")
    judge(data, data.times(found), ~held)
    if held.any():
        print("held out")
        judge(data, data.times(found), held)


if __name__ == "__main__":
    main()
