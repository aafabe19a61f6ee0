"""Attention, its gradients, softmax and top-k at many shapes, against every peer that runs them, on this GPU.

    python scripts/bench_sweep.py [--seed N] [--shapes N] [--only KIND ...]   shapes drawn at random
    python scripts/bench_sweep.py --seeds N                                  by N new seeds, which it prints
    python scripts/bench_sweep.py --quick                                    a few of each kind
    python scripts/bench_sweep.py --cliffs                                   the fixed table of shapes that were slow
    python scripts/bench_sweep.py --cases FILE                               shapes, or results, of a JSON file
    python scripts/bench_sweep.py --list                                     the shapes; needs no GPU
    python scripts/bench_sweep.py --compile-ahead ...                        compiles what the others time, on all cores

A ratio is the best peer's time over ours: above 1 we are faster. The bytes' time is what a call must move (of K and V
what some query sees) at the bandwidth of a copy on this GPU, measured first; the products' time is at the speed of a
large matrix product here. The greater of the two over our time is our share, printed for calls over 100 MB. Times are
of calls in CUDA graphs (``gpu_bench.graph_times``) on inputs that together exceed the L2. A peer whose result is not
ours is not counted. FlexAttention is timed where flash-attn-4 is not.

Processes without a GPU compile what the shapes need, ours and the peers', into disk caches. One process times the
shapes whose kernels are there; while there are none, it compiles FlexAttention. A call that hangs or takes the process
down costs its time: the process is started again, and the shape timed without that candidate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path

import torch
from shared import driver, gpu_bench, sweep_regret, sweep_report
from shared.sweep_calls import OURS, is_prepared
from shared.sweep_compile import Waits, compile_only, keep_kernels, one_line, quiet, start_compiling
from shared.sweep_draws import DECODING, MOST_DECODED, cliffs, draw_shapes
from shared.sweep_shapes import BACKWARD, KINDS, Shape, from_json, to_json
from shared.sweep_timing import Timer

from warpspec.aot.workers import Progress
from warpspec.common.command_line import positive
from warpspec.common.hardware import MODELS
from warpspec.common.launch import Target, target_of

SHAPES, QUICK, SEED = 128, 20, 20261122
SECONDS = 200.0  # in which shapes are begun
PLANS = 6  # of --regret


def sweep(
    shapes: dict[Shape, int], speeds: gpu_bench.Speeds, workers: int, seconds: float, keep: Callable
) -> list[dict]:
    """Results in the order of the shapes; prints one line each. Shapes not begun in time are left out, and said.

    shapes: with how many plans besides the chosen one are timed. workers: processes that compile; 0: all is compiled.
    keep: called with the results so far after each, for runs that are cut off.
    """
    start, target = time.monotonic(), target_of(torch.device("cuda", 0))
    idle = [shape for shape in shapes if is_prepared(shape) and shape.kind not in BACKWARD]
    progress, results, timer, pool = Progress(len(shapes)), {}, Timer(speeds), None
    waits = {shape: Waits([], []) for shape in shapes}
    try:
        if workers:
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, mp_context=context, initializer=quiet)
            waits = start_compiling(pool, shapes, target)
        left = list(shapes)
        while left and time.monotonic() - start < seconds:
            ready = [shape for shape in left if waits[shape].done()]
            while idle and idle[0] not in left:
                del idle[0]
            if not ready:  # the GPU waits for compilers
                if idle:
                    timer.prepare(idle.pop(0))
                else:
                    time.sleep(0.05)
                continue
            shape = ready[0]
            left.remove(shape)
            result = timer.time(shape, shapes[shape])
            for future in (*waits[shape].needed, *waits[shape].others):
                if future.exception() is not None and not isinstance(future.exception(), BrokenProcessPool):
                    result["missing"].setdefault("compiling", one_line(future.exception()))
            results[shape] = result
            progress.step(line(result))
            keep(list(results.values()))
    finally:
        timer.stop()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
    if left:
        print(f"{len(left)} shapes left out after {seconds:.0f} s (--seconds)", flush=True)
    return [results[shape] for shape in shapes if shape in results]


def line(result: dict) -> str:
    """A result for the progress bar."""
    found = sweep_report.ratio(result)
    ours = result["times"].get(OURS)
    text = "FAILED" if ours is None else f"{ours:.1f} us"
    if found is not None:
        text += f", {found:.2f} of {sweep_report.best_peer(result)}"
    return f"{result['kind']} {result['name']}: {text}"


def shapes_of(options) -> dict[Shape, int]:
    """What the options ask for, and how many other plans of each are timed."""
    if options.cases:
        try:
            found = json.loads(options.cases.read_text())
        except (OSError, ValueError) as error:
            sys.exit(f"--cases {options.cases}: must be a JSON file of --json, {one_line(error)}")
        items = found["results"] if isinstance(found, dict) else found
        shapes = {from_json(item.get("shape", item)): item.get("others", options.regret) for item in items}
    elif options.cliffs:
        shapes = dict.fromkeys(cliffs(), options.regret)
    else:
        number = QUICK if options.quick else options.shapes
        kinds, few = tuple(options.only), options.few_queries
        drawn = [shape for seed in options.seeds for shape in draw_shapes(number, seed, kinds, few)]
        return dict.fromkeys(drawn, options.regret)
    return {shape: others for shape, others in shapes.items() if shape.kind in options.only}


def interleaved(shapes: dict[Shape, int]) -> dict[Shape, int]:
    """Kinds in turn, so that a run that ends early has some of each."""
    kinds = defaultdict(list)
    for shape in shapes:
        kinds[shape.kind].append(shape)
    turns = itertools.zip_longest(*kinds.values())
    return {shape: shapes[shape] for turn in turns for shape in turn if shape is not None}


def parser() -> argparse.ArgumentParser:
    parser = driver.parser(__doc__, only=KINDS, markdown=True)
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument(
        "--seed",
        type=int,
        nargs="+",
        default=[SEED],
        dest="seeds",
        help="of the shapes (default %(default)s)",
    )
    seeds.add_argument(
        "--seeds", type=positive, metavar="N", dest="new_seeds", help="this many new seeds instead"
    )
    parser.add_argument(
        "--shapes", type=positive, default=SHAPES, help="how many of a seed (default %(default)s)"
    )
    parser.add_argument(
        "--few-queries",
        action="store_true",
        help=f"draw calls of at most {MOST_DECODED} queries a request; --only some of: {', '.join(DECODING)}",
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} shapes")
    parser.add_argument("--cliffs", action="store_true", help="the fixed table")
    parser.add_argument("--cases", type=Path, metavar="FILE", help="shapes, or results of --json")
    parser.add_argument(
        "--regret",
        type=int,
        nargs="?",
        const=PLANS,
        default=0,
        metavar="N",
        help=f"also time the N next best plans of attention ({PLANS}), and say what the choice loses",
    )
    parser.add_argument("--list", action="store_true", help="print the shapes")
    parser.add_argument(
        "--compile-ahead",
        nargs="?",
        const="",
        metavar="GPU",
        help="compile what the shapes need within --seconds and time nothing; "
        f"GPU: {', '.join(gpu.name for gpu in MODELS)}, which needs none here (default: this machine's)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures, or what is compiled, for --cases"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no shape after this many")
    parser.add_argument(
        "--workers",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 2),
        help="that compile; 0: all is compiled",
    )
    return parser


def target_of_model(name: str) -> Target:
    """The target of a GPU model, by its data sheet; of this machine's GPU where the name is empty."""
    if not name:
        return target_of(torch.device("cuda", 0))
    found = next((gpu for gpu in MODELS if gpu.name == name), None)
    if found is None:
        sys.exit(f"--compile-ahead {name}: the models are {', '.join(gpu.name for gpu in MODELS)}")
    return Target.of_model(found)


def main() -> None:
    options = parser().parse_args()
    if options.new_seeds:
        options.seeds = [random.SystemRandom().randrange(10**8) for _ in range(options.new_seeds)]
        print(f"seeds {' '.join(map(str, options.seeds))}", flush=True)
    if options.few_queries and not set(options.only) <= {*DECODING}:
        sys.exit(f"--few-queries: --only must name none but {', '.join(DECODING)}")
    shapes = shapes_of(options)
    if options.list:
        for shape in shapes:
            print(f"{shape.kind:12} {shape.name}  {shape.bytes / 1e6:.1f} MB")
        return
    if not options.compile_ahead:
        driver.need_gpu("--list, which prints the shapes, and --compile-ahead GPU need none")
    with tempfile.TemporaryDirectory() as temporary:
        keep_kernels(temporary)
        shapes = interleaved(shapes)
        if options.compile_ahead is not None:
            target = target_of_model(options.compile_ahead)
            ready = compile_only(shapes, target, options.workers, options.seconds)
            if options.json:
                items = [{"shape": to_json(shape), "others": others} for shape, others in ready.items()]
                options.json.write_text(json.dumps(items))
            if len(ready) < len(shapes):
                sys.exit(1)
            return
        header = driver.begin("flash-attn-4")
        if find_spec("flash_attn") is None:
            print("flash-attn-4 is not installed: ratios are against the other peers")
        speeds = gpu_bench.measured_speeds()
        print(f"{speeds}, measured here", flush=True)
        about = {"header": header, "seeds": options.seeds, "speeds": speeds._asdict()}

        def keep(found: list[dict]) -> None:
            if options.json:
                options.json.write_text(json.dumps(about | {"results": found}, indent=1))

        results = sweep(shapes, speeds, options.workers, options.seconds, keep)
        keep(results)
    print(f"\n{sweep_report.report(results, options.markdown)}", flush=True)
    if any(result.get("plans") for result in results):
        print(f"\n{sweep_regret.regret_table(results, options.markdown)}")
        print(f"\nworst choices\n{sweep_regret.worst_choices(results)}", flush=True)


if __name__ == "__main__":
    main()
