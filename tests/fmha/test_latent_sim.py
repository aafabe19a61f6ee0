"""MLA's absorbed form, rows of 576 whose first 512 numbers are V: kernels of both architectures in the simulator."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from cutlass import cute
from helpers.attention_cases import Case, arguments, check, poisoned_out, relative_error
from helpers.float8_cases import FACTORS
from helpers.page_layouts import paged
from helpers.peaks import check_as_exact_as_torch, every_peak
from helpers.simulate import choosing, cutting_by_length
from helpers.suites import long

from warpspec import sim
from warpspec.common import compile, kernel_cache
from warpspec.fmha import attention
from warpspec.fmha import launch as attention_launch
from warpspec.fmha.device import cut_ahead
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.sm90 import add_up
from warpspec.latent import mla_decode
from warpspec.latent.gathered import launch
from warpspec.latent.gathered.raw.config import SHORTFALL

ARCHS = ("sm_90a", "sm_100a")
BEYOND_FP16 = 2.0**17
MLA = dict(head_dim=576, v_dim=512, heads_kv=1, shared_kv=True)
# Requests of 0 to 5 KV tiles, one after another in a CTA, whose last tile is full, has one key, or all but one.
LENGTHS = Case("lengths", batch=6, seq_k=260, heads_q=64, kv_lengths=(64, 260, 0, 1, 129, 63), sink=True,
               data="creeping", **MLA)  # fmt: skip
# A rank of tensor parallelism has few heads: those of several queries fill a tile. Rows that see one key, or none.
DRAFTS = Case(
    "drafts",
    batch=3,
    seq_q=5,
    seq_k=300,
    heads_q=16,
    causal=True,
    kv_lengths=(300, 130, 3),
    scale=0.07,
    **MLA,
)
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


# A kernel takes 10 to 20 s to compile. The default suite has those of test_work_is_cut_by_length, test_codes (sm_90a)
# and test_decode (sm_100a).
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
        (FEW, 3),
        (SHARED, 8),
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
def test_pieces_of_values_of_any_size(simulate_as):
    """Pieces leave means in fp16, which values of bf16 do not fit; where a request is cut, rows differ in size."""
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
        with cutting_by_length():
            o = mla_decode(*inputs, **call, backend="sim")
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


@pytest.fixture
def compiled_anew(monkeypatch, request):
    """Kernels are compiled as the test changes them, and forgotten behind it."""
    monkeypatch.setattr(kernel_cache, "SOURCES", f"{kernel_cache.SOURCES} {request.node.name}")
    monkeypatch.setattr(compile, "_compiled", {})
    attention_launch.prepare.cache_clear()
    yield
    attention_launch.prepare.cache_clear()


@pytest.mark.long
def test_pieces_that_nobody_waits_for(simulate_as, check_order, monkeypatch, compiled_anew):
    """CTAs that never wait for later ones, the last of which then adds up all pieces: as where CTAs outnumber SMs."""
    monkeypatch.setattr(add_up, "PATIENCE", 0)
    simulate_as("sm_90a", sm_count=16)
    with cutting_by_length():
        through_pages(ONE)


def misread_lengths(monkeypatch) -> list:
    """Let kernels that find their cuts ahead read lengths that the launch before goes on to change: all of them, or
    only one. Chunks by the lengths read first would leave keys out, and state pieces that no CTA has. Returns what each
    reading has found once a kernel is compiled."""
    copy, reads = cut_ahead.copy_lengths, []

    def copy_at_first(lengths, chunks):
        """The function, and other lengths in the place of those read first, which the loop's are compared with."""
        changed = copy(lengths, chunks)
        if not reads:
            lane = cute.arch.lane_idx()
            chunks.lengths[lane] = 100 * lane
            cute.arch.sync_warp()
        reads.append(changed)
        return changed

    monkeypatch.setattr(cut_ahead, "copy_lengths", copy_at_first)
    return reads


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


def codes_of(pages: torch.Tensor) -> torch.Tensor:
    """e4m3 [pages, 64, 576] in memory with room between pages, NaN where ``pages`` has it."""
    room = torch.full((len(pages), 64 * 576 + 48), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = room[:, : 64 * 576].unflatten(1, (64, 576))
    codes.copy_(pages.to(torch.float8_e4m3fn))
    return codes


def in_codes(call: tuple, options: dict) -> tuple[tuple, dict]:
    """A call with its queries in e4m3, under a scale."""
    q, *rest = call
    codes = (q.float() / q.float().abs().amax() * 448).to(torch.float8_e4m3fn)
    return (codes, *rest), options | {
        "q_scale": torch.tensor([0.125]), "scale": options["scale"] * float(q.float().abs().amax()) / 56
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "q_codes", "queries", "heads", "splits"),
    [
        ("sm_90a", False, 2, 8, None),
        ("sm_90a", True, 2, 32, None),
        long("sm_90a", True, 2, 8, None),
        long("sm_90a", True, 3, 10, 1),
        long("sm_90a", True, 1, 5, 3),
        long("sm_90a", True, 3, 24, 1),
        long("sm_90a", True, 1, 128, None),
        long("sm_90a", True, 1, 64, 3),
        long("sm_90a", False, 3, 10, 1),
        long("sm_90a", False, 1, 32, None),
        long("sm_90a", False, 1, 5, 3),
        long("sm_90a", False, 3, 24, 1),
        long("sm_90a", False, 1, 128, None),
        long("sm_90a", False, 1, 128, 3),
        long("sm_100a", False, 2, 8, 1),
        long("sm_100a", False, 1, 16, 3),
        ("sm_100a", True, 3, 10, 1),
        long("sm_100a", True, 2, 8, None),
        long("sm_100a", True, 1, 128, 3),
    ],
)
@pytest.mark.usefixtures("check_order")
def test_codes(arch, q_codes, queries, heads, splits, simulate_as, monkeypatch):
    """e4m3 rows, causal: lengths off every boundary, requests that see one row or none, NaN behind lengths and in a row
    that only the last query sees; heads whose queries are numbers of fp16, and others beyond its range. splits: None:
    CTAs share out the KV tiles of all requests."""
    simulate_as(arch, sm_count=2)
    monkeypatch.setattr(launch, "takes_line", lambda *_: splits is None and arch == "sm_90a")
    monkeypatch.setattr(launch, "make_plan", launch.make_plan.__wrapped__)  # remembers nothing
    case = replace(DRAFTS, batch=4, seq_q=queries, heads_q=heads, seq_k=520, kv_lengths=(520, 1, 0, 65))
    inputs = arguments(case)
    (pages,), table = paged((inputs["k"],), case.kv_lengths, 64)
    factor = 1.0 if q_codes else BEYOND_FP16
    inputs["q"][:, :, ::2] *= factor
    call = (inputs["q"], codes_of(pages[:, :, 0]), table, inputs["kv_lengths"])
    if queries > 1:
        call[1].view(torch.uint8)[table[3, 1], 0, 300] = 0x7F  # of row 64
    options = dict(scale=0.3 / factor, kv_scale=torch.tensor(0.37))
    if q_codes:
        call, options = in_codes(call, options)
    out = poisoned_out(case)
    o, lse = mla_decode(*call, **options, return_lse=True, num_splits=splits, out=out, backend="sim")
    assert o is out
    wanted = mla_decode(*call, **options, normalize=False, backend="reference")
    if queries > 1:
        for result in (o, wanted.o):
            assert result[3, -1].isnan().all()
            result[3, -1] = 0
        wanted.row_sum[3, :, -1] = 0
        wanted.row_max[3, :, -1] = lse[3, :, -1] = -torch.inf
    expected = torch.where(
        wanted.row_sum.transpose(1, 2)[..., None] == 0,
        0,
        wanted.o / wanted.row_sum.transpose(1, 2)[..., None],
    )
    assert relative_error(o.float(), expected) <= 4e-3
    seen = wanted.lse != -torch.inf
    assert (lse - wanted.lse)[seen].abs().max() <= 1e-3 and (lse[~seen] == -torch.inf).all()
    assert not o[2].any()
    for one in sim.last_report().launches:  # rings are filled again: no fence is missing
        assert one.local_bytes == 0 and not one.warnings


@pytest.mark.long
@pytest.mark.parametrize("q_codes", [False, True])
@pytest.mark.parametrize(
    ("heads", "queries", "lengths", "sms", "states"),
    [
        (64, 1, (1500, 7), 6, False),
        (128, 1, (900, 0, 64, 1), 12, False),
        (32, 3, (1100, 5, 130, 0, 64, 400), 8, False),  # the second query tile has 32 rows
        (16, 4, (1500, 3, 64, 65, 700), 5, False),
        (64, 1, (1500, 7), 6, True),
        (64, 1, (3300,), 16, False),  # 13 pieces
    ],
)
@pytest.mark.usefixtures("check_order")
def test_many_pieces_of_codes(heads, queries, lengths, sms, states, q_codes, simulate_as, monkeypatch):
    """Tasks of 64 rows, cut by length: CTAs share out the columns of tasks with many pieces, and add up few alone."""
    simulate_as("sm_90a", sm_count=sms)
    monkeypatch.setattr(launch, "takes_line", lambda *_: True)
    monkeypatch.setattr(launch, "make_plan", launch.make_plan.__wrapped__)
    case = replace(
        DRAFTS, batch=len(lengths), seq_q=queries, heads_q=heads, seq_k=max(lengths), kv_lengths=lengths
    )
    inputs = arguments(case)
    (pages,), table = paged((inputs["k"],), lengths, 64)
    call = (inputs["q"], codes_of(pages[:, :, 0]), table, inputs["kv_lengths"])
    options = dict(scale=0.3, kv_scale=torch.tensor(0.37), normalize=not states, return_lse=not states)
    if q_codes:
        call, options = in_codes(call, options)
    found = mla_decode(*call, **options, backend="sim")
    (launched,) = sim.last_report().launches
    assert launched.local_bytes == 0 and not launched.warnings
    wanted = mla_decode(*call, **options, backend="reference")
    (o, lse), (wanted_o, wanted_lse) = (((one.o, one.lse) if states else one) for one in (found, wanted))
    seen = wanted_lse != -torch.inf
    assert relative_error(o.float(), wanted_o.float()) <= 4e-3
    assert (lse - wanted_lse)[seen].abs().max() <= 1e-3 and (lse[~seen] == -torch.inf).all()


@pytest.mark.long
@pytest.mark.usefixtures("check_order", "compiled_anew")
@pytest.mark.parametrize(("heads", "q_codes"), [(64, False), (16, False), (64, True)])
def test_lengths_of_codes_that_change_meanwhile(heads, q_codes, simulate_as, monkeypatch):
    reads = misread_lengths(monkeypatch)
    test_many_pieces_of_codes(heads, 1, (400, 5, 0, 130), 5, False, q_codes, simulate_as, monkeypatch)
    assert len(reads) == 2


@pytest.mark.long
@pytest.mark.parametrize(("splits", "q_codes"), [*itertools.product((None, 1, 2), (False, True))])
def test_states_of_codes(splits, q_codes, simulate_as, monkeypatch):
    """Keys as rows of the products: row_max is the rows' maximum although references lag behind it elsewhere."""
    simulate_as("sm_90a", sm_count=3)
    monkeypatch.setattr(launch, "takes_line", lambda *_: splits is None)
    monkeypatch.setattr(launch, "make_plan", launch.make_plan.__wrapped__)
    case = replace(DRAFTS, batch=3, seq_q=1, heads_q=12, seq_k=330, kv_lengths=(330, 0, 65))
    inputs = arguments(case)
    (pages,), table = paged((inputs["k"],), case.kv_lengths, 64)
    call, options = (inputs["q"] * 4, codes_of(pages[:, :, 0]), table, inputs["kv_lengths"]), {"scale": 0.2}
    if q_codes:
        call, options = in_codes(call, options)
    found, wanted = (
        mla_decode(*call, **options, normalize=False, num_splits=splits, backend=backend)
        for backend in ("sim", "reference")
    )
    some = wanted.row_sum > 0
    assert (found.row_max - wanted.row_max)[some].abs().max() < 1e-3
    assert (found.row_sum / wanted.row_sum - 1)[some].abs().max() < 1e-3
    assert not found.row_sum[~some].any() and (found.row_max[~some] == -torch.inf).all()
    assert relative_error(found.o, wanted.o) <= 4e-3


@pytest.mark.parametrize(
    ("heads", "kv_scale", "splits", "q_codes"),
    [
        (5, 1e-15, 3, False),
        (5, 1e33, 17, False),
        long(64, 1e33, 3, False),
        long(64, 1.0, 17, False),
        long(64, 1e30, 17, True),
        long(5, 1e-15, 3, True),
    ],
)
@pytest.mark.usefixtures("check_order")
def test_splits_of_codes_under_any_scale(heads, kv_scale, splits, q_codes, simulate_as):
    """Splits leave means in fp16: these have to fit whatever the scale, also where all codes are the largest. Of few
    and of many splits, which are combined by other numbers of columns a thread."""
    simulate_as("sm_90a", sm_count=3)
    keys = 64 * 2 * splits - 50
    case = replace(DRAFTS, batch=3, seq_q=1, heads_q=heads, seq_k=keys, kv_lengths=(keys, 0, 65))
    inputs = arguments(case)
    (pages,), table = paged((inputs["k"],), case.kv_lengths, 64)
    pages[table[2, :2]] = 448.0
    call = (inputs["q"], codes_of(pages[:, :, 0]), table, inputs["kv_lengths"])
    options = dict(scale=0.2 / kv_scale, kv_scale=torch.tensor(kv_scale), num_splits=splits)
    if q_codes:
        call, options = in_codes(call, options)
    found, wanted = (mla_decode(*call, **options, backend=backend) for backend in ("sim", "reference"))
    assert relative_error(found.double() / kv_scale, wanted.double() / kv_scale) <= 4e-3
    assert ((found[2].double() / kv_scale / 448 - 1).abs() < 2**-8).all() and not found[1].any()


@pytest.mark.parametrize(
    ("arch", "heads", "q_codes"),
    [
        ("sm_90a", 5, False),
        long("sm_90a", 64, False),
        *(long(arch, heads, True) for arch in ARCHS for heads in (5, 64)),
    ],
)
def test_scales_of_codes_that_make_up_for_each_other(arch, heads, q_codes, simulate_as):
    """A factor of the queries, the scale of logits and kv_scale are bounded by their product alone; where it is too
    small for a number, all weights are equal, and hidden keys stay hidden."""
    simulate_as(arch)
    case = replace(DRAFTS, batch=2, seq_q=1, heads_q=heads, seq_k=100, kv_lengths=(100, 33))
    inputs = arguments(case)
    (pages,), table = paged((inputs["k"],), case.kv_lengths, 64)
    call = (codes_of(pages[:, :, 0]), table, inputs["kv_lengths"])
    cases = [each for each in FACTORS if each[1] >= 0]
    if q_codes:  # the product of both scales of codes is beyond fp32
        cases += [(2.0**70, 2.0**-125, 2.0**60), (2.0**-70, 2.0**99, 2.0**-60)]
    for factor, scale, kv_scale in cases:
        options = dict(scale=scale, kv_scale=torch.tensor(kv_scale), return_lse=True)
        q = inputs["q"] * factor
        if q_codes:
            q, options["q_scale"] = inputs["q"].to(torch.float8_e4m3fn), torch.tensor([factor])
        (o, lse), (wanted, wanted_lse) = (
            mla_decode(q, *call, **options, backend=backend) for backend in ("sim", "reference")
        )
        rtol = 2 * SHORTFALL if q_codes else 1e-6  # the simulator's sums of codes are exact
        torch.testing.assert_close(lse, wanted_lse, rtol=rtol, atol=1e-3)
        if kv_scale:
            assert relative_error(o.double() / kv_scale, wanted.double() / kv_scale) <= 4e-3
        else:
            assert not o.any()
