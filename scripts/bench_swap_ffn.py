"""Swap-FFN decode against torch on this machine's GPU: milliseconds a step, tokens a second, share of the MMA floor.

    python scripts/bench_swap_ffn.py                    # the table, at the published sizes
    python scripts/bench_swap_ffn.py --variants         # plans of the fused kernel and of the chain, timed in turn
    python scripts/bench_swap_ffn.py --phases           # every phase of the chain by itself
    python scripts/bench_swap_ffn.py --bytes            # what a step reads and writes, by ncu
    python scripts/bench_swap_ffn.py --once fused       # one step between cudaProfilerStart and Stop, for a profiler

Peers, in the same run on the same inputs: the unfused bf16 step (``warpspec.swap.eager``) eager, captured in a CUDA
graph, and under torch.compile in a graph. "phases": the chain of kernels, "fused": the one kernel, both in a graph. The
floor is the products' FLOPs at the rate that torch reaches at one large product here (``--tflops`` to give it). Ours
are first compared with the FP32 reference under its own decisions. A set of weights fits the L2 and stays there, as it
does from FFN step to FFN step of one token.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import shlex
import subprocess
import sys

import torch
from shared import bench_shapes, driver, gpu_bench
from shared.swap_inputs import random_call, random_weights

from warpspec.common.launch import target_of
from warpspec.swap import eager, launch, reference
from warpspec.swap.config import Tiles
from warpspec.swap.problem import SwapProblem

CALL = dict(events=8, k_ffn=2, residual=False)
CALLS = 4  # in a graph
REPLAYS = 10
WORSE = 1.25  # than the unfused step's error
GEMM = 8192  # of the product whose rate is the floor's

WAYS = ("fused", "phases", "eager")
CACHES = {"none": "caches warm", "all": "caches emptied before the step"}
# ncu's metric -> (what it is, bytes of one of it)
BYTES = {
    "dram__bytes_read.sum": ("read from memory", 1),
    "dram__bytes_write.sum": ("written to memory", 1),
    "lts__t_sectors_op_read.sum": ("read from L2", 32),
    "lts__t_sectors_op_write.sum": ("written to L2", 32),
}


def gemm_rate() -> float:
    """TFLOP/s of torch's bf16 product of two square matrices."""
    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    time = gpu_bench.gpu_times({"gemm": torch.mm}, [(a, b)], rounds=2, round_ms=20.0)["gemm"]
    return 2 * GEMM**3 / time * 1e-6


class Case:
    """Weights, inputs and ways to compute one step of a batch."""

    def __init__(self, weights, batch: int):
        self.weights, (self.x, self.state) = weights, random_call(weights, batch)
        self.problem = SwapProblem.check(self.x, self.state, weights, **CALL)
        self.target = target_of(self.x.device)

    def ours(self, plan, **options):
        """(function of no arguments, its operands) that runs a step under a plan, in place on a state of its own."""
        step = launch.Step(self.problem, self.target, plan, **options)
        state, delta = self.state.clone(), torch.full_like(self.x, torch.nan)

        def run():
            step.run(step.operands(self.x, state.ram, state.map, self.weights, delta))

        return run, state, delta

    def unfused(self):
        state = self.state.clone()
        return lambda: eager.decode(self.x, state.ram, state.map, self.weights, **CALL)

    def plan(self, fused: bool):
        """The plan that is taken, or would be."""
        plan = launch.make_plan(self.problem, self.target, Tiles() if fused else None)
        return dataclasses.replace(plan, fused=fused)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def check(case: Case, plans: dict) -> None:
    """Exit with a message if a plan's result is wrong. Decisions are the reference's."""
    x, state, w = case.x, case.state, case.weights
    delta, ram, map_, made = reference.decode(x, state.ram, state.map, w, **CALL)
    forced = (made.gate.int() * 4 + made.logical).to(torch.uint8).flatten(1)
    peer = state.clone()
    own = eager.decode(x, peer.ram, peer.map, w, **CALL, forced=(made.gate, made.logical))
    print(f"B {len(x)} unfused: errors {error(own, delta):.2e}, {error(peer.ram, ram):.2e}", flush=True)
    bounds = (WORSE * error(own, delta), WORSE * error(peer.ram, ram))
    for name, plan in plans.items():
        step = launch.Step(case.problem, case.target, plan, forced=True)
        found, result = state.clone(), torch.full_like(x, torch.nan)
        step.run(step.operands(x, found.ram, found.map, w, result, forced))
        errors = (error(result, delta), error(found.ram, ram))
        print(f"B {len(x)} {name}: errors of delta and banks {errors[0]:.2e}, {errors[1]:.2e}", flush=True)
        if not all(e <= bound for e, bound in zip(errors, bounds, strict=True)) or (found.map != map_).any():
            sys.exit(f"wrong result for B {len(x)}, {name}: errors {errors}, bounds {bounds}")


def table(weights, batches, tflops: float, *, compiled: bool, markdown: bool = False) -> str:
    rows = []
    for batch in batches:
        case = Case(weights, batch)
        plans = {"phases": case.plan(False), "fused": case.plan(True)}
        check(case, plans)
        floor = case.problem.flops / tflops * 1e-9  # ms
        candidates = {"graph": case.unfused()}
        if compiled:
            state = case.state.clone()
            options = CALL | dict(step=torch.compile(eager.event, dynamic=False))
            candidates["compile"] = functools.partial(
                eager.decode, case.x, state.ram, state.map, weights, **options
            )
        for name, plan in plans.items():
            candidates[name], *_ = case.ours(plan)
        times = {"eager": gpu_bench.gpu_times({"": case.unfused()}, [()], rounds=2, round_ms=30.0)[""] / 1e3}
        for name, call in candidates.items():
            times[name] = gpu_bench.graph_time(call, [()], calls=CALLS, replays=REPLAYS) / 1e3
        best = min(times["phases"], times["fused"])
        print(f"B {batch}: " + ", ".join(f"{name} {time:.4f}" for name, time in times.items()), flush=True)
        rows.append(
            [
                batch,
                *(times.get(name) for name in ("eager", "graph", "compile", "phases", "fused")),
                floor,
                floor / best,
                times["graph"] / best,
                batch / best * 1e3,
            ]
        )
    head = (
        *("B", "eager ms", "graph ms", "compile ms", "phases ms", "fused ms", "MMA floor ms"),
        *("floor / ours", "graph / ours", "tokens/s"),
    )
    return gpu_bench.table(head, rows, markdown=markdown)


def variants(case: Case) -> dict:
    """name -> plan: tile shapes, clusters, stages, splits."""
    found = {}
    for cluster_m, down_n in itertools.product((1, 2), (128, 256)):
        tiles = Tiles(cluster_m=cluster_m, down_n=down_n)
        for fused in (False, True) if down_n < tiles.up_n else (False,):
            plan = launch.make_plan(case.problem, case.target, tiles)
            plan = dataclasses.replace(plan, fused=fused)
            found[f"{'fused' if fused else 'phases'} {tiles} splits {plan.splits} ctas {plan.ctas}"] = plan
    return found


def print_variants(weights, batches) -> None:
    for batch in batches:
        case = Case(weights, batch)
        plans = variants(case)
        check(case, {"fused": case.plan(True)})
        for name, plan in plans.items():
            call, *_ = case.ours(plan)
            time = gpu_bench.graph_time(call, [()], calls=CALLS, replays=REPLAYS)
            print(f"B {batch} {name}: {time:.1f} us", flush=True)


def print_phases(weights, batches) -> None:
    """Each phase of the chain, many times in a graph: its time where launches follow each other."""
    for batch in batches:
        case = Case(weights, batch)
        for name, plan in variants(case).items():
            if plan.fused:
                continue
            step = launch.Step(case.problem, case.target, plan)
            state = case.state.clone()
            operands = step.operands(case.x, state.ram, state.map, weights, torch.empty_like(case.x))
            step.run(operands)
            found = []
            for phase in step.launchers:
                time = gpu_bench.graph_time(step.launch, [(phase, operands)], calls=32, replays=5)
                found.append(f"{phase} {time:.2f}")
            print(f"B {batch} {name}: {', '.join(found)} us", flush=True)


def print_bytes(batches) -> None:
    """Megabytes that a step moves, by ncu: between L2 and device memory, and out of L2. Caches are as they are, or
    emptied before the step. ncu runs the whole program for each pass and counts over the step, not kernel by kernel:
    so the one kernel is launched as it always is, cooperative and in clusters, which ncu's kernel replay cannot do."""
    options = ["--csv", "--print-units", "base", "--clock-control", "none", "--replay-mode", "app-range"]
    for batch, way, caches in itertools.product(batches, WAYS, CACHES):
        command = ["ncu", *options, "--metrics", ",".join(BYTES), "--cache-control", caches]
        command += [sys.executable, __file__, "--once", way, "--batches", str(batch)]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
        if done.returncode or not lines:
            words = (done.stdout + done.stderr)[-500:]
            print(f"B {batch} {way}: {shlex.join(command)} failed: {words}", flush=True)
            continue
        found = dict.fromkeys(BYTES, 0.0)
        for row in csv.DictReader(lines):
            value = float(row["Metric Value"].replace(",", ""))
            found[row["Metric Name"]] += value * BYTES[row["Metric Name"]][1]
        words = ", ".join(f"{meaning} {found[name] / 1e6:.1f} MB" for name, (meaning, _) in BYTES.items())
        print(f"B {batch} {way}, {CACHES[caches]}: {words}", flush=True)


def main() -> None:
    parser = driver.parser(__doc__, markdown=True)
    parser.add_argument("--batches", nargs="+", type=int, default=bench_shapes.SWAP_BATCHES)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--once", choices=WAYS)
    parser.add_argument("--tflops", type=float, help="of the floor; default: measured")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it takes a while")
    options = parser.parse_args()
    driver.need_gpu()
    if options.bytes:
        return print_bytes(options.batches)
    weights = random_weights(device="cuda").prepare()
    if options.once:
        case = Case(weights, options.batches[0])
        if options.once == "eager":
            call = case.unfused()
        else:
            call, *_ = case.ours(case.plan(options.once == "fused"))
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return None
    driver.begin()
    if options.variants:
        return print_variants(weights, options.batches)
    if options.phases:
        return print_phases(weights, options.batches)
    tflops = options.tflops or gemm_rate()
    print(f"floor: {tflops:.0f} TFLOP/s")
    compiled = not options.no_compile
    print(table(weights, options.batches, tflops, compiled=compiled, markdown=options.markdown))


if __name__ == "__main__":
    main()
