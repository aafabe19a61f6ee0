"""The mixture-of-experts layer on this machine's Hopper GPU: microseconds, share of the floor, ratio to peers.

    python scripts/bench_moe.py                                 # every model, T and routing
    python scripts/bench_moe.py --models gpt-oss-120b --tokens 1,16 --stages      # what the stages take
    python scripts/bench_moe.py --models flash --tokens 64 --shapes 1x8x4x3,2x8x4x2   # tiles, timed in turn
    python scripts/bench_moe.py --tokens 1 --shapes 1x8x4x3+1x8x4x2x1x2     # of GEMM 1 and of GEMM 2
    python scripts/bench_moe.py --tokens 512,4096 --stages --sorts 4x1,32x1,32x8   # shapes of the sort, in turn
    python scripts/bench_moe.py --tokens 1,2 --unsorted 0,1        # few rows sorted, and not

    python scripts/bench_moe.py --peers --rows FILE --minutes 9    # the whole table in parts: again until it is there
    python scripts/bench_moe.py --peers --once --models flash --tokens 16   # fills compilers' caches, see below
    python scripts/bench_moe.py --peers --dry --rows FILE          # small layers in the simulator: all but the times

Weights are random codes (their values do not matter to the time), one layer's, larger than the L2 except where few
experts are taken: sets of tokens rotate in a CUDA graph, each with routing of its own. "floor": the weights of the
experts that have tokens, read once at the speed of a copy (measured here), or the products' FLOPs at --tflops,
whichever is longer. "uniform" routing draws k different experts; "zipf" draws them by weights 1 / rank**1.1. Peers
(shared/moe_peers.py: both GEMMs, rows sorted beforehand) are timed in turn with ours; "peers": the fastest one's time
over ours. Results are compared with the FP32 reference first. A table of --rows is printed at the end; a row that the
file has is not measured again. Peers' compilers take longer than the times: several processes of --once, which call
each candidate once (but those of bf16 weights), fill their caches on many cores before the table.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import torch
from shared import bench_shapes, driver, gpu_bench, kept_rows
from shared.moe_peers import peers_of
from shared.moe_random import (
    DEVICE,
    MODELS,
    SMALL_MODELS,
    Model,
    bytes_read,
    flops,
    pick,
    random_experts,
    random_tokens,
)

from warpspec.common.launch import SIMULATED, target_of
from warpspec.moe import NVFP4Experts, moe_ffn, reference
from warpspec.moe.permute import sort_tokens
from warpspec.moe.problem import LayerProblem
from warpspec.moe.sm90.config import Shape
from warpspec.moe.sm90.layer import Layer
from warpspec.moe.sort import SortShape, sort_choices

TOLERANCE = 6e-3
SETS = 8  # of tokens, at most


def problem_of(model: Model, experts: NVFP4Experts, x, ids, weights) -> LayerProblem:
    return LayerProblem.check(
        *(x, ids, weights, experts.w13, experts.w2, experts.intermediate_scale),
        shared=0,
        activation=model.activation,
        limit=model.limit,
        values=False,
    )


def wanted_of(model: Model, experts: NVFP4Experts, x, ids, weights) -> dict[int, torch.Tensor]:
    """Results of the first and the last token by the reference, on their experts alone."""
    found = {}
    for t in {0, len(x) - 1}:
        own = sorted(set(ids[t].tolist()))
        few = [pick(w, own) for w in (experts.w13, experts.w2)]
        renamed = torch.tensor([[own.index(e) for e in ids[t].tolist()]], dtype=torch.int32, device=DEVICE)
        options = (experts.intermediate_scale[own], model.activation, model.limit, "w4a16")
        tokens = sort_tokens(renamed, len(own))
        found[t] = reference.layer(x[t : t + 1], tokens, weights[t : t + 1], *few, *options)[0]
    return found


def check(called: str, call, wanted: dict, x, ids, weights) -> None:
    """Exit with a message unless the result is right, and the same bits twice."""
    results = [torch.full_like(x, torch.nan) for _ in range(2)]
    for out in results:
        call(x, ids, weights, out)
    worst = max(((results[0][t].float() - row).norm() / row.norm()).item() for t, row in wanted.items())
    if not worst < TOLERANCE or not torch.equal(*results):
        sys.exit(f"{called}: error {worst}, same bits twice: {torch.equal(*results)}")


def measure(
    model: Model, name: str, experts: NVFP4Experts, peers: dict, tokens: int, routing: str, options, bandwidth
) -> dict:
    """Print the rows of one model, number of tokens and routing; microseconds by name, and the floor's."""
    count = SETS if tokens < 64 else 2
    sets = [random_tokens(model, tokens, routing, seed) for seed in range(count)]
    problem = problem_of(model, experts, *sets[0])
    target = target_of(sets[0][0].device) if DEVICE == "cuda" else SIMULATED["sm_90a"]
    calls, stages, wanted = {}, {}, wanted_of(model, experts, *sets[0])
    for shapes, sort, unsorted in itertools.product(options.shapes, options.sorts, options.unsorted):
        layer = Layer(
            *(problem, experts.w13, experts.w2, target),
            shapes=parse_shapes(shapes) if shapes else None,
            sort_shape=SortShape(*map(int, sort.split("x"))) if sort else None,
            unsorted=unsorted == "1" if unsorted else None,
        )

        def call(x, ids, weights, out=None, layer=layer):
            layer.run(x, ids, weights, experts.w13, experts.w2, torch.empty_like(x) if out is None else out)

        named = {"tiles": shapes, "sort": sort, "unsorted": unsorted}
        called = ", ".join(f"{name} {text}" for name, text in named.items() if text) or "chosen tiles"
        check(f"{name} T {tokens} {called}", call, wanted, *sets[0])
        calls[called] = call
        if options.stages:
            stages |= {f"{called}: {stage}": one for stage, one in stages_of(layer, experts, sets).items()}
    if not any(options.about):

        def public(x, ids, weights):
            moe_ffn(x, experts, ids, weights, activation=model.activation, limit=model.limit)

        calls = {"moe_ffn": public}
    for called, bind in peers.items():
        try:
            peer = bind(sets)
            calls |= {called: peer} if peer else {}
        except Exception as error:  # others' code: one that fails is no peer
            print(f"{called}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    # Stages draw less power than layers, and what follows them on a GPU at its limit is faster for it.
    times = times_of(calls, sets, options) | times_of(stages, sets, options)
    read = sum(bytes_read(experts, ids) for _, ids, _ in sets) / len(sets)
    floor = max(read / bandwidth, flops(model, tokens) / options.tflops) * 1e-6
    best = min((times[called] for called in times if called in peers), default=None)
    for called, us in times.items():
        ratio = "" if best is None or called in peers else f", peers {best / us:4.2f}"
        print(
            f"{name:13} T {tokens:4} {routing:8} {called:44} {us:8.1f} us, floor {floor:7.1f}, "
            f"share {floor / us * 100:3.0f}%, {read / us * 1e-6:5.2f} TB/s{ratio}",
            flush=True,
        )
    return {"floor": floor, "ours": [called for called in times if called not in peers], "times": times}


def times_of(calls: dict, sets: list, options) -> dict[str, float]:
    """Microseconds, in turn in graphs; or of one call each, which says that it runs, and nothing else."""
    if calls and not (options.dry or options.once):
        return gpu_bench.graph_times(calls, sets, rounds=options.rounds)
    times = {}
    for called, call in calls.items():
        start = time.perf_counter()
        call(*sets[0])
        times[called] = (time.perf_counter() - start) * 1e6
    return times


def table(rows: list[dict]) -> str:
    """Markdown: a line for each of our rows, a column for each peer."""
    peers = sorted({called for row in rows for called in row["times"] if called not in row["ours"]})
    lines = []
    for row in rows:
        times = row["times"]
        best = min((times[peer] for peer in peers if peer in times), default=None)
        for called in row["ours"]:
            us = times[called]
            ratio = None if best is None else best / us
            share = f"{row['floor'] / us * 100:.0f}%"
            about = row["model"], row["routing"], row["tokens"], called
            lines.append((*about, us, row["floor"], share, *(times.get(peer) for peer in peers), ratio))
    columns = ("model", "routing", "T", "", "us", "floor", "share", *peers, "best peer / ours")
    return gpu_bench.table(columns, lines, markdown=True)


def stages_of(layer: Layer, experts: NVFP4Experts, sets: list) -> dict:
    """Functions that run one stage each, on what the stages before left."""
    kept = {}
    for x, ids, _ in sets:
        kept[id(ids)] = layer.sort(x, ids)
    h, y = layer.buffers(sets[0][0])
    ids_alone = dict(widths=layer.gate_config.widths, shape=layer.sort_shape)
    sorts = {
        "sort": lambda x, ids, weights: layer.sort(x, ids),
        "sort, no activations": lambda x, ids, weights: sort_choices(ids, layer.experts, **ids_alone),
    }
    return (sorts if kept[id(sets[0][1])][0] else {}) | {
        "gemm 1": lambda x, ids, weights: layer.first(kept[id(ids)], experts.w13, h),
        "gemm 2": lambda x, ids, weights: layer.second(kept[id(ids)], h, experts.w2, y),
        "sum": lambda x, ids, weights: layer.sum(kept[id(ids)], y, weights, torch.empty_like(x)),
    }


def parse_shapes(text: str) -> tuple[Shape, Shape]:
    """ "1x8x4x3": row groups, tokens, stages, CTAs an SM; then load warps, splits, tall, steps. With "+" GEMM 2's."""
    shapes = [Shape(*map(int, one.split("x"))) for one in text.split("+")]
    return shapes[0], shapes[-1]


def main() -> None:
    parser = driver.parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, bench_shapes.EXPERTS_TOKENS)))
    parser.add_argument("--routing", default="uniform,zipf")
    parser.add_argument("--shapes", default="", help="row groups x tokens x stages x CTAs an SM, ...")
    parser.add_argument("--sorts", default="", help="warps x CTAs, ...")
    parser.add_argument("--unsorted", default="", help="0, 1")
    parser.add_argument("--stages", action="store_true", help="time every stage by itself, too")
    parser.add_argument("--peers", action="store_true", help="time those that are there, too")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--once", action="store_true", help="one call each instead of times")
    parser.add_argument("--tflops", type=float, default=740.0, help="rate of the floor's products")
    parser.add_argument("--rows", type=Path, help="file of results, JSON lines, which grows")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no row is begun")
    parser.add_argument("--dry", action="store_true", help="small layers on the CPU, one call each")
    options = parser.parse_args()
    begun = time.monotonic()
    if options.dry:
        options.models, options.tokens = ",".join(SMALL_MODELS), "1,5"
    options.about = [options.shapes, options.sorts, options.unsorted, options.stages]
    for name in ("shapes", "sorts", "unsorted"):
        setattr(options, name, getattr(options, name).split(","))
    header, bandwidth = "no times", 1.0
    if not (options.dry or options.once):
        header, bandwidth = driver.begin(), gpu_bench.copy_bandwidth()
    else:
        print(header)
    print(f"copy {bandwidth:.2f} TB/s", flush=True)
    kept, left = kept_rows.KeptRows(options.rows), 0
    for name in options.models.split(","):
        model = (SMALL_MODELS if options.dry else MODELS)[name]
        wanted = [
            dict(model=name, tokens=tokens, routing=routing, about=options.about)
            for tokens in map(int, options.tokens.split(","))
            for routing in options.routing.split(",")
        ]
        missing = [key for key in wanted if key not in kept]
        if missing and time.monotonic() - begun < options.minutes * 60:
            experts = random_experts(model)
            peers = peers_of(model, bf16=not options.once) if options.peers else {}
            while missing and time.monotonic() - begun < options.minutes * 60:
                key = missing.pop(0)
                found = measure(
                    model, name, experts, peers, key["tokens"], key["routing"], options, bandwidth
                )
                kept.add(key | found | {"header": header})
            del experts, peers
        left += len(missing)
    if options.rows:
        print(table(kept.rows))
    print(f"{left} rows left" if left else "all rows measured")


if __name__ == "__main__":
    main()
