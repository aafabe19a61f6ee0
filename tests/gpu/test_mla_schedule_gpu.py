"""Schedules of MLA's decode on a GPU: in CUDA graphs, with lengths that change between replays."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from helpers.simulate import cutting_by_length

from warpspec.engines.step import schedule_of
from warpspec.latent import mla_decode, mla_schedule
from warpspec.latent.gathered import launch

pytestmark = pytest.mark.gpu

PAGE, ROW, PAGES, BATCH = 64, 576, 60, 24
SCALE, TOLERANCE = 0.04, 4e-3
# (heads, queries, e4m3 rows)
CALLS = [(128, 1, False), (16, 2, False), (16, 1, True), (8, 4, True), (128, 1, True)]


def call_of(heads: int, queries: int, codes: bool) -> tuple:
    """(q, pages, table, lengths) of BATCH requests of up to PAGES pages, which share pages."""
    generator = torch.Generator("cuda").manual_seed(heads + queries)
    numbers = {"device": "cuda", "generator": generator}
    q = torch.randn(BATCH, queries, heads, ROW, **numbers).bfloat16()
    kv = torch.randn(PAGES, PAGE, ROW, **numbers).to(torch.float8_e4m3fn if codes else torch.bfloat16)
    table = torch.stack([torch.randperm(PAGES, **numbers) for _ in range(BATCH)]).int()
    return q, kv, table, drawn_lengths(0)


def drawn_lengths(seed: int) -> torch.Tensor:
    """Unequal lengths, 0 and the most among them; seed 1: none has keys, 2: one has."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(BATCH, generator=generator) ** 3 * PAGE * PAGES).int()
    lengths[:2] = torch.tensor([PAGE * PAGES, 0])
    if seed in (1, 2):
        lengths[2 - seed :] = 0
    return lengths.cuda()


@pytest.fixture
def cut_by_length(monkeypatch):
    """Calls are cut by length whatever the model of plans expects."""
    monkeypatch.setattr(launch, "takes_line", lambda *_: True)
    launch.make_plan.cache_clear()
    yield lambda codes: contextlib.nullcontext() if codes else cutting_by_length()
    launch.make_plan.cache_clear()


def captured(call) -> torch.cuda.CUDAGraph:
    """A graph of what call() launches, which has been compiled."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize(("heads", "queries", "codes"), CALLS)
def test_a_step_in_a_graph(heads, queries, codes, cut_by_length):
    """Two layers, whose schedule the first one makes: each replay computes it for the lengths that it finds, although
    the step ran before the capture, too. Bits are those of calls without a schedule."""
    q, kv, table, lengths = call_of(heads, queries, codes)
    layers = [(q, kv, table, lengths), (q * 2, kv.flip(0), table, lengths)]
    results = [torch.empty(*q.shape[:3], 512, dtype=q.dtype, device="cuda") for _ in layers]

    batch = SimpleNamespace()

    def step():
        for layer, out in zip(layers, results, strict=True):
            mla_decode(*layer, scale=SCALE, out=out, schedule=schedule_of(batch, *layer))
        assert batch.schedule[-1].cuts is not None

    with cut_by_length(codes):
        graph = captured(step)
        for seed in range(6):
            lengths.copy_(drawn_lengths(seed))
            for out in results:
                out.fill_(torch.nan)
            graph.replay()
            for layer, out in zip(layers, results, strict=True):
                assert torch.equal(out, mla_decode(*layer, scale=SCALE))


@pytest.mark.parametrize(("heads", "queries", "codes"), CALLS)
def test_lengths_without_an_update(heads, queries, codes, cut_by_length):
    """A graph of calls alone, whose schedule is updated before a replay or not: results are right, and no CTA waits for
    a piece that does not come."""
    call = call_of(heads, queries, codes)
    lengths, out = call[3], torch.empty(BATCH, queries, heads, 512, dtype=torch.bfloat16, device="cuda")
    sizes = dict(heads=heads, queries=queries, max_pages=PAGES, dtype=call[1].dtype)
    with cut_by_length(codes):
        schedule = mla_schedule(lengths, **sizes)
        graph = captured(lambda: mla_decode(*call, scale=SCALE, out=out, schedule=schedule))
        for seed in range(40):
            lengths.copy_(drawn_lengths(seed))
            updates = seed % 5 == 4
            if updates:
                schedule.update(lengths)
            out.fill_(torch.nan)
            graph.replay()
            wanted = mla_decode(*call, scale=SCALE)
            if updates:
                assert torch.equal(out, wanted)
            assert (out.float() - wanted.float()).norm() <= TOLERANCE * wanted.float().norm()
