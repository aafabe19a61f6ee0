"""MLA decode over rows of e4m3 codes, with queries in 16 bits and in e4m3: kernels of both architectures in the
simulator."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import arguments, poisoned_out, relative_error
from helpers.float8_cases import FACTORS
from helpers.latent_calls import DRAFTS, codes_of, in_codes, misread_lengths
from helpers.page_layouts import paged
from helpers.suites import long

from warpspec import sim
from warpspec.latent import mla_decode
from warpspec.latent.gathered import launch
from warpspec.latent.gathered.raw.config import SHORTFALL

ARCHS = ("sm_90a", "sm_100a")
BEYOND_FP16 = 2.0**17


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
    rtol = 2 * SHORTFALL if q_codes else 0.0  # the simulator's sums of codes are exact
    torch.testing.assert_close(found.row_max[some], wanted.row_max[some], rtol=rtol, atol=1e-3)
    assert (found.row_sum / wanted.row_sum - 1)[some].abs().max() < 1e-3
    assert not found.row_sum[~some].any() and (found.row_max[~some] == -torch.inf).all()
    assert relative_error(found.o, wanted.o) <= 4e-3


@pytest.mark.parametrize(
    ("heads", "kv_scale", "splits", "q_codes"),
    [
        (5, 1e-15, 3, False),
        long(5, 1e33, 17, False),
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
