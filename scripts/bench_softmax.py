"""Speed of row softmax on the GPU of this machine, against torch, QuACK and torch.compile in the same run.

    python scripts/bench_softmax.py                      tables: softmax, host cost, softmax + top-k
    python scripts/bench_softmax.py --plot FILE.png      bandwidth against row length, as a plot (and a table)
    python scripts/bench_softmax.py --regret [--seed N]  every strategy at 60 random shapes, against the one chosen

Worker processes compile side by side, all of them before the first is timed; they are timed one at a time. Every
candidate allocates its result. Times: see gpu_bench.py.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from shared import bench_shapes, driver, gpu_bench
from shared.row_peers import softmax_peers, torch_softmax

from warpspec.common.launch import target_of

PLOT_ELEMENTS = 2**26
PLOT_LENGTHS = tuple(4**i for i in range(4, 13))
LAUNCH_BOUND_US = 25.0  # below, the time in a CUDA graph is measured too
HOST_LIMIT_US = 15.0  # of CPU time for a call of softmax(x)
EQUAL_US, EQUAL = 10.0, 0.95  # under this many microseconds, this much of a peer's speed counts as equal
LARGE_BYTES, OF_COPY = 512e6, 0.9  # more data than this shall move at so much of a copy's speed
REGRET_SHAPES, REGRET_SEED, REGRET_MOST_ELEMENTS = 60, 20261121, 2**28
REGRET_ROUND_MS = 12.0  # many strategies: shorter rounds
OURS = "warpspec"
PEERS = ("torch", "QuACK", "torch.compile")


def candidates(shape: tuple[int, int]) -> dict:
    """Name -> function of x, those that apply."""
    from warpspec.softmax import softmax

    compiled = torch.compile(torch_softmax, dynamic=False)
    return {OURS: softmax, **softmax_peers(shape[1]), "torch.compile": compiled}


def strategies(shape: tuple[int, int], dtype: torch.dtype) -> dict:
    """Name -> function of x: every strategy that applies, best configured; the chosen one first."""
    from warpspec.softmax import launch
    from warpspec.softmax.plan import best_of_each, choose_plan
    from warpspec.softmax.problem import SoftmaxProblem

    sample = torch.empty(2, shape[1], dtype=dtype, device="cuda")
    like = SoftmaxProblem.of(sample, sample)
    problem = SoftmaxProblem(shape[0], shape[1], like.dtype, like.aligned)
    target = target_of(torch.device("cuda", 0))
    plans = best_of_each(problem, target)
    chosen = choose_plan(problem, target).strategy
    return {
        name: functools.partial(run_plan, launch.launcher(problem, target, plans[name]))
        for name in sorted(plans, key=lambda name: name != chosen)
    }


def run_plan(launcher, x):
    out = torch.empty_like(x)
    launcher(x, out)
    return out


def inputs(shape, dtype):
    def make(i):
        return (torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype),)

    return gpu_bench.rotation(make, math.prod(shape) * dtype.itemsize)


def wrong(call, x) -> bool:
    """Whether the first and last rows are further off than 1.25 times torch's (fp16 of long rows is coarse)."""
    rows = [0, x.shape[0] - 1]
    exact = torch.softmax(x[rows].double(), -1)
    error, own = (
        float((result[rows].double() - exact).norm() / exact.norm()) for result in (call(x), torch_softmax(x))
    )
    return not error <= 1.25 * own + torch.finfo(x.dtype).eps / 2  # NaN is wrong too


def measure(task) -> dict:
    """Times of one shape. task: (kind, shape, dtype, functions by name)."""
    kind, shape, dtype, calls = task
    sets = inputs(shape, dtype)
    for name in [name for name in calls if name not in PEERS]:
        if wrong(calls[name], sets[0][0]):
            raise AssertionError(f"{name} is wrong at {shape}")
    times = gpu_bench.gpu_times(calls, sets, **({"round_ms": REGRET_ROUND_MS} if kind == "regret" else {}))
    graphs = {}
    if kind == "table" and times[OURS] < LAUNCH_BOUND_US:
        graphs = {name: gpu_bench.graph_time(call, sets) for name, call in calls.items()}
    return {"shape": shape, "dtype": str(dtype).split(".")[1], "times": times, "graphs": graphs}


def prepare(kind, shape, dtype) -> tuple:
    """Compile all that the shape takes; on a small copy where the number of rows does not matter."""
    calls = strategies(shape, dtype) if kind == "regret" else candidates(shape)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    for name in list(calls):
        try:
            calls[name](x)
        except Exception as error:
            if name not in PEERS:
                raise
            print(f"{name} at {shape}: {type(error).__name__}", file=sys.stderr)
            del calls[name]
    torch.cuda.synchronize()
    return kind, shape, dtype, calls


def work(tasks, all_ready, turn, results) -> None:
    """A worker process: prepare its tasks, wait for all workers, measure when it has the turn."""
    prepared = []
    for task in tasks:
        try:
            prepared.append(prepare(*task))
        except Exception as error:
            results.put({"error": f"{task}: {error!r}"[:300]})
        torch.cuda.empty_cache()
    all_ready.wait()
    for task in prepared:
        with turn:
            try:
                result = measure(task)
            except Exception as error:
                result = {"error": f"{task[:3]}: {error!r}"[:300]}
            torch.cuda.empty_cache()
        results.put(result)


def measure_all(tasks: list[tuple], workers: int) -> list[dict]:
    """Results of all tasks (kind, shape, dtype), in their order; prints what failed."""
    context = multiprocessing.get_context("spawn")
    workers = min(workers, len(tasks))
    all_ready, turn, results = context.Barrier(workers), context.Lock(), context.Queue()
    processes = [
        context.Process(target=work, args=(tasks[i::workers], all_ready, turn, results))
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    found = [results.get() for _ in tasks]
    for process in processes:
        process.join()
    for result in found:
        if "error" in result:
            print("FAILED", result["error"])
    order = {(shape, str(dtype).split(".")[1]): i for i, (_, shape, dtype) in enumerate(tasks)}
    return sorted((r for r in found if "error" not in r), key=lambda r: order[r["shape"], r["dtype"]])


def bandwidth(result, name=OURS) -> float | None:
    """TB/s, read plus written."""
    if name not in result["times"]:
        return None
    return 2 * math.prod(result["shape"]) * 2 / result["times"][name] * 1e-6


def chosen(result) -> str:
    """The strategy that is chosen."""
    from warpspec.softmax.plan import choose_plan
    from warpspec.softmax.problem import SoftmaxProblem

    rows, length = result["shape"]
    problem = SoftmaxProblem(rows, length, result["dtype"], length * 2 % 16 == 0)
    return choose_plan(problem, target_of(torch.device("cuda", 0))).strategy


def verdict(result, copy: float) -> str:
    """ "met", or which bar is not."""
    mine = result["times"][OURS]
    peer = min(result["times"][name] for name in PEERS if name in result["times"])
    allowed = peer / EQUAL if mine < EQUAL_US else peer
    data = 4 * math.prod(result["shape"])
    missed = []
    if mine > allowed:
        missed.append(f"{mine / peer - 1:.1%} behind")
    if data > LARGE_BYTES and bandwidth(result) < OF_COPY * copy:
        missed.append(f"{bandwidth(result) / copy:.0%} of copy")
    return ", ".join(missed) or "met"


def softmax_table(results, copy: float) -> str:
    rows = []
    for result in results:
        times, graphs = result["times"], result["graphs"]
        rows.append(
            (
                "x".join(map(str, result["shape"])),
                result["dtype"],
                chosen(result),
                *(times.get(name) for name in (OURS, *PEERS)),
                graphs.get(OURS),
                min((graphs[name] for name in PEERS if name in graphs), default=None),
                bandwidth(result),
                f"{bandwidth(result) / copy:.0%}",
                verdict(result, copy),
            )
        )
    columns = ("shape", "dtype", "strategy", f"{OURS} us", *(f"{name} us" for name in PEERS))
    columns += ("in a graph", "fastest peer's", "TB/s", "of copy", "bars")
    return gpu_bench.table(columns, rows, markdown=True)


def host_table() -> str:
    """CPU time of a call from Python; the first row is held against HOST_LIMIT_US."""
    from warpspec.softmax import softmax

    rows = []
    for shape in ((128, 1024), (4, 65536), (4, 1048576), (2, 3, 1001)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(x)
        calls = [lambda x: softmax(x), lambda x, out=out: softmax(x, out=out), lambda x: torch.softmax(x, -1)]
        rows.append(("x".join(map(str, shape)), *(gpu_bench.host_time(call, [(x,)]) for call in calls)))
    held = "ok" if rows[0][1] < HOST_LIMIT_US else "MISSED"
    table = gpu_bench.table(
        ("shape", "softmax(x) us", "softmax(x, out=) us", "torch us"), rows, markdown=True
    )
    return f"{table}\n\nsoftmax(x) of {rows[0][0]} under {HOST_LIMIT_US:g} us: {held}"


def regret_shapes(seed: int) -> list[tuple]:
    """Random tasks: rows and lengths even in their logarithms, half of the lengths not a multiple of a vector."""
    draw = random.Random(seed)
    tasks = []
    while len(tasks) < REGRET_SHAPES:
        rows, length = round(2 ** draw.uniform(0, 18)), round(2 ** draw.uniform(4, 25))
        if len(tasks) % 2:
            length = -(-length // 8) * 8
        if rows * length <= REGRET_MOST_ELEMENTS and (rows, length) not in bench_shapes.SOFTMAX:
            tasks.append(
                ("regret", (rows, length), draw.choice((*bench_shapes.SOFTMAX_DTYPES, torch.float32)))
            )
    return tasks


def regret(workers: int, seed: int) -> None:
    results = measure_all(regret_shapes(seed), workers)
    names = ("rows", "cluster", "staged", "resident", "split", "two-pass")
    rows, ratios = [], []
    for result in results:
        times = result["times"]
        pick = next(iter(times))
        ratios.append(times[pick] / min(times.values()))
        shape = "x".join(map(str, result["shape"]))
        rows.append(
            (shape, result["dtype"], pick, *(times.get(name) for name in names), f"{ratios[-1] - 1:.1%}")
        )
    print(gpu_bench.table(("shape", "dtype", "chosen", *(f"{name} us" for name in names), "regret"), rows))
    print(
        f"\nregret over {len(ratios)} shapes: mean {statistics.mean(ratios) - 1:.1%}, "
        f"median {statistics.median(ratios) - 1:.1%}, worst {max(ratios) - 1:.1%}; "
        f"{sum(ratio < 1.05 for ratio in ratios)} within 5%"
    )


def plot(path: Path, workers: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = [("plot", (PLOT_ELEMENTS // length, length), torch.bfloat16) for length in PLOT_LENGTHS]
    results = measure_all(tasks, workers)
    names = (OURS, *PEERS)
    print(
        gpu_bench.table(
            ("row length", *(f"{name} TB/s" for name in names)),
            [(result["shape"][1], *(bandwidth(result, name) for name in names)) for result in results],
        )
    )
    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=110)
    for name in names:
        points = [(r["shape"][1], bandwidth(r, name)) for r in results if name in r["times"]]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    axes.axhline(gpu_bench.copy_bandwidth(), color="gray", linestyle="--", linewidth=1, label="copy")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"row length (bf16, {PLOT_ELEMENTS >> 20} Mi elements in all)")
    axes.set_ylabel("read + written, TB/s")
    axes.set_title(gpu_bench.header(packages=()).split(", L2")[0], fontsize=9)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = driver.parser(__doc__)
    parser.add_argument("--regret", action="store_true", help="every strategy at 60 random shapes")
    parser.add_argument("--seed", type=int, default=REGRET_SEED, help="of --regret's shapes")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="bandwidth against row length")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--no-topk", action="store_true", help="leave out softmax + top-k's table")
    options = parser.parse_args()
    driver.begin()
    if options.regret:
        return regret(options.workers, options.seed)
    if options.plot:
        return plot(options.plot, options.workers)
    copy = gpu_bench.copy_bandwidth()
    torch.cuda.empty_cache()
    print(f"copy: {copy:.2f} TB/s\n")
    tasks = [
        ("table", shape, dtype) for shape in bench_shapes.SOFTMAX for dtype in bench_shapes.SOFTMAX_DTYPES
    ]
    print(softmax_table(measure_all(tasks, options.workers), copy))
    print(f"\nCPU time of a call:\n{host_table()}")
    topk = Path(__file__).with_name("bench_topk.py")
    if not options.no_topk and topk.exists():
        print(flush=True)
        subprocess.run([sys.executable, topk], check=True)


if __name__ == "__main__":
    main()
