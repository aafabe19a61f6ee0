"""Packed batches on the kernels of both architectures, in the simulator, judged request by request."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.simulate import choosing, plan_for, run_unchecked
from helpers.suites import long, long_but
from helpers.varlen_cases import Packed, random_batch

from warpspec import sim
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import SIMULATED
from warpspec.fmha import attention_varlen, launch
from warpspec.fmha.combine import COMBINE, CombineConfig
from warpspec.fmha.config import MOST_REQUESTS
from warpspec.fmha.device import packed
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.problem import AttentionProblem

ARCHS = ("sm_90a", "sm_100a")
MIXED = Packed(
    "mixed", seq_q=(3, 0, 1, 70, 5), seq_k=(100, 20, 0, 170, 5), causal=True, sink=True, layout="interleaved"
)
PAGED = Packed(
    "paged-window",
    seq_q=(3, 0, 1, 70, 5),
    seq_k=(100, 20, 33, 170, 300),
    page_size=16,
    window=(30, 0),
    prefix=16,
)
DECODE = Packed(
    "decode-splits", seq_q=(1,) * 40, seq_k=tuple(37 * i % 200 for i in range(40)), heads_q=8, head_dim=128,
    page_size=32, num_splits=3, poisoned=(7,),
)  # fmt: skip
LATENT = Packed(
    "latent", seq_q=(20, 1, 0, 4), seq_k=(70, 300, 5, 64), heads_q=16, heads_kv=1, head_dim=512, shared_kv=True,
    causal=True, page_size=16, num_splits=2,
)  # fmt: skip
STATE = Packed("state", seq_q=(150, 2), seq_k=(150, 260), heads_q=2, heads_kv=1, causal=True, normalize=False)
CASES = [MIXED, PAGED, DECODE, LATENT, STATE]
# By default: the other kernels have the same hazards in other tests. At head dimension 512 a batch on sm_90a takes a
# minute.
BY_TURNS = [(MIXED, "sm_90a"), (DECODE, "sm_100a")]


def run(batch: Packed, **changes) -> sim.SimReport:
    """Run a batch into an output full of NaN, judge it, and return what the simulator reports."""
    arguments = batch.arguments() | changes
    result = attention_varlen(
        **arguments, out=batch.poisoned_out(), return_lse=batch.normalize, backend="sim"
    )
    batch.check(result)
    for found in sim.last_report().launches:
        assert found.local_bytes == 0
        assert not any("wgmma.fence" in warning for warning in found.warnings)
    return sim.last_report()


@pytest.mark.usefixtures("check_order")
@pytest.mark.parametrize(
    ("batch", "arch"), long_but(BY_TURNS, itertools.product(CASES, ARCHS)), ids=lambda x: getattr(x, "id", x)
)
def test_cases(simulate_as, arch, batch):
    simulate_as(arch)
    run(batch)


@pytest.mark.parametrize("arch", long_but(["sm_90a"], ARCHS))
def test_a_wrong_hint_and_few_ctas_change_no_result(simulate_as, arch):
    """Requests of several tiles although the hint says one query; persistent CTAs that do many tiles each."""
    simulate_as(arch, sm_count=2, seed=1)
    run(replace(MIXED, hint_q=1, hint_k=1))


WIDE = replace(MIXED, head_dim=128)  # so that a request has several tiles


@pytest.mark.parametrize(
    ("batch", "sms"),
    [(WIDE, 2), long(STATE, 3), long(replace(PAGED, head_dim=128, window=(700, 0)), 1), long(WIDE, 132)],
)
def test_tiles_from_a_queue(simulate_as, batch, sms):
    """Whichever CTA gets a tile, the bits are the same. The queue is left as it was found (``launch`` asserts it)."""
    results = []
    for seed in (0, 1):
        simulate_as("sm_90a", sm_count=sms, seed=seed)
        arguments = batch.arguments()
        with choosing(Way.QUEUE):
            planned = launch.plan(AttentionProblem.of(**arguments, memory=False), SIMULATED["sm_90a"])
            assert planned.config.scheduler.from_queue
            result = attention_varlen(
                **arguments, out=batch.poisoned_out(), return_lse=batch.normalize, backend="sim"
            )
        batch.check(result)
        queries = sum(batch.seq_q)  # nobody writes what is behind them
        results.append([t[:queries] if t is result[0] else t[:, :queries] for t in result])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


@pytest.mark.long
def test_few_tiles_have_a_consumer_each(simulate_as):
    simulate_as("sm_90a", small=True)
    run(replace(PAGED, head_dim=128))


@pytest.mark.parametrize("arch", long_but(["sm_90a"], ARCHS))  # test_line_sim has it on both
def test_lengths_that_nobody_checked_touch_nothing_else(arch):
    """Descending, negative and too large entries: memory outside the tensors is not touched (the simulator would say
    so), and whole tiles write nothing but the results of the keys there are. (Where keys are split, what the second
    launch reads of a row that is no request's is undefined.)"""
    batch = replace(MIXED, layout="plain")
    arguments = batch.arguments()
    inputs = {name: arguments[name] for name in ("q", "k", "v")}
    q, k, v = (t.nan_to_num(0.0, 0.0, 0.0) for t in inputs.values())
    o = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    cu_seqlens = torch.tensor([5, 2**31 - 1, -7, 0, 1000, 3], dtype=torch.int32)
    arguments |= dict(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, return_lse=True)
    arguments["sink"] = arguments["sink"].float()  # as kernels take it
    with choosing():
        run_unchecked(arguments, o=o, arch=arch, lse=lse)
    assert o[5].isfinite().all()  # the first request begins here
    assert o.nan_to_num(0.0).abs().max() <= v.abs().max()


@pytest.mark.parametrize("requests", [1, 2, 31, 33, 1100])
def test_every_query_has_a_tile(requests):
    """The arithmetic of both orders of tiles, as the kernel does it, for lengths around a tile's queries."""
    generator = torch.Generator().manual_seed(requests)
    for queries in (1, 8, 128):
        lengths = torch.randint(0, 2 * queries + 2, (requests,), generator=generator)
        begins = [0, *lengths.cumsum(0).tolist()]
        total = begins[-1] + 5
        seen, in_order = set(), []
        for tile in range(packed.query_tiles(queries, total, requests)):
            request, number = tile, 0
            if tile >= requests:
                further = tile - requests
                request = max(b for b in range(requests) if begins[b] // queries <= further)
                number = 1 + further - begins[request] // queries
            seen.add((request, number))
            request = max(b for b in range(requests) if b + begins[b] // queries <= tile)
            in_order.append((request, tile - request - begins[request] // queries))
        assert in_order == sorted(set(in_order))
        wanted = {(b, n) for b in range(requests) for n in range(-(-int(lengths[b]) // queries))}
        assert wanted <= seen and wanted <= set(in_order)


@pytest.mark.parametrize("arch", ARCHS)
def test_more_requests_than_are_searched_through_are_refused(arch):
    starts = torch.zeros(MOST_REQUESTS + 2, dtype=torch.int32)
    q, k = torch.zeros(4, 2, 64, dtype=torch.bfloat16), torch.zeros(4, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblem, match=f"cu_seqlens_q: at most {MOST_REQUESTS}"):
        plan_for(arch, q=q, k=k, v=k, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=1)


def test_the_combine_kernel_of_packed_queries_is_another():
    plain = CombineConfig.of(DECODE.head_dim, 2, has_lse=True)
    other = replace(plain, packed=True)
    assert COMBINE.compiled(plain, "sm_90a").artifacts.PTX != COMBINE.compiled(other, "sm_90a").artifacts.PTX


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", range(100, 130))
def test_random_batches(simulate_as, arch, seed):
    simulate_as(arch, seed=seed)
    run(random_batch(seed))
