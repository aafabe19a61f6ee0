"""Partitions of unequal requests' keys, of one length, which CTAs take from a queue: in the simulator, for sm_90a."""

import contextlib
from dataclasses import replace

import pytest
import torch
from helpers import judged_calls
from helpers.attention_cases import Case, check
from helpers.page_layouts import paged
from helpers.partition_cases import in_partitions, random_partitions
from helpers.simulate import choosing, run_unchecked
from helpers.tree_cases import CASES, inputs_of
from helpers.varlen_cases import Packed

from warpspec import sim
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import SIMULATED
from warpspec.fmha import attention, attention_varlen, launch
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import SORTED_REQUESTS

# Requests without keys and without queries, of fewer keys than queries, of one KV tile and of many.
DECODE = Packed(
    "decode", seq_q=(1,) * 7, seq_k=(900, 3, 0, 250, 1400, 64, 65), heads_q=8, head_dim=128, page_size=16, sink=True,
    poisoned=(3,),
)  # fmt: skip
DRAFTS = Packed("drafts", seq_q=(3, 0, 1, 4, 5), seq_k=(700, 20, 0, 1100, 2), causal=True)
EQUAL = Packed(
    "equal", seq_q=(2, 2, 0, 2), seq_k=(484, 500, 0, 490), heads_q=2, head_dim=64, page_size=16, causal=True
)
MORE = [
    replace(DECODE, id="window", window=(300, 0), page_size=128),
    replace(DRAFTS, id="state", normalize=False),
    replace(DRAFTS, id="256", head_dim=256, heads_kv=1),
    replace(DRAFTS, id="96", head_dim=96, page_size=32),
    replace(DRAFTS, id="shared", shared_kv=True),
    replace(DRAFTS, id="stride", key_stride=4),
    replace(DRAFTS, id="one", seq_q=(2,), seq_k=(3000,)),
    replace(DECODE, id="all empty", seq_k=(0,) * 7, poisoned=()),
]


@pytest.fixture
def cut(simulate_as):
    """A function that makes plans cut requests into partitions, the longest into ``splits``, by so many SMs."""
    with contextlib.ExitStack() as contexts:

        def choose(splits: int, sm_count: int, **changes):
            simulate_as("sm_90a", sm_count=sm_count, **changes)
            contexts.enter_context(choosing(Way.PARTITIONS, in_partitions, splits=splits))

        yield choose


def run(batch: Packed):
    result = attention_varlen(
        **batch.arguments(), out=batch.poisoned_out(), return_lse=batch.normalize, backend="sim"
    )
    batch.check(result)
    launches = sim.last_report().launches
    assert len(launches) == 2 and all(found.local_bytes == 0 for found in launches)
    return tuple(result)


@pytest.mark.parametrize(
    ("batch", "splits", "sms"),
    [
        (DECODE, 5, 1),
        *(pytest.param(batch, 4, 2, marks=pytest.mark.long) for batch in (DRAFTS, *MORE)),
    ],
    ids=lambda x: getattr(x, "id", x),
)
def test_cases(cut, batch, splits, sms):
    cut(splits, sms)
    run(batch)


def test_equal_requests_are_not_cut(cut):
    """Requests with equally many KV tiles are a partition each where these fill a round of CTAs, so that Q is loaded
    once; with fewer keys in one of them, all are cut, and Q is loaded for each partition."""
    loaded = []
    for last in (484, 400):
        cut(6, 3)
        run(replace(EQUAL, seq_k=(490, 500, 0, last)))
        loaded.append(sim.last_report().launches[0].tma_bytes_loaded)
    assert loaded[0] < loaded[1]


@pytest.mark.long
def test_more_queries_than_the_host_was_told(cut, check_order):
    """max_seqlen_q is a hint: requests with further query tiles get them, whole."""
    cut(4, 2)
    batch = replace(DRAFTS, id="told", seq_q=(20, 0, 1, 200, 130), heads_q=8)
    arguments = batch.arguments() | {"max_seqlen_q": 1}
    result = attention_varlen(**arguments, out=batch.poisoned_out(), return_lse=True, backend="sim")
    assert len(sim.last_report().launches) == 2
    batch.check(result)


@pytest.mark.long
def test_bits_depend_on_the_batch_alone(cut):
    """Not on the number of CTAs, nor on the order in which they run."""
    results = []
    for sms, seed in ((1, 0), (2, 1), (40, 2)):
        cut(4, sms, seed=seed)
        o, lse = run(DRAFTS)
        queries = sum(DRAFTS.seq_q)  # nobody writes what is behind them
        results.append((o[:queries].nan_to_num(), lse[:, :queries]))
    for later in results[1:]:
        assert all(map(torch.equal, results[0], later))


@pytest.mark.long
def test_memory_order(cut, check_order):
    cut(4, 2)
    run(DRAFTS)


@pytest.mark.long
@pytest.mark.parametrize("case", [CASES[0], replace(CASES[1], drafts=8)], ids=lambda case: case.id)
def test_trees(cut, case):
    cut(4, 2)
    inputs = inputs_of(case)
    judged_calls.check(case, judged_calls.run(case, inputs, backend="sim"), inputs)
    assert len(sim.last_report().launches) == 2


@pytest.mark.long
@pytest.mark.parametrize("dim", [64, 256])
def test_batch_rows(cut, dim):
    """Rows of a batch in pages, whose lengths the device knows; one has no keys."""
    cut(3, 2)
    lengths, generator = (0, 700, 1, 133), torch.Generator().manual_seed(dim)
    q = torch.randn(4, 2, 8, dim, generator=generator).bfloat16()
    k, v = torch.randn(2, 4, 700, 2, dim, generator=generator).bfloat16()
    pages, table = paged([k, v], lengths, 32)
    inputs = {"kv_lengths": torch.tensor(lengths, dtype=torch.int32), "causal": True, "sink": None}
    out = torch.full_like(q, torch.nan)
    result = attention(q, *pages, **inputs, page_table=table, out=out, return_lse=True, backend="sim")
    assert len(sim.last_report().launches) == 2
    check(Case("lengths"), result, {"q": q, "k": k, "v": v, **inputs}, against_torch=False)


def test_too_many_requests_are_refused():
    """Plans offer no partitions of more requests than the device counts; one that somebody forces is not launched."""

    def problem(requests: int) -> AttentionProblem:
        q, k = (torch.empty(requests, n, 8, 64, dtype=torch.bfloat16, device="meta") for n in (1, 4000))
        lengths = torch.empty(requests, dtype=torch.int32, device="meta")
        return AttentionProblem.of(q, k, k, kv_lengths=lengths, memory=False)

    most, target = SORTED_REQUESTS, SIMULATED["sm_90a"]
    with choosing(Way.PARTITIONS, in_partitions, splits=4):
        forced = launch.plan(problem(most), target)
        assert forced.config.queues_partitions
        assert not launch.plan(problem(most + 1), target).config.queues_partitions
    with pytest.raises(UnsupportedProblem, match=f"at most {most} requests, got {most + 1}"):
        launch.prepare(problem(most + 1), target, forced)


@pytest.mark.long
def test_lengths_that_nobody_checked_touch_nothing_else(cut):
    """Descending, negative and too large entries: memory outside the tensors is not touched; the simulator says so."""
    cut(4, 2)
    arguments = DRAFTS.arguments()
    q, k, v = (arguments[name].nan_to_num(0.0, 0.0, 0.0) for name in ("q", "k", "v"))
    o, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan)
    cu_seqlens = torch.tensor([5, 2**31 - 1, -7, 0, 1000, 3], dtype=torch.int32)
    arguments |= dict(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, return_lse=True)
    run_unchecked(arguments, o=o, arch="sm_90a", lse=lse)
    assert o.nan_to_num(0.0).abs().max() <= v.abs().max()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(300, 324))
def test_random_batches(cut, seed):
    batch, splits = random_partitions(seed)
    cut(splits, 1 + seed % 5, seed=seed)
    run(batch)
