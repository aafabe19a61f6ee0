"""MLA's absorbed form, rows of 576 whose first 512 numbers are V: kernels of both architectures in the simulator."""

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import Case, arguments, check, poisoned_out, relative_error
from helpers.latent_calls import DRAFTS, MLA, misread_lengths
from helpers.page_layouts import paged
from helpers.peaks import check_as_exact_as_torch, every_peak
from helpers.simulate import choosing, cutting_by_length
from helpers.suites import long

from warpspec import sim
from warpspec.fmha import attention
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.sm90 import add_up
from warpspec.latent import mla_decode

ARCHS = ("sm_90a", "sm_100a")
# Requests of 0 to 5 KV tiles, one after another in a CTA, whose last tile is full, has one key, or all but one.
LENGTHS = Case("lengths", batch=6, seq_k=260, heads_q=64, kv_lengths=(64, 260, 0, 1, 129, 63), sink=True,
               data="creeping", **MLA)  # fmt: skip
STATE = Case(
    "state",
    batch=2,
    seq_q=2,
    seq_k=200,
    heads_q=128,
    normalize=False,
    causal=True,
    kv_lengths=(200, 65),
    **MLA,
)
POISONED = Case("poisoned", batch=2, seq_q=4, seq_k=150, heads_q=8, causal=True, data="poisoned-tail",
                kv_lengths=(150, 150), **MLA)  # fmt: skip


def through_pages(case: Case, page_size: int = 64, return_lse: bool = True, **options) -> sim.SimReport:
    """Run a case through pages, with NaN behind all lengths and in unused pages, and judge it. Without lse, references
    of few queries lag behind light maxima."""
    inputs = arguments(case)
    (pages,), table = paged((inputs["k"],), case.kv_lengths, page_size)
    options = dict(
        k=pages, page_table=table, return_lse=case.normalize and return_lse, out=poisoned_out(case), **options
    )
    result = attention(**{**inputs, **options}, backend="sim")
    if not return_lse:
        result = result, attention(**{**inputs, "sink": None, "normalize": False}, backend="reference").lse
    check(case, result, inputs, against_torch=case.seq_q == 1)
    assert all(launch.local_bytes == 0 for launch in sim.last_report().launches)
    return sim.last_report()


# A kernel takes 10 to 20 s to compile. The default suite has those of test_work_is_cut_by_length (sm_90a) and
# test_decode (sm_100a).
@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", (LENGTHS, DRAFTS, STATE, POISONED), ids=lambda case: case.id)
def test_cases(case, arch, simulate_as, check_order):
    """P lies where columns of the keys lay: no role may take the one for the other."""
    simulate_as(arch, sm_count=2)
    launch = through_pages(case, num_splits=1).launches[0]
    if case is LENGTHS:  # Q once, every key once, and nothing for the request without keys
        tiles = sum(-(-length // 64) for length in case.kv_lengths)
        assert launch.tma_bytes_loaded == (5 * 64 + tiles * 64) * 2 * 576
        assert launch.mma_flops == 2 * 64 * 64 * tiles * (576 + 512)


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("page_size", [16, 128])
def test_split_keys_of_any_pages(arch, page_size, simulate_as):
    simulate_as(arch)
    through_pages(LENGTHS, page_size, num_splits=3)


UNEQUAL = replace(LENGTHS, id="unequal", seq_k=900, kv_lengths=(64, 900, 0, 1, 129, 63))
FEW = replace(UNEQUAL, id="few", batch=4, heads_q=16, seq_k=420, kv_lengths=(64, 420, 0, 1), sink=False)
# By 8 CTAs: seven add up shares of one request's columns, of which one warp of each consumer has all rows.
SHARED = replace(FEW, id="shared", batch=1, seq_k=1500, kv_lengths=(1500,))
# By 16 CTAs, which take two tiles of heads: six pieces, whose columns CTAs share out.
ONE = replace(STATE, id="one", normalize=True, batch=1, heads_q=64, seq_k=1500, kv_lengths=(1500,))
# By 12 CTAs, one of which leaves a state of a piece of either request.
TWO = replace(ONE, id="two", batch=2, seq_k=2000, kv_lengths=(2000, 1328))
# By 8 CTAs: equal requests are cut into halves.
EVEN = replace(ONE, id="even", batch=2, seq_k=640, kv_lengths=(640, 640))
EMPTY = replace(FEW, id="empty", kv_lengths=(0, 0, 0, 0))


@pytest.mark.parametrize(
    ("case", "sms"),
    [
        (SHARED, 8),
        long(FEW, 3),
        long(UNEQUAL, 5),
        *(long(case, 5) for case in (DRAFTS, STATE, POISONED, EMPTY)),
        long(ONE, 16),
        long(TWO, 12),
        long(EVEN, 8),
    ],
    ids=lambda v: getattr(v, "id", v),
)
def test_work_is_cut_by_length(case, sms, simulate_as, check_order):
    """Unequal requests in equal chunks, on sm_90a; CTAs of both tiles of 64 heads in step."""
    simulate_as("sm_90a", sm_count=sms)
    with cutting_by_length():
        assert len(through_pages(case, return_lse=case is not FEW).launches) == 1


@pytest.mark.long
@pytest.mark.parametrize("normalize", [True, False])
def test_query_tiles_in_step(normalize, simulate_as, check_order):
    """Three drafts of 64 heads, a query tile each, by 12 CTAs in four chunks: the tiles of a request are cut alike,
    although the last ones see a key of a KV tile more. Rows of the shortest request see nothing."""
    case = replace(DRAFTS, seq_q=3, seq_k=642, heads_q=64, kv_lengths=(642, 2, 130), normalize=normalize)
    simulate_as("sm_90a", sm_count=12)
    taken = []

    def wanted(candidate):
        taken.append(candidate)
        return candidate.way is Way.LINE and candidate.tiling.queries == 1

    with choosing(Way.LINE, wanted):
        assert len(through_pages(case).launches) == 1
    assert any(map(wanted, taken))


@pytest.mark.long
@pytest.mark.parametrize("heads", [8, 16])  # with more than 8, references lag
def test_a_piece_that_a_row_does_not_see(simulate_as, heads):
    """The last of two pieces has one key, which is NaN and only the last draft sees. What a row that does not see it
    adds is 0."""
    generator = torch.Generator().manual_seed(0)
    q, kv = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((1, 4, heads, 576), (6, 64, 576))
    )
    kv[5, 0, 5] = torch.nan
    call = dict(page_table=torch.arange(6)[None].int(), kv_lengths=torch.tensor([321]).int(), scale=0.05)
    wanted = mla_decode(q, kv, **call, backend="reference")
    simulate_as("sm_90a", sm_count=3)
    with cutting_by_length():
        o = mla_decode(q, kv, **call, backend="sim")
    assert torch.equal(o.isnan(), wanted.isnan()) and not wanted[:, :3].isnan().any()
    assert (o - wanted)[:, :3].float().norm() < 4e-3 * wanted[:, :3].float().norm()


@pytest.mark.long
@pytest.mark.parametrize("splits", [None, 3, 17])
def test_pieces_of_values_of_any_size(simulate_as, splits):
    """Pieces and splits leave means in fp16, which values of bf16 do not fit; where a request is cut, rows differ in
    size. splits: None: by length; more than keys have KV tiles, so that the last ones are empty."""
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(*shape, generator=generator) for shape in ((1, 1, 64, 576), (10, 64, 576)))
    kv[3:] *= 2.0**-20  # keys that hardly differ
    call = dict(
        page_table=torch.arange(10)[None].int(), kv_lengths=torch.tensor([640], dtype=torch.int32), scale=0.05
    )
    simulate_as("sm_90a", sm_count=3)
    for size in (2.0**100, 2.0**-80):
        inputs = ((q / size).bfloat16(), (kv * size).bfloat16())
        wanted = mla_decode(*inputs, **call, backend="reference")
        with cutting_by_length() if splits is None else nullcontext():
            o = mla_decode(*inputs, **call, num_splits=splits, backend="sim")
        assert relative_error(o.double() / size, wanted.double() / size) < 4e-3


def check_peaks(steps, **options) -> None:
    check_as_exact_as_torch(steps, 576, shared_kv=True, v_dim=512, **options)


@pytest.mark.long
@every_peak
def test_as_exact_as_torch(simulate_as, steps):
    """With few queries references follow the maximum at every step."""
    simulate_as("sm_90a", sm_count=2)
    check_peaks(steps, return_lse=True)


@pytest.mark.long
@every_peak
def test_as_exact_as_torch_by_length(simulate_as, steps):
    """Without lse, references lag behind light maxima. The sum is of weights as they are rounded: what alike ones, each
    of them light, are rounded by would be in all of o."""
    simulate_as("sm_90a", sm_count=1)
    with cutting_by_length():
        check_peaks(steps, num_splits=None, kv_lengths=torch.tensor([192], dtype=torch.int32))


@pytest.mark.long
def test_light_maxima_leave_o_as_it_is(simulate_as):
    """A key of up to 1/18 of the weights before it moves no reference: no instruction more is executed."""
    simulate_as("sm_90a", sm_count=1)
    counts = []
    with cutting_by_length():
        for share in (0.0, 0.2, 1.0):
            steps, lengths = [(128, 64, 0.0), (0, 1, share)], torch.tensor([192], dtype=torch.int32)
            check_peaks(steps, num_splits=None, kv_lengths=lengths)
            counts.append(sim.last_report().launches[0].warp_instructions)
    assert counts[0] == counts[1] < counts[2]


@pytest.mark.long
def test_pieces_that_nobody_waits_for(simulate_as, check_order, monkeypatch, compiled_anew):
    """CTAs that never wait for later ones, the last of which then adds up all pieces: as where CTAs outnumber SMs."""
    monkeypatch.setattr(add_up, "PATIENCE", 0)
    simulate_as("sm_90a", sm_count=16)
    with cutting_by_length():
        through_pages(ONE)


@pytest.mark.long
def test_lengths_that_change_meanwhile(simulate_as, check_order, monkeypatch, compiled_anew):
    reads = misread_lengths(monkeypatch)
    simulate_as("sm_90a", sm_count=5)
    with cutting_by_length():
        through_pages(UNEQUAL)
    assert len(reads) == 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_cuts_anywhere(seed, simulate_as):
    """Chunks that begin and end anywhere in requests of random lengths, by the kernel of DRAFTS, whatever the order of
    the CTAs; tiles that many CTAs share."""
    draw = random.Random(seed)
    lengths = [draw.choice((0, draw.randint(1, 64), draw.randint(1, 600))) for _ in range(draw.randint(1, 9))]
    lengths[draw.randrange(len(lengths))] = draw.randint(600, 1500)
    simulate_as("sm_90a", sm_count=draw.randint(2, 9), seed=seed)
    case = replace(DRAFTS, batch=len(lengths), seq_k=max(lengths), kv_lengths=tuple(lengths))
    with cutting_by_length():
        through_pages(case, return_lse=seed % 2 == 0)


@pytest.mark.parametrize("arch", [long("sm_90a"), "sm_100a"])
def test_decode(arch, simulate_as):
    """The public function: two drafts of a rank's 8 heads, as two requests of a graph's batch are replayed: one has no
    token."""
    simulate_as(arch)
    case = replace(DRAFTS, batch=2, seq_q=2, heads_q=8, kv_lengths=(140, 0))
    inputs = arguments(case)
    (pages,), table = paged((inputs["k"],), case.kv_lengths, 64)
    call = (inputs["q"], pages[:, :, 0], table, inputs["kv_lengths"])
    out = poisoned_out(case)
    o, lse = mla_decode(*call, scale=case.scale, return_lse=True, out=out, backend="sim")
    assert o is out
    check(case, (o, lse), inputs, against_torch=False)
    state = mla_decode(*call, scale=case.scale, normalize=False, backend="reference")
    assert (state.lse - lse)[0].abs().max() < 1e-3 and (state.lse[1] == -torch.inf).all()
