"""The mixture-of-experts layer on this machine's Hopper GPU: microseconds, share of the floor, ratio to peers.

    python scripts/bench_moe.py                                 # every model, T and routing
    python scripts/bench_moe.py --models gpt-oss-120b --tokens 1,16 --stages      # what the stages take
    python scripts/bench_moe.py --models flash --tokens 64 --shapes 1x8x4x3,2x16x3x2   # tiles, timed in turn
    python scripts/bench_moe.py --tokens 512,4096 --stages --sorts 32x1,32x1x1,32x8x1x1024x1   # ways to sort, in turn

Weights are random codes (their values do not matter to the time), one layer's, larger than the L2 except where few
experts are taken: sets of tokens rotate in a CUDA graph, each with routing of its own. "floor": the weights of the
experts that have tokens, read once at the speed of a copy (measured here), or the products' FLOPs at --tflops,
whichever is longer. "uniform" routing draws k different experts; "zipf" draws them by weights 1 / rank**1.1. Peers
(shared/moe_peers.py: both GEMMs, rows sorted beforehand) are timed in turn with ours; "peers": the fastest one's time
over ours. Results are compared with the FP32 reference first.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import astuple, dataclass, replace

import torch
from shared import gpu_bench
from shared.moe_peers import peers_of

from warpspec.common.hardware import WARPGROUP_ROWS
from warpspec.common.launch import target_of
from warpspec.moe import NVFP4Experts, moe_ffn, reference
from warpspec.moe.permute import sort_tokens
from warpspec.moe.problem import LayerProblem
from warpspec.moe.sm90.config import Shape
from warpspec.moe.sm90.layer import Layer
from warpspec.moe.sort import SortShape, sort_choices
from warpspec.moe.streamed import (
    CHUNK_BYTES,
    SCALE_BIAS,
    SCALE_MANTISSA_BITS,
    STEP_CHUNKS,
    StreamedWeights,
    row_order,
    scale_bytes,
    steps_of,
    tile_bytes,
)

TOKENS = (1, 2, 4, 16, 64, 256, 512, 2048, 4096)
ZIPF = 1.1
TOLERANCE = 6e-3
DEFAULT_SORT = astuple(SortShape())
SETS = 8  # of tokens, at most
FEW_SETS_BYTES = 4 << 30  # beyond so many bytes of weights to a call, two sets do


@dataclass(frozen=True)
class Model:
    """Sizes of a layer. block: values to a scale."""

    experts: int
    hidden: int
    width: int
    choices: int
    block: int
    activation: str
    limit: float
    biases: bool


MODELS = {
    "gpt-oss-20b": Model(32, 2880, 2880, 4, 32, "swiglu_oai", 7.0, True),
    "gpt-oss-120b": Model(128, 2880, 2880, 4, 32, "swiglu_oai", 7.0, True),
    "flash": Model(256, 4096, 2048, 6, 16, "swiglu", 10.0, False),
    "pro-48": Model(48, 7168, 3072, 6, 16, "swiglu", 10.0, False),
}


def random_weights(model: Model, n: int, k: int, parts: int, generator) -> StreamedWeights:
    """Random codes, scales of 1 to 2, a global scale that keeps the results' size that of the tokens."""
    rows = len(row_order(n, parts == 2))
    tiles = rows // WARPGROUP_ROWS
    data = torch.empty(model.experts, tiles, tile_bytes(k, model.block), dtype=torch.uint8, device="cuda")
    data.view(torch.int64).random_(generator=generator)
    size = scale_bytes(model.block)
    low = (1 << SCALE_MANTISSA_BITS) - 1 if model.block == 16 else 0
    for step in range(steps_of(k)):
        at = step * (size + STEP_CHUNKS * CHUNK_BYTES)
        scales = data[:, :, at : at + size]
        scales.bitwise_and_(low).add_(SCALE_BIAS << SCALE_MANTISSA_BITS)
    scale = torch.full((model.experts, parts), 0.4 / k**0.5, device="cuda")
    bias = torch.randn(model.experts, rows, device="cuda", generator=generator) / 4 if model.biases else None
    return StreamedWeights(data, scale, n, k, model.block, bias)


def random_experts(model: Model) -> NVFP4Experts:
    generator = torch.Generator("cuda").manual_seed(0)
    w13 = random_weights(model, 2 * model.width, model.hidden, 2, generator)
    w2 = random_weights(model, model.hidden, model.width, 1, generator)
    return NVFP4Experts(w13, w2, torch.ones(model.experts, device="cuda"))


def random_tokens(model: Model, tokens: int, routing: str, seed: int) -> tuple:
    """(x, ids, weights)."""
    generator = torch.Generator().manual_seed(seed)
    likely = torch.arange(1, model.experts + 1) ** (-ZIPF if routing == "zipf" else 0.0)
    ids = torch.multinomial(likely.expand(tokens, -1), model.choices, generator=generator).int()
    x = torch.randn(tokens, model.hidden, generator=generator).bfloat16()
    weights = torch.rand(tokens, model.choices, generator=generator)
    return x.cuda(), ids.cuda(), (weights / weights.sum(1, keepdim=True)).cuda()


def bytes_read(experts: NVFP4Experts, ids: torch.Tensor) -> int:
    """Weights of the experts that have tokens."""
    each = sum(w.data[0].numel() for w in (experts.w13, experts.w2))
    return each * len(torch.unique(ids))


def flops(model: Model, tokens: int) -> float:
    return 6.0 * tokens * model.choices * model.hidden * model.width


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
        renamed = torch.tensor([[own.index(e) for e in ids[t].tolist()]], dtype=torch.int32, device="cuda")
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


def pick(w: StreamedWeights, experts: list[int]) -> StreamedWeights:
    bias = None if w.bias is None else w.bias[experts]
    return replace(w, data=w.data[experts], global_scale=w.global_scale[experts], bias=bias)


def measure(
    name: str, experts: NVFP4Experts, peers: dict, tokens: int, routing: str, options, bandwidth: float
) -> None:
    """Print the rows of one model, number of tokens and routing."""
    model = MODELS[name]
    count = SETS if tokens < 64 else 2
    sets = [random_tokens(model, tokens, routing, seed) for seed in range(count)]
    problem = problem_of(model, experts, *sets[0])
    target = target_of(sets[0][0].device)
    calls, wanted = {}, wanted_of(model, experts, *sets[0])
    for shape, way in itertools.product(options.shapes or [None], options.sorts or [None]):
        layer = Layer(problem, experts.w13, experts.w2, target, shape, sort_shape=way)

        def call(x, ids, weights, out=None, layer=layer):
            layer.run(x, ids, weights, experts.w13, experts.w2, torch.empty_like(x) if out is None else out)

        called = ", ".join(str(choice) for choice in (shape, way) if choice) or "chosen tiles"
        check(f"{name} T {tokens} {called}", call, wanted, *sets[0])
        calls[called] = call
        if options.stages:
            calls |= {f"{called}: {stage}": one for stage, one in stages_of(layer, experts, sets).items()}
    if not options.shapes and not options.sorts and not options.stages:

        def public(x, ids, weights):
            moe_ffn(x, experts, ids, weights, activation=model.activation, limit=model.limit)

        calls = {"moe_ffn": public}
    for called, bind in peers.items():
        try:
            calls[called] = bind(sets)
        except Exception as error:  # others' code: one that fails is no peer
            print(f"{called}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    times = gpu_bench.graph_times(calls, sets, rounds=options.rounds)
    read = sum(bytes_read(experts, ids) for _, ids, _ in sets) / len(sets)
    floor = max(read / bandwidth, flops(model, tokens) / options.tflops) * 1e-6
    best = min((times[called] for called in times if called in peers), default=None)
    for called, time in times.items():
        ratio = "" if best is None or called in peers else f", peers {best / time:4.2f}"
        print(
            f"{name:13} T {tokens:4} {routing:8} {called:44} {time:8.1f} us, floor {floor:7.1f}, "
            f"share {floor / time * 100:3.0f}%, {read / time * 1e-6:5.2f} TB/s{ratio}",
            flush=True,
        )


def stages_of(layer: Layer, experts: NVFP4Experts, sets: list) -> dict:
    """Functions that run one stage each, on what the stages before left."""
    kept = {}
    for x, ids, _ in sets:
        kept[id(ids)] = layer.sort(x, ids)
    h, y = layer.buffers(sets[0][0])
    ids_alone = dict(widths=layer.gate_config.widths, shape=layer.sort_shape)
    return {
        "sort": lambda x, ids, weights: layer.sort(x, ids),
        "sort, no activations": lambda x, ids, weights: sort_choices(ids, layer.experts, **ids_alone),
        "gemm 1": lambda x, ids, weights: layer.first(kept[id(ids)], experts.w13, h),
        "gemm 2": lambda x, ids, weights: layer.second(kept[id(ids)], h, experts.w2, y),
        "sum": lambda x, ids, weights: layer.sum(kept[id(ids)], y, weights, torch.empty_like(x)),
    }


def parse_sort(text: str) -> SortShape:
    """ "32x8x1x1024x1": warps, CTAs, counters padded, copy threads an SM, by rows."""
    warps, ctas, padded, threads, by_rows, *_ = [
        *map(int, text.split("x")),
        *DEFAULT_SORT[text.count("x") + 1 :],
    ]
    return SortShape(warps, ctas, bool(padded), threads, bool(by_rows))


def parse_shape(text: str) -> Shape:
    """ "1x8x4x3": row groups, tokens, stages, CTAs an SM; then load warps, splits."""
    return Shape(*map(int, text.split("x")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--routing", default="uniform,zipf")
    parser.add_argument("--shapes", default="", help="row groups x tokens x stages x CTAs an SM, ...")
    parser.add_argument(
        "--sorts", default="", help="warps x CTAs x padded x copy threads an SM x by rows, ..."
    )
    parser.add_argument("--stages", action="store_true", help="time every stage by itself, too")
    parser.add_argument("--peers", action="store_true", help="time those that are there, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tflops", type=float, default=740.0, help="rate of the floor's products")
    options = parser.parse_args()
    options.shapes = [parse_shape(text) for text in options.shapes.split(",") if text]
    options.sorts = [parse_sort(text) for text in options.sorts.split(",") if text]
    print(gpu_bench.header())
    bandwidth = gpu_bench.copy_bandwidth()
    print(f"copy {bandwidth:.2f} TB/s", flush=True)
    for name in options.models.split(","):
        experts = random_experts(MODELS[name])
        peers = peers_of(MODELS[name]) if options.peers else {}
        for tokens in map(int, options.tokens.split(",")):
            for routing in options.routing.split(","):
                measure(name, experts, peers, tokens, routing, options, bandwidth)


if __name__ == "__main__":
    main()
