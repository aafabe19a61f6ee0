"""softmax_topk against its peers on this machine's GPU: microseconds a call, and the time its bytes alone would take.

    python scripts/bench_topk.py              # the table
    python scripts/bench_topk.py --variants   # every way to divide a row, against the chosen one: a few shapes of
                                              # the table and random ones, which no constant was fitted to
    python scripts/bench_topk.py --variants --shapes 2x30000k9 64x129280k8   # (fp32) at these

Peers, in the same run on the same inputs: torch (softmax in fp32, then topk: two kernels and V probabilities in
memory), QuACK where it applies (k and V powers of two, V up to 4096; its probabilities are among the k, those of
``renormalize``). "events": two events around each call; "graph": a call's share of a CUDA graph of many. Inputs
rotate through more memory than the L2 holds. Every result is first compared with torch in float64.
"""

from __future__ import annotations

import random
import statistics
import sys
import time

import torch
from shared import bench_shapes, driver, gpu_bench
from shared.row_peers import topk_peers

from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.launch import Target, target_of
from warpspec.softmax.problem import DTYPES
from warpspec.softmax.topk import reference, softmax_topk
from warpspec.softmax.topk.launch import topk_kernel
from warpspec.softmax.topk.plan import timed_configs

RANDOM_SHAPES, RANDOM_SEED, RANDOM_ELEMENTS = 6, 20261122, 2**26
VARIANTS = 5  # ways to divide a row that are timed: those that the model likes best, and the chosen one
VARIANTS_ROUNDS, VARIANTS_ROUND_MS, VARIANTS_REPLAYS = 2, 3.0, 3
CHECKED_ROWS = 256
TOLERANCE = 1e-6


def check(logits, probs, indices, k: int) -> None:
    """Exit with a message if a result is wrong."""
    rows = slice(0, CHECKED_ROWS)
    expected, columns = reference.softmax_topk(logits[rows].double(), k, False)
    error = ((probs[rows] - expected).norm() / expected.norm()).item()
    if not torch.equal(indices[rows], columns) or not error <= TOLERANCE:
        sys.exit(f"wrong result for {list(logits.shape)}, k {k}, {logits.dtype}: error {error:.1e}")


def inputs(rows, length, k, dtype) -> list[tuple]:
    """Rotated (logits, probs, indices)."""

    def make(i):
        generator = torch.Generator("cuda").manual_seed(i)
        logits = torch.randn(rows, length, device="cuda", generator=generator).to(dtype)
        probs = torch.full((rows, k), torch.nan, device="cuda")
        return logits, probs, torch.full((rows, k), -1, dtype=torch.int32, device="cuda")

    return gpu_bench.rotation(make, rows * length * dtype.itemsize)


def measure(shape, bandwidth: float, resident: bool = False) -> list:
    """A row of the table. resident: inputs are in the L2."""
    rows, length, k, dtype, bar = shape
    sets = inputs(rows, length, k, dtype)[: 1 if resident else None]
    check(sets[0][0], *softmax_topk(sets[0][0], k), k)
    calls = {"ours": lambda x, *_: softmax_topk(x, k)}
    calls |= {peer: lambda x, *_, call=call: call(x) for peer, call in topk_peers(length, k).items()}
    events = gpu_bench.gpu_times(calls, sets)
    graph = {name: gpu_bench.graph_time(call, sets) for name, call in calls.items()}
    host = gpu_bench.host_time(calls["ours"], sets)
    floor = rows * (length * dtype.itemsize + k * 8) / bandwidth * 1e-6
    bar = events.get("QuACK") if bar is None else bar
    name = f"{rows} x {length} k{k} {str(dtype).removeprefix('torch.')}{' in L2' if resident else ''}"
    best = min(value for peer, value in events.items() if peer != "ours")
    return [
        *(name, events["ours"], graph["ours"], events["torch"], graph["torch"], events.get("QuACK")),
        *(graph.get("QuACK"), floor, bar, best / events["ours"], host),
    ]


def random_shapes() -> list[tuple]:
    """Rows, columns and k, even in their logarithms."""
    draw = random.Random(RANDOM_SEED)
    shapes = []
    while len(shapes) < RANDOM_SHAPES:
        rows, length = round(2 ** draw.uniform(0, 14)), round(2 ** draw.uniform(5, 20))
        k = round(2 ** draw.uniform(0, 7))
        if k <= length and rows * length <= RANDOM_ELEMENTS:
            shapes.append((rows, length, k, draw.choice((torch.float32, torch.bfloat16)), None))
    return shapes


def parse(text: str) -> tuple:
    """ "64x129280k8" as a shape, fp32."""
    rows, rest = text.split("x")
    length, k = rest.split("k")
    return int(rows), int(length), int(k), torch.float32, None


def ways(shape, sm_count: int) -> list:
    """The chosen configuration, then others in the order of their predicted times."""
    rows, length, k, dtype, _ = shape
    edges = length * dtype.itemsize % VECTOR_BYTES != 0
    timed = timed_configs(rows, length, k, DTYPES[dtype], edges, False, sm_count)
    return [config for _, config in timed[:VARIANTS]]


def variants(shape, target: Target) -> tuple[list[list], float]:
    """(events and graph times of ways to divide a row, best first, the chosen one starred; how far that is off)."""
    _, _, k, _, _ = shape
    sets = inputs(*shape[:4])
    chosen, *others = ways(shape, target.sm_count)
    calls = {config: topk_kernel.launcher(config, target) for config in (chosen, *others)}
    for call in calls.values():
        call(*sets[0])
        check(*sets[0], k)
    events = gpu_bench.gpu_times(calls, sets, rounds=VARIANTS_ROUNDS, round_ms=VARIANTS_ROUND_MS)
    rows = []
    for config in sorted(calls, key=events.get):
        mark = "*" if config == chosen else ""
        graph = gpu_bench.graph_time(calls[config], sets, replays=VARIANTS_REPLAYS)
        kind = f"held by {config.lanes} lanes" if config.held else "stream"
        rows.append(
            [mark, kind, config.warps, config.cluster, config.rows, config.unroll, events[config], graph]
        )
    return rows, events[chosen] / min(events.values()) - 1


def print_variants(shapes, seconds: float) -> None:
    """Tables of ``variants`` at as many of the shapes as ``seconds`` allow; then how far choices are off."""
    target = target_of(torch.device("cuda", 0))
    start, off = time.perf_counter(), []
    for shape in shapes:
        if time.perf_counter() - start > seconds:
            print(f"\n{len(shapes) - len(off)} shapes left out after {seconds:.0f} s (--seconds)")
            break
        found, regret = variants(shape, target)
        off.append(regret)
        rows, length, k, dtype, _ = shape
        print(f"\n{rows} x {length} k{k} {dtype}: {regret:.1%} off the best", flush=True)
        print(gpu_bench.table(VARIANT_COLUMNS, found), flush=True)
    print(
        f"\nchoices at {len(off)} shapes: mean {statistics.mean(off):.1%}, worst {max(off):.1%} off the best of "
        f"the {VARIANTS} that the model likes best"
    )


VARIANT_COLUMNS = ("", "row", "warps", "cluster", "rows", "unroll", "us", "in a graph")
COLUMNS = (
    *("shape", "us", "in a graph", "torch", "in a graph", "QuACK", "in a graph"),
    *("bytes alone", "bar", "faster than best peer", "host us"),
)


def table(shapes, *, markdown: bool = False) -> str:
    """Microseconds of ours and the peers at ``shapes``; "bytes alone" at the copy bandwidth measured here."""
    bandwidth = gpu_bench.copy_bandwidth()
    rows = [measure(shape, bandwidth) for shape in shapes]
    rows += [measure(shape, bandwidth, resident=True) for shape in bench_shapes.TOPK_RESIDENT]
    return gpu_bench.table(COLUMNS, rows, markdown=markdown)


def main() -> None:
    parser = driver.parser(__doc__, markdown=True)
    parser.add_argument("--variants", action="store_true", help="time ways to divide a row, no peers")
    parser.add_argument("--shapes", nargs="+", type=parse, metavar="64x129280k8", help="of --variants, fp32")
    parser.add_argument(
        "--seconds", type=float, default=50.0, help="begin no shape of --variants after this many"
    )
    parser.add_argument("--bars", action="store_true", help="only the four shapes that have a bar")
    options = parser.parse_args()
    driver.begin()
    if options.variants:
        return print_variants(options.shapes or [*bench_shapes.TOPK, *random_shapes()], options.seconds)
    shapes = bench_shapes.TOPK if options.bars else bench_shapes.TOPK + bench_shapes.TOPK_MORE
    print(table(shapes, markdown=options.markdown), flush=True)


if __name__ == "__main__":
    main()
