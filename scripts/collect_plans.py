"""Times many plans of many random attention problems on this GPU: what the cost model of ``fmha.plan`` is fitted to.

    python scripts/collect_plans.py --json FILE [--seed N] [--seconds N] [--templates N] [--only KIND ...]
    python scripts/collect_plans.py --compile-ahead FILE ..., then the same with --compiled FILE
    python scripts/collect_plans.py --list        how many kernels, problems and plans there are; needs no GPU

Problems come in templates: calls that differ in sizes alone, and so share their kernels. A random
sample of a template's kernels is compiled, the present choice among them; every problem is timed with each in turn, in
CUDA graphs, on inputs that together exceed the L2. Results are compared with the present choice's.

Processes without a GPU compile; one process times the templates whose kernels are there. A plan that hangs or takes the
process down is named and left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
from shared import driver, gpu_bench, sweep_calls, sweep_timing
from shared.attention_peers import flash_attention
from shared.plan_calls import describe, planned_call
from shared.plan_kernels import compiled_before, compiled_now, kernels_of, plans
from shared.plan_templates import GUESS_BYTES_US, GUESS_FLOPS_US, HEADS, WIDE_HEADS, Template, templates
from shared.sweep_compile import keep_kernels, one_line
from shared.sweep_regret import problem_of
from shared.sweep_shapes import AttentionShape, to_json

from warpspec.common.launch import SIMULATED, Target, target_of
from warpspec.fmha import launch

KINDS = ("prefill", "chunked", "mixed", "decode", "speculative")
KERNELS = 9  # of a template, beside the present choices'
PLANS = 18  # of a problem
POOL_BYTES = 6 << 30  # of random numbers that all inputs are views of
L2_MULTIPLES, MOST_SETS = 3, 64
GRAPH_US, ROUNDS = 700.0, 3
DIFFERENT = 1e-2
DEVICE = "cuda"
SILENT_SECONDS = 20.0


# Timing.


class Pool:
    """Random bf16 numbers that inputs are views of."""

    def __init__(self, size: int = POOL_BYTES):
        self.numbers = torch.empty(size // 2, dtype=torch.bfloat16, device=DEVICE).normal_()
        self.place = 0

    def take(self, *sizes: int) -> torch.Tensor:
        count = 1
        for one in sizes:
            count *= one
        count_up = -(-count // 1024) * 1024
        if self.place + count_up > self.numbers.numel():
            self.place = 0
        found = self.numbers[self.place : self.place + count].view(sizes)
        self.place += count_up
        return found


def input_sets(shape: AttentionShape, pool: Pool) -> list[SimpleNamespace]:
    """Inputs of calls, as ``sweep_calls.attention_inputs``."""
    count = -(-L2_MULTIPLES * target_of(torch.device(DEVICE, 0)).l2_bytes // shape.bytes)
    count = max(1, min(count, MOST_SETS, int(POOL_BYTES // 2 // shape.held_bytes)))
    device, integer = DEVICE, torch.int32
    keys = torch.tensor(shape.keys, dtype=integer, device=device)
    starts_q = torch.tensor(sweep_calls.starts(shape.queries), dtype=integer, device=device)
    starts_k = torch.tensor(sweep_calls.starts(shape.keys), dtype=integer, device=device)
    paged, packed = "paged" in shape.form, "packed" in shape.form
    heads_kv, dim = shape.heads_kv, shape.head_dim
    if paged:
        numbers = [-(-k // shape.page_size) for k in shape.keys]
        first = torch.tensor(sweep_calls.starts(numbers), device=device)
        within = torch.arange(max(numbers), device=device)
        place = first[:-1, None] + within[None]
        some = within[None] < torch.tensor(numbers, device=device)[:, None]
    sets = []
    for _ in range(count):
        options = {"causal": shape.causal}
        if shape.window is not None:
            options["window"] = (shape.window - 1, 0)
        if shape.sink:
            options["sink"] = pool.take(shape.heads_q)
        if paged:
            order = torch.randperm(sum(numbers), device=device)
            options["page_table"] = torch.where(some, order[place.clamp(max=sum(numbers) - 1)], 0).to(integer)
            rows = (sum(numbers), shape.page_size)
        elif packed:
            options["cu_seqlens_k"], rows = starts_k, (sum(shape.keys),)
        else:
            rows = (shape.batch, max(shape.keys))
        if paged or shape.form == "ranges":
            options["kv_lengths"] = keys
        if packed:
            options["cu_seqlens_q"] = starts_q
            options["max_seqlen_q"], options["max_seqlen_k"] = max(shape.queries), max(shape.keys)
            queries = (sum(shape.queries),)
        else:
            queries = (shape.batch, shape.queries[0])
        q = pool.take(*queries, shape.heads_q, dim)
        k, v = (pool.take(*rows, heads_kv, one) for one in shape.dims)
        sets.append(SimpleNamespace(q=q, k=k, v=v, options=options))
    return sets


def graph_of(call, sets: list, microseconds: float):
    """(graph, calls in it)."""
    calls = max(4, min(96, int(GRAPH_US / microseconds)))
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(sets[i % len(sets)])
    return graph, calls


def timed(candidates: dict, sets: list, guess: float) -> dict:
    graphs = {}
    for name, call in candidates.items():
        graphs[name] = graph_of(call, sets, guess)
        graphs[name][0].replay()
    torch.cuda.synchronize()
    times = {name: [] for name in graphs}
    order = list(graphs)
    events = []
    for _ in range(ROUNDS):
        for name in order:
            graph, calls = graphs[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events.append((name, start, end, calls))
        order.reverse()
    torch.cuda.synchronize()
    for name, start, end, calls in events:
        times[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: round(statistics.median(found), 3) for name, found in times.items()}


def measure(
    one: Template, index: int, taken: set, bad: set, target: Target, pool: Pool, say, seed: int, done: int
):
    """Times each of a template's problems; says each as it is done. bad: kernels that are to be left out."""
    draw = random.Random(f"{seed} {index}")
    for number, shape in enumerate(one.shapes):
        if number < done:
            continue
        problem = problem_of(shape, "cuda")
        present = launch.plan(problem, target)
        found = [plan for plan in plans(problem, target, taken) if plan != present]
        draw.shuffle(found)
        found = [plan for plan in (present, *found[: PLANS - 1]) if json.dumps(describe(plan)) not in bad]
        sets = input_sets(shape, pool)
        guess = max(3.0, shape.bytes / GUESS_BYTES_US, shape.flops / GUESS_FLOPS_US)
        x = sets[0]
        o = x.q.new_empty(*x.q.shape[:-1], shape.dims[1])
        calls, wrong, expected = {}, {}, None
        for plan in found:
            name = json.dumps(describe(plan))
            say("at", (number, name))
            try:
                call = planned_call(problem, target, plan, o)
                o.fill_(torch.nan)
                call(x)
                call(x)
                torch.cuda.synchronize()
            except Exception as error:
                wrong[name] = one_line(error)
                continue
            got = o.clone()
            expected = got if expected is None else expected
            error = sweep_timing.difference(got, expected)
            if not error <= DIFFERENT:
                wrong[name] = f"difference {error}"
            else:
                calls[name] = call
        if one.peers:
            flash = flash_attention()
            say("at", (number, "flash"))
            try:
                theirs = sweep_calls.flash_call(flash, shape, x)
                torch.cuda.synchronize()
                if sweep_timing.difference(theirs, expected) <= DIFFERENT:
                    calls["flash"] = functools.partial(sweep_calls.flash_call, flash, shape)
                else:
                    wrong["flash"] = "different"
            except Exception as error:
                wrong["flash"] = one_line(error)
        say("at", (number, "graphs"))
        times = timed(calls, sets, guess)
        row = {"i": [index, number], "shape": compact(shape), "present": describe(present)}
        say("row", row | {"times": times, "wrong": wrong})


def compact(shape: AttentionShape) -> dict:
    return {name: value for name, value in to_json(shape).items() if name != "model"}


def serve(connection) -> None:
    """Times templates as they arrive."""
    warnings.simplefilter("ignore")
    target = target_of(torch.device("cuda", 0))
    pool = Pool()
    flash_attention()
    connection.send(("ready", None))

    def say(*message) -> None:
        connection.send(message)

    while True:
        one, index, taken, bad, seed, done = connection.recv()
        try:
            with torch.no_grad():
                measure(one, index, taken, bad, target, pool, say, seed, done)
        except Exception as error:
            connection.send(("error", f"{index}: {one_line(error)}"))
        torch.cuda.empty_cache()
        connection.send(("end", index))


class Timer(sweep_timing.Timer):
    """The process that times templates."""

    def __init__(self, seed: int):
        super().__init__(None, serve)
        self.seed = seed

    def time(self, one: Template, index: int, taken: set, rows: list, until: float) -> None:
        bad, done, at = set(), 0, None
        for _ in range(4):
            try:
                if self.process is None:
                    self.start()
                self.connection.send((one, index, taken, bad, self.seed, done))
                while True:
                    what, value = self._message(SILENT_SECONDS)
                    if what == "at":
                        at = value
                    elif what == "row":
                        rows.append(value)
                        done = value["i"][1] + 1
                    elif what == "error":
                        print(f"ERROR {value}", flush=True)
                    else:
                        return
                    if time.monotonic() > until:
                        self.stop()
                        return
            except (EOFError, OSError) as error:
                why = "hangs" if isinstance(error, TimeoutError) else "ended the process"
                print(f"PLAN {why}: template {index} {one.kind} {dict(one.fields)}: {at}", flush=True)
                self.stop()
                if at is not None:
                    bad.add(at[1])


def launch_overheads() -> dict:
    """Microseconds of an empty kernel in a graph, and what one more costs."""
    x = torch.zeros(1, device="cuda")
    return {"tiny_us": gpu_bench.graph_time(lambda: x.add_(1), [()], calls=64)}


def compile_templates(found: list[Template], target: Target, options) -> None:
    """Compile, and write what is compiled to a file for ``--compiled``."""
    start = time.monotonic()
    with options.compile_ahead.open("w") as file:
        for one in compiled_now(found, target, options):
            print(json.dumps([one.index, one.refused]), file=file, flush=True)
            print(f"{time.monotonic() - start:.0f} s: template {one.index} is compiled", flush=True)


def collect(found: list[Template], target: Target, options) -> list:
    start, rows, refused = time.monotonic(), [], 0
    until, timer = start + options.seconds, Timer(options.seed)
    compiled = compiled_before if options.compiled else compiled_now
    try:
        for index, one, kernels, whys in compiled(found, target, options):
            refused += len(whys)
            before = len(rows)
            timer.time(one, index, kernels, rows, until)
            if options.json:
                with options.json.open("a") as file:
                    file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows[before:])
            count = sum(len(row["times"]) for row in rows)
            print(
                f"{time.monotonic() - start:.0f} s: template {index} {one.kind} {dict(one.fields)}: "
                f"{len(rows) - before} problems, {count} timings in all",
                flush=True,
            )
            if time.monotonic() > until:
                break
        print(f"{refused} kernels refused", flush=True)
    finally:
        timer.stop()
    return rows


def parser_of_options() -> argparse.ArgumentParser:
    parser = driver.parser(__doc__, only=KINDS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the timings, a problem a line")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no problem after this many")
    parser.add_argument("--templates", type=int, default=40)
    parser.add_argument(
        "--kernels", type=int, default=KERNELS, help="of a template, beside the present choices'"
    )
    parser.add_argument(
        "--wide", action="store_true", help="head sizes above 128 of which few are drawn otherwise"
    )
    parser.add_argument(
        "--peers", type=float, default=0.5, help="share of the templates whose peers are timed"
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--list", action="store_true")
    ahead = parser.add_mutually_exclusive_group()
    ahead.add_argument(
        "--compile-ahead", type=Path, metavar="FILE", help="time nothing, and say in FILE what is compiled"
    )
    ahead.add_argument(
        "--compiled", type=Path, metavar="FILE", help="time what FILE says, and compile nothing"
    )
    return parser


def print_list(found: list, options: argparse.Namespace) -> None:
    """Print how many problems, kernels and timings each template has."""
    draw, kernels, count = random.Random(f"kernels {options.seed}"), 0, 0
    for one in found:
        taken, items = kernels_of(one, SIMULATED["sm_90a"], draw, options.kernels)
        number = sum(min(PLANS, len(plans(problem_of(s), SIMULATED["sm_90a"], taken))) for s in one.shapes)
        kernels, count = kernels + len(items), count + number
        print(
            one.kind,
            dict(one.fields),
            len(one.shapes),
            "problems",
            len(items),
            "kernels",
            number,
            "timings",
        )
    print(kernels, "kernels", count, "timings")


def main() -> None:
    options = parser_of_options().parse_args()
    found = templates(
        options.templates,
        options.seed,
        tuple(options.only),
        options.peers,
        WIDE_HEADS if options.wide else HEADS,
    )
    if options.list:
        return print_list(found, options)
    driver.need_gpu("--list needs none")
    with tempfile.TemporaryDirectory() as temporary:
        keep_kernels(temporary)
        target = target_of(torch.device("cuda", 0))
        if options.compile_ahead:
            return compile_templates(found, target, options)
        header = driver.begin("flash-attn-4")
        speeds = gpu_bench.measured_speeds()
        about = {"header": header, "seed": options.seed, "speeds": speeds._asdict()} | launch_overheads()
        torch.cuda.empty_cache()
        print(f"{speeds}, measured here", about, flush=True)
        if options.json:
            options.json.write_text(json.dumps(about) + "\n")
        rows = collect(found, target, options)
    count = sum(len(row["times"]) for row in rows)
    wrong = [(row["shape"]["kind"], name, why) for row in rows for name, why in row["wrong"].items()]
    print(f"{len(rows)} problems, {count} timings, {len(wrong)} without", flush=True)
    for one in wrong[:20]:
        print(one)


if __name__ == "__main__":
    main()
