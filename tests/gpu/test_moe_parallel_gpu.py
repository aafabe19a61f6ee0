"""Experts spread over GPUs by NCCL: the bits of one, with buffers of fixed size also in a CUDA graph."""

import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist
from helpers.moe_cases import make_experts, randn

from warpspec.moe import moe_ffn, route

pytestmark = pytest.mark.gpu

MOST_RANKS, HIDDEN, WIDTH, CHOICES = 2, 464, 200, 3
TOKENS = ((5, 0), (70, 9), (900, 1200))  # of the ranks
OPTIONS = dict(activation="swiglu_oai", limit=2.0)


def layer_on(device):
    layer, _ = make_experts(4 * MOST_RANKS + 1, HIDDEN, WIDTH, biases=True, shared=1)
    return layer.to(device).for_backend()


def case(tokens, experts, seed, device):
    x = randn(tokens, HIDDEN, seed=seed).bfloat16().to(device)
    ids, weights = route(2 * randn(tokens, experts, seed=seed + 1).to(device), CHOICES)
    ids[::5, 1] = -1
    return x, ids, weights


def as_rank(rank, ranks, port, results):
    """One process and GPU: whether its results are those of all experts on it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)
        layer, found = layer_on(device), []
        for seed, tokens in enumerate(TOKENS):
            arguments = case(tokens[rank], layer.experts, 10 * seed + rank, device)
            alone = moe_ffn(arguments[0], layer, *arguments[1:], **OPTIONS)
            own = layer.shard(rank, ranks)

            def call(arguments=arguments, own=own, **capacity):
                x, *routing = arguments
                return moe_ffn(x, own, *routing, **OPTIONS, group=dist.group.WORLD, **capacity)

            enough = dict(capacity=max(tokens) * CHOICES)
            found += [torch.equal(call(**capacity), alone) for capacity in ({}, enough)]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = call(**enough)
            out.fill_(torch.nan)
            graph.replay()
            found.append(torch.equal(out, alone))
        dist.destroy_process_group()
        results.put(found)
    except Exception as error:
        results.put(repr(error))


@pytest.mark.parametrize("ranks", [1, MOST_RANKS])
def test_the_bits_of_one(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (ranks, 29517 + ranks, results)
    processes = [context.Process(target=as_rank, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = [results.get(timeout=200) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert found == [[True] * 3 * len(TOKENS)] * ranks
