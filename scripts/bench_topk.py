"""softmax_topk against its peers on this machine's GPU: microseconds a call, and the time its bytes alone would take.

    python scripts/bench_topk.py              # the table
    python scripts/bench_topk.py --variants   # also every way to divide a row, against the one that is chosen

Peers, in the same run on the same inputs: torch (softmax in fp32, then topk: two kernels and V probabilities in
memory), QuACK where it applies (k and V powers of two, V up to 4096; its probabilities are among the k, those of
``renormalize``). "events": two events around each call; "graph": a call's share of a CUDA graph of many. Inputs
rotate through more memory than the L2 holds. Every result is first compared with torch in float64.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import gpu_bench
import torch

from warpspec.softmax.topk import reference, softmax_topk
from warpspec.softmax.topk.choose import STREAM_ROWS, held
from warpspec.softmax.topk.launch import compiled, configuration, target

SHAPES = (  # rows, columns, k, dtype, bar in microseconds (None: QuACK's)
    (8192, 50257, 10, torch.float32, 450.0),
    (64, 129280, 8, torch.float32, 20.0),
    (8192, 384, 6, torch.float32, 8.0),
    (512, 2048, 8, torch.bfloat16, None),
)
MORE_SHAPES = (
    (8192, 50257, 10, torch.bfloat16, None),
    (8192, 50257, 128, torch.float32, None),
    (8192, 256, 8, torch.bfloat16, None),
    (128, 384, 6, torch.float32, None),
    (1, 129280, 8, torch.float32, None),
    (1024, 129280, 64, torch.bfloat16, None),
)
# A router's logits have just been written: these are also measured on one set of inputs, which the L2 holds.
RESIDENT_SHAPES = ((8192, 384, 6, torch.float32, 8.0),)
QUACK_LENGTH = 4096  # longest row it takes
WARPS = (1, 2, 4, 8, 16)
CLUSTERS = (1, 2, 4, 8)
UNROLLS = (1, 2, 4)
CHECKED_ROWS = 256
TOLERANCE = 1e-6
MOST_CTAS = 16  # a row, of the variants that are tried


def power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def peers(length: int, k: int) -> dict:
    """name -> call(logits, probs, indices), which may leave the outputs alone."""
    calls = {"torch": lambda x, *_: torch.topk(torch.softmax(x, -1, dtype=torch.float32), k)}
    if length <= QUACK_LENGTH and power_of_two(length) and power_of_two(k):
        try:
            from quack.topk import topk
        except ImportError:
            return calls
        calls["quack"] = lambda x, *_: topk(x, k, softmax=True)
    return calls


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
    calls = {"ours": lambda x, *_: softmax_topk(x, k), **peers(length, k)}
    events = gpu_bench.gpu_times(calls, sets)
    graph = {name: gpu_bench.graph_time(call, sets) for name, call in calls.items()}
    host = gpu_bench.host_time(calls["ours"], sets)
    floor = rows * (length * dtype.itemsize + k * 8) / bandwidth * 1e-6
    bar = events.get("quack") if bar is None else bar
    name = f"{rows} x {length} k{k} {str(dtype).removeprefix('torch.')}{' in L2' if resident else ''}"
    best = min(value for peer, value in events.items() if peer != "ours")
    return [
        *(name, events["ours"], graph["ours"], events["torch"], graph["torch"], events.get("quack")),
        *(graph.get("quack"), floor, bar, best / events["ours"], host),
    ]


def variants(shape) -> list[list]:
    """Events and graph times of every way to divide a row, best first; the chosen one is starred."""
    rows, length, k, dtype, _ = shape
    sets = inputs(rows, length, k, dtype)
    arch, sm_count = target(0)
    chosen = configuration(sets[0][0], k, False, sm_count)
    base = replace(chosen, held=False, full=False, lanes=32, warps=16, cluster=1, rows=1)
    configs = {chosen}
    for warps in WARPS:
        for cluster in CLUSTERS:
            for unroll in UNROLLS:
                if warps * 32 < chosen.k_capacity or cluster > MOST_CTAS // warps:
                    continue
                division = {
                    "warps": warps,
                    "cluster": cluster,
                    "unroll": unroll,
                    "held": False,
                    "full": False,
                }
                configs.add(replace(base, **division, rows=STREAM_ROWS if warps == cluster == 1 else 1))
    configs.update(held(base, rows, length, k))
    calls = {config: compiled(config, arch, native=True) for config in configs}
    for call in calls.values():
        call(*sets[0])
        check(*sets[0], k)
    events = gpu_bench.gpu_times(calls, sets, rounds=2, round_ms=10.0)
    table = []
    for config in sorted(calls, key=events.get):
        mark = "*" if config == chosen else ""
        graph = gpu_bench.graph_time(calls[config], sets, replays=5)
        kind = f"held by {config.lanes} lanes" if config.held else "stream"
        table.append(
            [mark, kind, config.warps, config.cluster, config.rows, config.unroll, events[config], graph]
        )
    return table


COLUMNS = (
    *("shape", "us", "in a graph", "torch", "in a graph", "QuACK", "in a graph"),
    *("bytes alone", "bar", "faster than best peer", "host us"),
)


def table(shapes=SHAPES + MORE_SHAPES, *, markdown: bool = False) -> str:
    """Microseconds of ours and the peers at ``shapes``; "bytes alone" at the copy bandwidth measured here."""
    bandwidth = gpu_bench.copy_bandwidth()
    rows = [measure(shape, bandwidth) for shape in shapes]
    rows += [measure(shape, bandwidth, resident=True) for shape in RESIDENT_SHAPES]
    return gpu_bench.table(COLUMNS, rows, markdown=markdown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", action="store_true", help="time every way to divide a row, too")
    parser.add_argument("--bars", action="store_true", help="only the four shapes that have a bar")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    shapes = SHAPES if options.bars else SHAPES + MORE_SHAPES
    print(gpu_bench.header())
    print(table(shapes, markdown=options.markdown), flush=True)
    for shape in shapes if options.variants else ():
        print("\n", *shape[:4], flush=True)
        columns = ("", "row", "warps", "cluster", "rows", "unroll", "us", "in a graph")
        print(gpu_bench.table(columns, variants(shape), markdown=options.markdown), flush=True)


if __name__ == "__main__":
    main()
