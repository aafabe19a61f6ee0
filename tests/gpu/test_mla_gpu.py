"""MLA's decode and V3.2's rows on a GPU, against the reference: random heads, drafts, lengths and pages.

WARPSPEC_STRESS_SECONDS sets how long graphs are replayed on several streams (2).
"""

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from helpers.float8_cases import FACTORS
from helpers.gathered_cases import judge, judge_lse, random_case
from helpers.row_scales import random_scales
from helpers.simulate import cutting_by_length

from warpspec.latent import mla_decode
from warpspec.latent.cache import LatentPool
from warpspec.latent.gathered import gathered_attention, launch

pytestmark = pytest.mark.gpu

PAGE, ROW, VALUES = 64, 576, 512
BEYOND_FP16 = 2.0**17
O_TOLERANCE, LSE_TOLERANCE = 4e-3, 1e-3
# Of o and lse on true keys: a code times a scale that is no power of two is rounded to bf16.
V32_TOLERANCE = 6e-3


def paged_call(heads: int, queries: int, most: int, seed: int, codes: bool):
    """Requests of 0 to ``most`` rows in pages of random order; NaN in every row that nobody sees."""
    generator = torch.Generator().manual_seed(seed)
    batch = 7
    lengths = torch.randint(0, most + 1, (batch,), generator=generator, dtype=torch.int32)
    lengths[:4] = torch.tensor([0, 1, most, min(most, PAGE)])
    pages = -(-most // PAGE)
    table = torch.randperm(batch * pages, generator=generator).int().view(batch, pages)
    rows = torch.randn(batch * pages, PAGE, ROW, generator=generator)
    for request, length in enumerate(lengths.tolist()):
        hidden = torch.arange(pages * PAGE).view(pages, PAGE) >= length
        rows[table[request].long()] = rows[table[request].long()].masked_fill(hidden[..., None], torch.nan)
    kv = rows.to(torch.float8_e4m3fn if codes else torch.bfloat16)
    q = torch.randn(batch, queries, heads, ROW, generator=generator).bfloat16()
    return [t.cuda() for t in (q, kv, table, lengths)]


@pytest.mark.parametrize(
    ("heads", "queries", "most", "splits", "codes"),
    [
        (128, 1, 1000, None, False),
        (8, 3, 700, 3, False),
        (64, 2, 700, 3, False),
        (1, 1, 129, None, False),
        (128, 2, 500, None, True),
        (64, 1, 1500, 4, True),
        (16, 1, 4000, None, True),
        (8, 4, 300, 1, True),
        (1, 1, 65, None, True),
    ],
)
def test_mla(heads, queries, most, splits, codes):
    call = paged_call(heads, queries, most, heads + most, codes)
    options = dict(scale=0.04, return_lse=True)
    if codes:
        options |= {"scale": 0.04 / BEYOND_FP16, "kv_scale": torch.tensor(0.37, device="cuda")}
        call[0][:, :, ::2] *= BEYOND_FP16  # q, which the kernel rounds to fp16
    out = torch.full((len(call[0]), queries, heads, VALUES), torch.nan, device="cuda", dtype=torch.bfloat16)
    o, lse = mla_decode(*call, **options, num_splits=splits, out=out)
    wanted, wanted_lse = mla_decode(*call, **options, backend="reference")
    assert (o.float() - wanted.float()).norm() / wanted.float().norm() < O_TOLERANCE
    seen = wanted_lse != -torch.inf
    assert (lse - wanted_lse)[seen].abs().max() < LSE_TOLERANCE
    assert (lse[~seen] == -torch.inf).all() and not o[0].any()


def in_codes(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries in e4m3 with their scale."""
    scale = q.float().abs().amax() / 448
    return (q.float() / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("heads", [8, 64])
def test_scales_of_codes_that_make_up_for_each_other(heads):
    """As in the simulator, at the ends of fp32's range, where the hardware may round subnormal numbers to 0."""
    q, kv, table, lengths = paged_call(heads, 1, 300, 5, True)
    for factor, scale, kv_scale in (each for each in FACTORS if each[1] >= 0):
        options = {"scale": scale, "kv_scale": torch.tensor(kv_scale, device="cuda"), "return_lse": True}
        (o, lse), (wanted, wanted_lse) = (
            mla_decode(q * factor, kv, table, lengths, **options, backend=backend)
            for backend in ("auto", "reference")
        )
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=LSE_TOLERANCE)
        o, wanted = (t.double() / (kv_scale or 1.0) for t in (o, wanted))
        assert (o - wanted).norm() <= O_TOLERANCE * wanted.norm()


@pytest.mark.parametrize("deviation", [1.0, 2.0])  # of logits, which are then up to 5 and 10
@pytest.mark.parametrize(
    ("heads", "queries", "most", "splits"),
    [
        (128, 1, 3000, None),
        (64, 1, 4000, 1),
        (64, 1, 1500, 4),
        (16, 4, 5000, None),
        (24, 3, 2000, None),
        (16, 1, 4000, None),
        (8, 4, 300, 1),
        (1, 1, 65, None),
        (100, 2, 700, 2),
    ],
)
def test_queries_in_codes(heads, queries, most, splits, deviation):
    """Products of codes, of which the tensor core keeps 14 bits: against attention of the numbers that they are."""
    q, kv, table, lengths = paged_call(heads, queries, most, heads + most, True)
    codes, q_scale = in_codes(q)
    call = (codes, kv, table, lengths)
    options = {"scale": deviation / ROW**0.5, "q_scale": q_scale, "return_lse": True}
    out = torch.full((len(q), queries, heads, VALUES), torch.nan, device="cuda", dtype=torch.bfloat16)
    o, lse = mla_decode(*call, **options, num_splits=splits, out=out)
    wanted, wanted_lse = mla_decode(*call, **options, backend="reference")
    assert (o.float() - wanted.float()).norm() / wanted.float().norm() < O_TOLERANCE
    seen = wanted_lse != -torch.inf
    off = (lse - wanted_lse)[seen].abs().max()
    print(f"lse is off by {off:.1e} at logits up to {wanted_lse.max():.0f}")
    assert off < LSE_TOLERANCE
    assert (lse[~seen] == -torch.inf).all() and not o[0].any()


@pytest.mark.parametrize("heads", [8, 64])
def test_queries_in_codes_at_large_logits(heads):
    """All logits near 20: sums of the tensor core are too small by up to 1.3e-3, which their factor makes up for."""
    generator = torch.Generator().manual_seed(heads)
    sign = torch.where(torch.randn(ROW, generator=generator) > 0, 1.0, -1.0)
    q, kv = (
        (torch.randn(shape, generator=generator) + sign).to(torch.float8_e4m3fn).cuda()
        for shape in ((1, 1, heads, ROW), (5, PAGE, ROW))
    )
    table, lengths = (torch.tensor(numbers, device="cuda").int() for numbers in ([[4, 0, 3, 1, 2]], [300]))
    options = {"scale": 20 / ROW, "q_scale": torch.ones(1, device="cuda"), "return_lse": True}
    (_, lse), (_, wanted) = (
        mla_decode(q, kv, table, lengths, **options, backend=backend) for backend in ("auto", "reference")
    )
    assert (lse - wanted).abs().max() < LSE_TOLERANCE


@pytest.mark.parametrize(
    ("heads", "queries", "most"), [(128, 1, 3000), (16, 4, 5000), (24, 3, 2000), (1, 1, 20000), (64, 1, 9000)]
)
def test_queries_in_codes_cut_by_length(heads, queries, most, monkeypatch):
    """In a graph, replayed with other lengths: the same bits twice; and states."""
    monkeypatch.setattr(launch, "takes_line", lambda problem, *_: problem.num_splits is None)
    monkeypatch.setattr(launch, "make_plan", launch.make_plan.__wrapped__)  # remembers nothing
    q, kv, table, lengths = paged_call(heads, queries, most, heads + queries, True)
    codes, q_scale = in_codes(q)
    options = {"scale": 0.04, "q_scale": q_scale}
    found, wanted = (
        mla_decode(codes, kv, table, lengths, **options, normalize=False, backend=backend)
        for backend in ("auto", "reference")
    )
    some = wanted.row_sum > 0
    assert (found.row_max - wanted.row_max)[some].abs().max() < LSE_TOLERANCE
    o, wanted_o = (one.o / one.row_sum.transpose(1, 2)[..., None].clamp(min=1e-30) for one in (found, wanted))
    assert (o - wanted_o).norm() / wanted_o.norm() < O_TOLERANCE
    kv.copy_(torch.randn(kv.shape, device="cuda"))
    out = torch.full((len(q), queries, heads, VALUES), torch.nan, device="cuda", dtype=torch.bfloat16)
    call = functools.partial(mla_decode, codes, kv, table, lengths, **options, return_lse=True)
    check_replays(call, lengths, out, most)


@pytest.mark.parametrize("codes", [False, True])
def test_junk_lengths_and_pages(codes):
    """Lengths are cut to what there is, and a page number out of range is that of a page of zeros."""
    q, kv, table, lengths = paged_call(8, 3, 200, 1, codes)
    lengths[:3] = torch.tensor([-(2**31), 2**31 - 1, -1])
    kv.copy_(torch.randn(kv.shape, device="cuda"))
    o = mla_decode(q, kv, table, lengths, scale=0.04)
    within = lengths.clamp(0, table.shape[1] * PAGE)
    wanted = mla_decode(q, kv, table, within, scale=0.04, backend="reference")
    assert (o.float() - wanted.float()).norm() / wanted.float().norm() < O_TOLERANCE
    assert not o[0].any() and not o[2].any()
    strange = table.clone()
    strange[:, 1:] = torch.tensor([-(2**31), 2**31 - 1, len(kv)], device="cuda")[: table.shape[1] - 1]
    o, lse = mla_decode(q, kv, strange, within, scale=0.04, return_lse=True)
    assert o.isfinite().all() and not lse.isnan().any()


@pytest.mark.parametrize(
    ("tokens", "heads", "slots", "splits"),
    [
        (5, 8, (200, 70), 1),
        (3, 128, (64, 65, 1), 1),
        (5, 128, (900,), 4),
        (150, 100, (700,), None),
        (9, 16, (600,), 3),
        (40, 64, (130, 512), 1),
        (1, 1, (3000,), None),
    ],
)
def test_v32_rows(tokens, heads, slots, splits, monkeypatch):
    """Against true keys, and as closely as any other rows against keys rounded to bf16, which the kernel multiplies."""
    case = random_case(tokens, heads, slots, format="v3.2-fp8", rotate=False, num_splits=splits)
    random_scales(case)
    case = case.to("cuda")
    got, lse = gathered_attention(case.q, case.key_sets, **case.options)
    read = LatentPool.read
    for tolerance in (V32_TOLERANCE, O_TOLERANCE):
        wanted, wanted_lse = gathered_attention(case.q, case.key_sets, backend="reference", **case.options)
        judge_lse(lse, wanted_lse, V32_TOLERANCE)
        assert judge(got, wanted) < tolerance
        monkeypatch.setattr(LatentPool, "read", lambda pool, slots: read(pool, slots).bfloat16().float())


@pytest.mark.parametrize("return_lse", [True, False])  # without, references lag behind light maxima
@pytest.mark.parametrize(
    ("heads", "queries", "most"), [(128, 1, 3000), (128, 4, 1500), (16, 2, 9000), (32, 4, 2000), (8, 1, 700)]
)
def test_work_is_cut_by_length(heads, queries, most, return_lse):
    """Unequal requests in equal chunks, in a graph that is replayed with other lengths; the same bits twice."""
    q, kv, table, lengths = paged_call(heads, queries, most, heads, False)
    kv.copy_(torch.randn(kv.shape, device="cuda"))
    out = torch.full((len(q), queries, heads, VALUES), torch.nan, device="cuda", dtype=torch.bfloat16)
    call = functools.partial(mla_decode, q, kv, table, lengths, scale=0.04, return_lse=return_lse)
    with cutting_by_length():
        check_replays(call, lengths, out, most)


def check_replays(call, lengths, out, most):
    """Capture a call and replay it with other lengths, twice each; o, and lse if it is a result, as the reference has
    them."""
    call(out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(out=out)
    lse = found[1] if isinstance(found, tuple) else None
    for turn in range(4):
        lengths.copy_(
            (torch.tensor([0, 1, most, 64, 65, 63, most]), torch.zeros(7), torch.full((7,), most))[turn]
            if turn < 3
            else torch.randint(0, most + 1, lengths.shape)
        )
        results = []
        for _ in range(2):
            out.fill_(torch.nan)
            graph.replay()
            results.append([out.clone()] + ([] if lse is None else [lse.clone()]))
        assert all(map(torch.equal, *results))
        wanted = call(backend="reference")
        wanted, wanted_lse = wanted if lse is not None else (wanted, None)
        assert (out.float() - wanted.float()).norm() <= O_TOLERANCE * wanted.float().norm()
        assert not out[lengths == 0].any()
        if lse is not None:
            seen = wanted_lse != -torch.inf
            assert seen.any() == (lengths > 0).any()
            assert not seen.any() or (lse - wanted_lse)[seen].abs().max() < LSE_TOLERANCE
            assert (lse[~seen] == -torch.inf).all()


@pytest.mark.parametrize(
    ("heads", "queries", "most", "factor"),
    [(128, 1, 3000, 0.04), (16, 2, 5000, 0.04), (24, 3, 2000, 0.0), (8, 9, 700, 0.04), (1, 1, 20000, 0.04)],
)
def test_codes_shared_out_by_length(heads, queries, most, factor, monkeypatch):
    """Unequal requests of e4m3 rows whose KV tiles CTAs share out, several queries to a tile; replayed with other
    lengths, the same bits twice; states as without sharing out; NaN behind lengths."""
    monkeypatch.setattr(launch, "takes_line", lambda problem, *_: problem.num_splits is None)
    monkeypatch.setattr(launch, "make_plan", launch.make_plan.__wrapped__)  # remembers nothing
    call = paged_call(heads, queries, most, heads + queries, True)
    state = mla_decode(*call, scale=factor, normalize=False)
    whole = mla_decode(*call, scale=factor, normalize=False, num_splits=1)
    wanted = mla_decode(*call, scale=factor, normalize=False, backend="reference")
    assert torch.allclose(state.row_max, whole.row_max, rtol=1e-5, atol=1e-5)
    o, wanted_o = (one.o / one.row_sum.transpose(1, 2)[..., None].clamp(min=1e-30) for one in (state, wanted))
    assert (o - wanted_o).norm() / wanted_o.norm() < O_TOLERANCE
    q, kv, table, lengths = call
    kv.copy_(torch.randn(kv.shape, device="cuda"))
    out = torch.full((len(q), queries, heads, VALUES), torch.nan, device="cuda", dtype=torch.bfloat16)
    check_replays(
        functools.partial(mla_decode, q, kv, table, lengths, scale=factor, return_lse=True),
        lengths,
        out,
        most,
    )


@pytest.mark.parametrize("q_codes", [False, True])
@pytest.mark.parametrize("heads", [8, 48])
def test_nan_of_later_drafts(heads, q_codes):
    """A NaN in the rows of later drafts, which share a tile with earlier ones, reaches those that see it alone."""
    q, kv, table, lengths = paged_call(heads, 4, 500, heads, True)
    kv.copy_(torch.randn(kv.shape, device="cuda"))
    at = int(lengths[2]) - 1  # the last row, which the last query sees
    kv.view(torch.uint8)[table[2, at // PAGE], at % PAGE, 300] = 0x7F
    at -= 1
    kv.view(torch.uint8)[table[2, at // PAGE], at % PAGE, 570] = 0xFF
    q[2, 1, 3] = torch.nan
    options = {"scale": 0.04}
    if q_codes:
        q, options["q_scale"] = q.to(torch.float8_e4m3fn), torch.ones(1, device="cuda")
    wanted = mla_decode(q, kv, table, lengths, **options, backend="reference").float()
    for splits in (None, 1, 3):
        o = mla_decode(q, kv, table, lengths, **options, num_splits=splits).float()
        assert torch.equal(o.isnan(), wanted.isnan()) and o[2, 2:].isnan().all() and not o[2, 0].isnan().any()
        assert (o - wanted).nan_to_num().norm() / wanted.nan_to_num().norm() < O_TOLERANCE


STRESS_SECONDS = float(os.environ.get("WARPSPEC_STRESS_SECONDS", "2"))
# Streams of a call, launches of a graph, replays of each graph before a check.
STREAMS, LAUNCHES, REPLAYS = (2, 3, 8)


@dataclass
class Stressed:
    """A call whose CTAs add up pieces. run: takes out. lengths: its tensor of lengths. contents: what that may hold.
    shape, tolerance: of o. graphs: of LAUNCHES launches each, with their stream and o of each launch."""

    run: Callable
    lengths: torch.Tensor
    contents: list[torch.Tensor]
    shape: tuple[int, ...]
    tolerance: float
    graphs: list[tuple] = field(default_factory=list)

    def capture(self) -> None:
        stream = torch.cuda.Stream()
        out = torch.empty(LAUNCHES, *self.shape, device="cuda", dtype=torch.bfloat16)
        self.run(out=out[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for one in out:
                self.run(out=one)
        self.graphs.append((graph, stream, out))

    def results(self) -> list[torch.Tensor]:
        """o for each of the contents, by one graph alone, as close to the reference as any other."""
        found, (graph, _, out) = [], self.graphs[0]
        for content in self.contents:
            self.lengths.copy_(content)
            graph.replay()
            found.append(out[-1].clone())
            wanted = self.run(backend="reference").float()
            assert (found[-1].float() - wanted).norm() < self.tolerance * wanted.norm()
        return found


def stressed_calls() -> Iterator[Stressed]:
    """bf16 rows with many pieces of a request, whose columns CTAs share out; few and many rows over e4m3; V3.2."""
    for heads, queries, most, codes in ((64, 1, 14000, False), (16, 2, 5000, True), (128, 1, 3000, True)):
        q, kv, table, lengths = paged_call(heads, queries, most, heads, codes)
        kv.copy_(torch.randn(kv.shape, device="cuda"))
        run = functools.partial(mla_decode, q, kv, table, lengths, scale=0.04)
        contents = [lengths.clone(), lengths.roll(3), torch.full_like(lengths, most)]
        yield Stressed(run, lengths, contents, (len(q), queries, heads, VALUES), O_TOLERANCE)
    case = random_case(40, 128, (2000,), format="v3.2-fp8", rotate=False, sink=False, lse=False).to("cuda")
    run = functools.partial(gathered_attention, case.q, case.key_sets)
    lengths = case.key_sets[0].lengths
    contents = [lengths // part for part in (1, 2, 7)]
    yield Stressed(run, lengths, contents, (*case.q.shape[:2], VALUES), V32_TOLERANCE)


def test_graphs_on_several_streams(monkeypatch):
    """Graphs that several streams replay at the same time, with other lengths each time: the bits of one alone."""
    monkeypatch.setattr(launch, "takes_line", lambda problem, *_: problem.num_splits is None)
    monkeypatch.setattr(launch, "make_plan", launch.make_plan.__wrapped__)  # remembers nothing
    calls, replays = list(stressed_calls()), 0
    with cutting_by_length():
        for one in calls * STREAMS:
            one.capture()
    expected = [one.results() for one in calls]
    start = time.monotonic()
    for turn in itertools.cycle(range(len(calls[0].contents))):
        graphs = [
            (*graph, wanted[turn])
            for one, wanted in zip(calls, expected, strict=True)
            for graph in one.graphs
        ]
        for one in calls:
            one.lengths.copy_(one.contents[turn])
        for _, _, out, _ in graphs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for _ in range(REPLAYS):
            for graph, stream, _, _ in graphs:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for _, _, out, wanted in graphs:
            assert all(torch.equal(one, wanted) for one in out)
        replays += REPLAYS * len(graphs)
        if time.monotonic() - start > STRESS_SECONDS:
            break
    print(f"{replays} replays of {LAUNCHES} launches each")
