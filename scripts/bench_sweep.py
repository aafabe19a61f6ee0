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
ours is not counted.

Processes without a GPU compile what the shapes need, ours and the peers', into disk caches. One process times the
shapes whose kernels are there. A call that hangs or takes the process down costs its time: the process is started
again, and the shape timed without that candidate.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import torch
from shared import driver, gpu_bench, sweep_calls, sweep_gradients, sweep_regret, sweep_report
from shared.attention_peers import flash_attention
from shared.sweep_calls import OURS
from shared.sweep_draws import cliffs, draw_shapes
from shared.sweep_shapes import GRADIENTS, KINDS, Shape, from_json, to_json

from warpspec.aot.workers import Progress, compile_ahead
from warpspec.common.disk_cache import CACHE_VARIABLE, cache_folder
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import MODELS
from warpspec.common.launch import Target, target_of

SHAPES, QUICK, SEED = 128, 20, 20261122
SECONDS = 200.0  # in which shapes are begun
SHAPE_SECONDS = 20.0  # of a candidate at a shape, or of reading its kernels
START_SECONDS = 90.0  # of a process
PLANS = 6  # of --regret
DIFFERENT = 1e-2  # relative difference that no rounding to bf16 explains
DIFFERENT_GRADIENTS = 3e-2  # dS is rounded, too, and is a difference of two numbers
CACHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attn-4", "QUACK_CACHE_DIR": "quack"}


def calls_of(shape: Shape):
    """The module with the shape's calls: ``sweep_calls``, or ``sweep_gradients``, whose functions are named alike."""
    return sweep_gradients if shape.kind == GRADIENTS else sweep_calls


# Compiling. Worker processes do not see the GPU.


@contextlib.contextmanager
def blind(target: Target) -> Iterator[None]:
    """A context in which processes are started that compile for the target and see no GPU."""
    number = target.arch.removeprefix("sm_").removesuffix("a")
    variables = {
        "CUDA_VISIBLE_DEVICES": "",
        "CUTE_DSL_ARCH": target.arch,
        "FLASH_ATTENTION_ARCH": number,
        "FLASH_ATTENTION_NUM_SMS": str(target.sm_count),
        "QUACK_ARCH": number,
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def quiet() -> None:
    """A worker process begins."""
    warnings.simplefilter("ignore")  # of peers'
    torch.set_num_threads(1)


def compile_peers(shapes: Sequence[Shape]) -> None:
    """Compile peers' kernels for shapes that may share one, one after another, so that each is compiled once."""
    for shape in shapes:
        try:
            calls_of(shape).compile_peer(shape)
        except Exception as error:  # timing it will say what is wrong
            print(f"compiling a peer's kernel: {shape.name}: {one_line(error)}", file=sys.stderr)


class Waits(NamedTuple):
    """What a shape waits for: what its chosen plan and its peers need, and what its other plans need."""

    needed: list[Future]
    others: list[Future]

    def done(self) -> bool:
        return all(future.done() for future in (*self.needed, *self.others))


def start_compiling(
    pool: ProcessPoolExecutor, shapes: dict[Shape, int], target: Target
) -> dict[Shape, Waits]:
    """What each shape waits for. What only other plans need is compiled last. shapes: with how many plans besides the
    chosen one are timed."""
    items = {}  # job: shapes that need it, shapes whose other plans need it
    peers = defaultdict(list)
    for shape, plans in shapes.items():
        with contextlib.suppress(UnsupportedProblem):  # timing it will say so
            for item in calls_of(shape).our_kernels(shape, target):
                items.setdefault((compile_ahead, *item, target.arch), Waits([], [])).needed.append(shape)
            for item in sweep_regret.other_kernels(shape, target, plans) if plans else ():
                items.setdefault((compile_ahead, *item, target.arch), Waits([], [])).others.append(shape)
        key = calls_of(shape).peer_kernel(shape)
        if key is not None:
            peers[key].append(shape)
    items |= {(compile_peers, tuple(users)): Waits(users, []) for users in peers.values()}
    place, waits = {shape: i for i, shape in enumerate(shapes)}, {shape: Waits([], []) for shape in shapes}

    def turn(item) -> tuple[bool, int]:
        users = items[item]
        return not users.needed, min(place[shape] for shape in users.needed or users.others)

    with blind(target):
        for item in sorted(items, key=turn):
            future = pool.submit(*item)
            for shape in items[item].needed:
                waits[shape].needed.append(future)
            for shape in items[item].others:
                waits[shape].others.append(future)
    return waits


# Timing, in a process of its own.


def serve(connection) -> None:
    """Times shapes as they arrive. Says which candidate it is at, then the result."""
    warnings.simplefilter("ignore")
    torch.cuda.init()
    torch.empty(1, device="cuda")
    flash_attention()
    connection.send(("ready", None))
    while True:
        fields, without, speeds, plans = connection.recv()
        shape = from_json(fields)
        result = sweep_report.result_of(shape, speeds) | {"missing": dict(without)}
        try:
            with torch.no_grad():
                measure(shape, result, lambda name: connection.send(("at", name)), plans)
        except Exception as error:
            result["missing"][OURS] = one_line(error)
        torch.cuda.empty_cache()
        connection.send(("result", result))


def measure(shape: Shape, result: dict, at: Callable[[str], None], plans: int = 0) -> None:
    """Fills in times, errors and missing. at: called with a candidate before it does anything that may fail. plans:
    how many besides the chosen one are timed."""
    at(OURS)
    inputs = calls_of(shape).input_sets(shape)
    calls = {OURS: calls_of(shape).ours(shape)}
    expected = calls[OURS](*inputs[0])
    torch.cuda.synchronize()
    others = {}
    if plans and sweep_regret.planned(shape):
        others, result["chosen"] = sweep_regret.other_calls(shape, plans)
    for name, call in (others | calls_of(shape).peers(shape)).items():
        if name in result["missing"]:
            continue
        at(name)
        try:
            error = difference(call(*inputs[0]), expected)
            gpu_bench.captured(call, inputs, 1)
        except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as refused:
            result["missing"][name] = one_line(refused)
            check_device()
            continue
        result["errors"][name] = error
        if error <= (DIFFERENT_GRADIENTS if shape.kind == GRADIENTS else DIFFERENT):
            calls[name] = call
        else:
            result["missing"][name] = f"computes something else: relative difference {error:.1e}"
    del expected
    at(OURS)
    rounds = gpu_bench.SHORT_ROUNDS if result["flops_us"] > result["bytes_us"] else {}
    times = gpu_bench.graph_times(calls, inputs, **rounds)
    result["plans"] = {name: time for name, time in times.items() if name in others}
    result["times"] = {name: time for name, time in times.items() if name not in others}


def difference(theirs, ours) -> float:
    """Relative; NaN where either has one. Tensors, or as many of each, whose largest difference counts."""
    if isinstance(ours, tuple):
        return float(torch.tensor([difference(*pair) for pair in zip(theirs, ours, strict=True)]).max())
    assert theirs.shape == ours.shape, f"shape {list(theirs.shape)}, ours {list(ours.shape)}"
    exact = ours.float()
    return float((theirs.float() - exact).norm() / exact.norm())


def check_device() -> None:
    """End the process where the GPU does not answer any more: nothing that follows would mean anything."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)


class Timer:
    """The process that times. speeds: of the GPU."""

    def __init__(self, speeds: gpu_bench.Speeds, serve: Callable = serve, start_method: str = "spawn"):
        self.speeds, self.serve, self.context = speeds, serve, multiprocessing.get_context(start_method)
        self.process = None

    def start(self) -> None:
        self.connection, far = self.context.Pipe()
        self.process = self.context.Process(target=self.serve, args=(far,), daemon=True)
        self.process.start()
        far.close()
        self._message(START_SECONDS)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def _message(self, seconds: float):
        """(what, value) from the process. Raises EOFError where it has ended, TimeoutError where it says nothing."""
        if not self.connection.poll(seconds):
            raise TimeoutError
        return self.connection.recv()

    def time(self, shape: Shape, plans: int = 0) -> dict:
        """The result. A candidate that takes the process down is left out, and the rest timed again. plans: how many
        besides the chosen one are timed."""
        missing = {}
        while True:
            at = OURS
            try:
                if self.process is None:
                    self.start()
                self.connection.send((to_json(shape), missing, self.speeds, plans))
                while True:
                    what, value = self._message(SHAPE_SECONDS)
                    if what == "result":
                        return value
                    at = value
            except (EOFError, OSError) as error:
                hung = isinstance(error, TimeoutError)
                self.stop()
                missing[at] = f"nothing for {SHAPE_SECONDS:.0f} s" if hung else "ended the process"
                if at == OURS:
                    return sweep_report.result_of(shape, self.speeds) | {"missing": missing}


# All of it.


def sweep(
    shapes: dict[Shape, int], speeds: gpu_bench.Speeds, workers: int, seconds: float, keep: Callable
) -> list[dict]:
    """Results in the order of the shapes; prints one line each. Shapes not begun in time are left out, and said.

    shapes: with how many plans besides the chosen one are timed. workers: processes that compile; 0: all is compiled.
    keep: called with the results so far after each, for runs that are cut off.
    """
    start, target = time.monotonic(), target_of(torch.device("cuda", 0))
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
            if not ready:
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


def compile_only(shapes: dict[Shape, int], target: Target, workers: int, seconds: float) -> dict[Shape, int]:
    """Fill the caches on disk with what ``sweep`` of the same shapes would compile, first shapes first. Prints what
    failed; returns the shapes that are ready, with the number of their other plans, 0 if some of these are missing."""
    start, context = time.monotonic(), multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=quiet)
    waits = start_compiling(pool, shapes, target)
    users = defaultdict(list)
    for shape, found in waits.items():
        for future in (*found.needed, *found.others):
            users[future].append(shape)
    progress = Progress(len(users))
    with contextlib.suppress(TimeoutError):
        for future in as_completed(users, max(seconds - (time.monotonic() - start), 0)):
            error = future.exception()
            progress.step(f"FAILED for {users[future][0].name}: {one_line(error)}" if error else "")

    def there(futures: Sequence[Future]) -> bool:
        return all(future.done() and not future.exception() for future in futures)

    ready = {
        shape: plans if there(waits[shape].others) else 0
        for shape, plans in shapes.items()
        if there(waits[shape].needed)
    }
    taken = f"{time.monotonic() - start:.0f} s"
    print(f"{len(ready)} of {len(shapes)} shapes are compiled after {taken}", flush=True)
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:  # compiling cannot be interrupted otherwise
        process.kill()
    return ready


def line(result: dict) -> str:
    """A result for the progress bar."""
    found = sweep_report.ratio(result)
    ours = result["times"].get(OURS)
    text = "FAILED" if ours is None else f"{ours:.1f} us"
    if found is not None:
        text += f", {found:.2f} of {sweep_report.best_peer(result)}"
    return f"{result['kind']} {result['name']}: {text}"


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def shapes_of(options) -> dict[Shape, int]:
    """What the options ask for, and how many other plans of each are timed."""
    if options.cases:
        found = json.loads(options.cases.read_text())
        items = found["results"] if isinstance(found, dict) else found
        shapes = {from_json(item.get("shape", item)): item.get("others", options.regret) for item in items}
    elif options.cliffs:
        shapes = dict.fromkeys(cliffs(), options.regret)
    else:
        number = QUICK if options.quick else options.shapes
        drawn = [shape for seed in options.seeds for shape in draw_shapes(number, seed, tuple(options.only))]
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
    seeds.add_argument("--seeds", type=int, metavar="N", dest="new_seeds", help="so many new seeds instead")
    parser.add_argument("--shapes", type=int, default=SHAPES, help="how many of a seed (default %(default)s)")
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
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no shape after so many")
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
    shapes = shapes_of(options)
    if options.list:
        for shape in shapes:
            print(f"{shape.kind:12} {shape.name}  {shape.bytes / 1e6:.1f} MB")
        return
    if not options.compile_ahead:
        driver.need_gpu("--list, which prints the shapes, and --compile-ahead GPU need none")
    with tempfile.TemporaryDirectory() as temporary:
        folder = cache_folder() or Path(
            temporary
        )  # peers' kernels beside ours; for one run where caching is off
        os.environ[CACHE_VARIABLE] = str(folder)
        os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
        for variable, name in CACHES.items():
            os.environ.setdefault(variable, str(folder / name))
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
        if flash_attention() is None:
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
