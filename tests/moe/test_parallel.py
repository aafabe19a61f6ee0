"""Experts spread over the ranks of a gloo group of processes: the results, and with kernels the bits, of one."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from moe_cases import make_experts, randn

from warpspec.moe import moe_ffn

HIDDEN, WIDTH, CHOICES = 64, 24, 3
TOKENS = (5, 0, 2)  # of the ranks


def case(experts, rank):
    generator = torch.Generator().manual_seed(rank)
    tokens = TOKENS[rank]
    ids = torch.randint(-1, experts + 1, (tokens, CHOICES), generator=generator, dtype=torch.int32)
    return randn(tokens, HIDDEN, seed=rank).bfloat16(), ids, torch.rand(tokens, CHOICES, generator=generator)


def layer_of(layout, ranks):
    return make_experts(2 * ranks + 1, HIDDEN, WIDTH, biases=True, shared=1)[0].for_backend(layout)


def as_rank(rank, ranks, layout, backend, store, results):
    """One process: its tokens, its experts."""
    try:
        results.put((rank, result_of(rank, ranks, layout, backend, store)))
    except Exception as error:
        results.put((rank, error))


def result_of(rank, ranks, layout, backend, store) -> list:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    layer = layer_of(layout, ranks)
    x, ids, weights = case(layer.experts, rank)
    out = moe_ffn(x, layer.shard(rank, ranks), ids, weights, group=dist.group.WORLD, backend=backend)
    dist.destroy_process_group()
    return out.view(torch.int16).tolist()


def in_processes(tmp_path, ranks, layout, backend) -> dict[int, torch.Tensor]:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = (ranks, layout, backend, tmp_path / "store", results)
    processes = [context.Process(target=as_rank, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    assert all(isinstance(rows, list) for rows in found.values()), found
    return {
        rank: torch.tensor(rows, dtype=torch.int16).view(torch.bfloat16).view(-1, HIDDEN)
        for rank, rows in found.items()
    }


@pytest.mark.parametrize(("ranks", "layout"), [(1, "sm100"), (3, "sm90")])
def test_as_on_one(tmp_path, ranks, layout):
    got, layer = in_processes(tmp_path, ranks, layout, "reference"), layer_of(layout, ranks)
    for rank in range(ranks):
        x, ids, weights = case(layer.experts, rank)
        expected = moe_ffn(x, layer, ids, weights, backend="reference")
        torch.testing.assert_close(got[rank], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.long
def test_the_same_bits(tmp_path):
    """Of the compiled kernels, in the simulator."""
    got, layer = in_processes(tmp_path, 2, "sm90", "sim"), layer_of("sm90", 2)
    x, ids, weights = case(layer.experts, 0)
    assert torch.equal(got[0], moe_ffn(x, layer, ids, weights, backend="sim")) and got[0].any()
    assert got[1].shape == (0, HIDDEN)


def test_arguments():
    layer = layer_of("sm90", 2)
    x, ids, weights = case(4, 0)
    with pytest.raises(TypeError, match=r"^group: must be a torch.distributed.ProcessGroup"):
        moe_ffn(x, layer, ids, weights, group=2, backend="reference")
    with pytest.raises(ValueError, match=r"^ranks: must divide the 4 experts, got 3"):
        layer.shard(0, 3)
    with pytest.raises(ValueError, match=r"^rank: must be within 0..1, got 2"):
        layer.shard(2, 2)
