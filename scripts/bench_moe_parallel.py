"""Experts spread over this machine's GPUs by NCCL: the bits of one GPU, and the time of a call.

    python scripts/bench_moe_parallel.py                           # gpt-oss-120b, all GPUs
    python scripts/bench_moe_parallel.py --models flash --tokens 64,4096 --room 1.5

Every rank has this many tokens of its own and its share of the experts. "counted": as many rows travel as there are,
for which the host waits once a call. "sized": slots for --room times the choices that a rank has for each on average
(0: for all of them), "graph": the same in a CUDA graph. "one": the same tokens with all experts on this GPU, without a
group. Times are of the host's clock over calls in a row, after a barrier, the longest of the ranks'. Results are
compared bit by bit first."""

from __future__ import annotations

import functools
import math
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from shared import driver, gpu_bench
from shared.moe_random import MODELS, random_experts, random_tokens

from warpspec.moe import moe_ffn

CALLS, ROUNDS = 20, 5


def microseconds(call, group) -> float:
    """Time of a call on the slowest rank: median over rounds of calls in a row."""
    found = []
    for _ in range(ROUNDS):
        dist.barrier(group)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        took = torch.tensor((time.perf_counter() - start) / CALLS * 1e6, device="cuda")
        dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
        found.append(took.item())
    return statistics.median(found)


def capacity_of(choices: int, ranks: int, room: float) -> int:
    """Slots of a rank for each one: ``room`` times the average, at most for all choices; for all where room is 0."""
    return min(choices, math.ceil(choices / ranks * room)) if room else choices


def as_rank(rank: int, ranks: int, options) -> None:
    """One process and GPU."""
    torch.cuda.set_device(rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    group = dist.group.WORLD
    for name in options.models.split(","):
        model = MODELS[name]
        experts = random_experts(model)
        own = experts.shard(rank, ranks)
        for tokens in map(int, options.tokens.split(",")):
            x, ids, weights = random_tokens(model, tokens, options.routing, seed=rank)
            layer = dict(activation=model.activation, limit=model.limit)

            capacity = capacity_of(tokens * model.choices, ranks, options.room)

            def spread(x=x, ids=ids, weights=weights, own=own, layer=layer, capacity=None):
                return moe_ffn(x, own, ids, weights, **layer, group=group, capacity=capacity)

            def alone(x=x, ids=ids, weights=weights, experts=experts, layer=layer):
                return moe_ffn(x, experts, ids, weights, **layer)

            sized = functools.partial(spread, capacity=capacity)
            wanted = alone()
            same = torch.tensor([int(torch.equal(call(), wanted)) for call in (spread, sized)], device="cuda")
            dist.all_reduce(same, dist.ReduceOp.MIN, group=group)
            graph = gpu_bench.captured(sized, [()], 1)
            calls = {"counted": spread, "sized": sized, "graph": graph.replay, "one": alone}
            times = {called: microseconds(call, group) for called, call in calls.items()}
            del graph
            if rank == 0:
                told = ", ".join(f"{called} {time:8.1f} us" for called, time in times.items())
                print(
                    f"{name:13} {ranks} ranks of {tokens:4} tokens, capacity {capacity:5}: {told}, "
                    f"same bits {same.bool().tolist()}",
                    flush=True,
                )
        del experts, own
    dist.destroy_process_group()


def main() -> None:
    parser = driver.parser(__doc__)
    parser.add_argument("--models", default="gpt-oss-120b")
    parser.add_argument("--tokens", default="1,16,64,512,4096")
    parser.add_argument("--routing", default="uniform", choices=("uniform", "zipf"))
    parser.add_argument(
        "--room", type=float, default=0.0, help="of slots, times the average; 0: enough for all"
    )
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--port", type=int, default=29511)
    options = parser.parse_args()
    driver.begin()
    processes.spawn(as_rank, (options.ranks, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
