"""Experts spread over the ranks of a gloo group of processes: the results, and with kernels the bits, of one."""

import functools
import itertools
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from helpers.moe_cases import make_experts, randn

from warpspec.common.launch import SIMULATED
from warpspec.moe import moe_ffn, parallel

HIDDEN, WIDTH, CHOICES, EACH = 64, 24, 3, 2
TOKENS = (5, 0, 2)  # of the ranks
MOST = max(TOKENS) * CHOICES  # that one rank can have for another


def case(experts, rank):
    generator = torch.Generator().manual_seed(rank)
    tokens = TOKENS[rank]
    ids = torch.randint(-1, experts + 1, (tokens, CHOICES), generator=generator, dtype=torch.int32)
    return randn(tokens, HIDDEN, seed=rank).bfloat16(), ids, torch.rand(tokens, CHOICES, generator=generator)


def layer_of(layout, ranks):
    return make_experts(EACH * ranks + 1, HIDDEN, WIDTH, biases=True, shared=1)[0].for_backend(layout)


def as_rank(rank, ranks, layout, backend, store, results):
    """One process: its tokens, its experts."""
    try:
        results.put((rank, results_of(rank, ranks, layout, backend, store)))
    except Exception as error:
        results.put((rank, error))


def results_of(rank, ranks, layout, backend, store) -> list:
    """Rows as many as there are, with room for all, with room for one; what a check says of the last."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    layer = layer_of(layout, ranks)
    x, ids, weights = case(layer.experts, rank)
    options = dict(group=dist.group.WORLD, backend=backend)
    call = functools.partial(moe_ffn, x, layer.shard(rank, ranks), topk_weights=weights, **options)
    outs = [call(topk_ids=ids, capacity=capacity) for capacity in (None, MOST, 1)]
    said = ""
    try:
        call(topk_ids=torch.where(ids < layer.experts, ids, -1), capacity=1, check=True)
    except ValueError as error:
        said = str(error)
    dist.destroy_process_group()
    return [*(out.view(torch.int16).tolist() for out in outs), said]


def in_processes(tmp_path, ranks, layout, backend) -> list[list]:
    """``results_of`` of the ranks, as tensors."""
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

    def tensor(rows):
        return torch.tensor(rows, dtype=torch.int16).view(torch.bfloat16).view(-1, HIDDEN)

    return [[*map(tensor, found[rank][:-1]), found[rank][-1]] for rank in range(ranks)]


def without_room(ids, ranks) -> torch.Tensor:
    """[T, k]: choices of a rank that an earlier one has named."""
    taken, beyond = set(), torch.zeros(ids.shape, dtype=torch.bool)
    for place in itertools.product(*map(range, ids.shape)):
        owner = int(ids[place]) // EACH
        beyond[place] = owner in taken
        if 0 <= owner < ranks:
            taken.add(owner)
    return beyond


@pytest.mark.parametrize(
    ("ranks", "layout", "backend"),
    [
        (3, "sm90", "reference"),
        pytest.param(1, "sm100", "reference", marks=pytest.mark.long),
        pytest.param(2, "sm90", "reference", marks=pytest.mark.long),
        *(pytest.param(n, "sm90", "sim", marks=pytest.mark.long) for n in (1, 2, 3)),  # compiled kernels
        pytest.param(2, "sm100", "sim", marks=pytest.mark.long),
    ],
)
def test_as_on_one(tmp_path, ranks, layout, backend):
    """With kernels the same bits. Room for one choice a rank: tokens that need more are NaN, others are as ever."""
    layer = layer_of(layout, ranks)
    cases = [case(layer.experts, rank) for rank in range(ranks)]
    # Before the processes: what a first call imports is theirs, too.
    alone = [moe_ffn(x, layer, ids, weights, backend=backend) for x, ids, weights in cases]
    found = in_processes(tmp_path, ranks, layout, backend)
    close = dict(rtol=0, atol=0) if backend == "sim" else dict(rtol=2e-2, atol=2e-2)
    for (_, ids, _), expected, (counted, sized, small, said) in zip(cases, alone, found, strict=True):
        torch.testing.assert_close(counted, expected, **close)
        assert torch.equal(sized, counted)
        beyond = without_room(ids, ranks)
        expected[beyond.any(1)] = torch.nan
        torch.testing.assert_close(small, expected, **close, equal_nan=True)
        left = int(beyond.sum())
        assert said.endswith(f"got 1, which leaves no slot for {left}") if left else not said


@pytest.mark.parametrize(
    ("arch", "capacity"), [("sm_90a", 3), pytest.param("sm_100a", None, marks=pytest.mark.long)]
)
@pytest.mark.usefixtures("check_order")
def test_packed_by_a_kernel(arch, capacity):
    """A kernel, in the simulator, packs as the definition does."""
    ranks, target = 3, SIMULATED[arch]
    x, ids, _ = case(EACH * ranks, 0)
    found = parallel.sort_by_owner(ids, EACH, ranks, None)
    sorted_by_kernel = parallel.sort_by_owner(ids, EACH, ranks, target)
    for name in ("source", "position", "offsets"):
        assert torch.equal(getattr(sorted_by_kernel, name), getattr(found, name)), name
    sent, place = parallel.pack_rows(x, ids, found, EACH, capacity, target)
    wanted, wanted_place = parallel.pack_rows(x, ids, found, EACH, capacity, None)
    experts = parallel.experts_of(wanted)
    assert torch.equal(parallel.experts_of(sent), experts) and torch.equal(place, wanted_place)
    assert torch.equal(sent[experts >= 0, :HIDDEN], wanted[experts >= 0, :HIDDEN]) and (experts >= 0).any()


def test_arguments():
    layer = layer_of("sm90", 2)
    x, ids, weights = case(4, 0)
    with pytest.raises(TypeError, match=r"^group: must be a torch.distributed.ProcessGroup"):
        moe_ffn(x, layer, ids, weights, group=2, backend="reference")
    for capacity, error, says in (
        (True, TypeError, "must be an int, got True"),
        (0, ValueError, "must be at least 1, got 0"),
        (4, ValueError, "needs a group, got 4 without one"),
    ):
        with pytest.raises(error, match=rf"^capacity: {says}"):
            moe_ffn(x, layer, ids, weights, capacity=capacity, backend="reference")
    with pytest.raises(ValueError, match=r"^ranks: must divide the 4 experts, got 3"):
        layer.shard(0, 3)
    with pytest.raises(ValueError, match=r"^rank: must be within 0..1, got 2"):
        layer.shard(2, 2)
