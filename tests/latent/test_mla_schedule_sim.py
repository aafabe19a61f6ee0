"""Schedules of MLA's decode in the simulator: the cuts of a step, found once for all of its calls."""

import pytest
import torch
from helpers.simulate import choosing
from helpers.suites import long
from torch.utils._python_dispatch import TorchDispatchMode

from warpspec import sim
from warpspec.common.launch import simulating
from warpspec.fmha import DecodeSchedule, attention
from warpspec.fmha.plan.cost import Way
from warpspec.latent import mla_decode, mla_schedule
from warpspec.latent.gathered import launch

PAGES = 7  # columns of page tables
LENGTHS = (64, 420, 0, 1)
SCALE = 0.05


def call_of(heads: int, queries: int, dtype: torch.dtype, batch: int = 4, pages: int = PAGES) -> tuple:
    """(q, rows, table) of requests of so many pages, with NaN in a page that no table names."""
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(batch, queries, heads, 576, generator=generator).bfloat16()
    rows = torch.randn(batch * pages + 1, 64, 576, generator=generator)
    rows[-1] = torch.nan
    table = torch.randperm(batch * pages, generator=generator).int().view(batch, pages)
    return q, rows.to(dtype), table


class Watch(TorchDispatchMode):
    """Sees operators, through which calls therefore go."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def lengths_of(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


@pytest.fixture
def cut_by_length(monkeypatch, simulate_as):
    """Calls are cut by length on this many simulated SMs, whatever the model of plans expects."""
    monkeypatch.setattr(launch, "takes_line", lambda *_: True)
    monkeypatch.setattr(launch, "make_plan", launch.make_plan.__wrapped__)  # remembers nothing

    def start(sm_count: int):
        simulate_as("sm_90a", sm_count=sm_count)
        return choosing(Way.LINE, lambda candidate: candidate.way is Way.LINE)

    return start


def decode(call: tuple, lengths: torch.Tensor, **options) -> torch.Tensor:
    """o of a call that is cut by length; its one launch spills nothing. lse, too, which costs no kernel of its own:
    test_latent_codes_sim has the same one."""
    o, _ = mla_decode(*call, lengths, scale=SCALE, backend="sim", return_lse=True, **options)
    (launched,) = sim.last_report().launches
    assert launched.local_bytes == 0
    return o


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-9))


@pytest.mark.parametrize(
    ("heads", "queries", "dtype", "sms", "q_codes"),
    [
        (8, 2, torch.float8_e4m3fn, 3, False),
        long(16, 1, torch.bfloat16, 3, False),
        long(128, 1, torch.bfloat16, 12, False),  # CTAs share out the columns of a request's many pieces
        long(64, 3, torch.bfloat16, 12, False),  # three query tiles of a request are in step
        long(32, 1, torch.float8_e4m3fn, 3, False),
        long(128, 1, torch.float8_e4m3fn, 6, False),
        long(64, 2, torch.float8_e4m3fn, 6, True),
    ],
)
@pytest.mark.usefixtures("check_order")
def test_same_bits(heads, queries, dtype, sms, q_codes, cut_by_length):
    """With the cuts of its lengths a call has the bits that it has without a schedule, and so it has after an update.
    With the cuts of other lengths it is right: requests grow, shrink to nothing, lose the keys of all but one piece."""
    (q, *rest), options, made = call_of(heads, queries, dtype), {}, {}
    if q_codes:
        q, options["q_scale"], made["q_dtype"] = q.to(dtype), torch.tensor([0.7]), dtype
    call = (q, *rest)
    lengths, others = lengths_of(*LENGTHS), [lengths_of(448, 0, 300, 70), lengths_of(0, 3, 0, 0)]
    with cut_by_length(sms):
        schedule = mla_schedule(
            lengths, heads=heads, queries=queries, max_pages=PAGES, dtype=dtype, backend="sim", **made
        )
        whole = {
            one: mla_decode(*call, one, scale=SCALE, backend="reference", **options)
            for one in (lengths, *others)
        }
        o = decode(call, lengths, **options)
        assert torch.equal(decode(call, lengths, schedule=schedule, **options), o)
        with Watch():
            assert torch.equal(decode(call, lengths, schedule=schedule, **options), o)
        for one in others:
            assert difference(decode(call, one, schedule=schedule, **options), whole[one]) < 4e-3
        with sim.one_stream():  # launches may overlap
            schedule.update(others[0])
            o = decode(call, others[0], schedule=schedule, **options)
        assert torch.equal(o, decode(call, others[0], **options))
        assert difference(decode(call, lengths, schedule=schedule, **options), whole[lengths]) < 4e-3


@pytest.mark.long
@pytest.mark.parametrize("lengths", [(1500,), (0,), (0, 0, 0)])
@pytest.mark.usefixtures("check_order")
def test_few_requests(lengths, cut_by_length):
    """One request in many pieces; none with keys."""
    call, lengths = call_of(16, 1, torch.bfloat16, len(lengths), pages=24), lengths_of(*lengths)
    with cut_by_length(5):
        schedule = mla_schedule(lengths, heads=16, max_pages=24, backend="sim")
        o = decode(call, lengths, schedule=schedule)
        assert torch.equal(o, decode(call, lengths)) and (lengths.any() or not o.any())


def test_refusals(cut_by_length):
    """Nothing is launched or compiled for calls that a schedule was not made for."""
    call, lengths = call_of(8, 2, torch.float8_e4m3fn), lengths_of(*LENGTHS)
    of_schedule = dict(heads=8, queries=2, max_pages=PAGES, dtype=call[1].dtype, backend="sim")
    with cut_by_length(3):
        schedule = mla_schedule(lengths, **of_schedule)
        before = schedule.cuts.clone()
        for wrong, message in (
            (dict(heads=16), "schedule: was made for .*heads=16.* the call has .*heads=8"),
            (dict(queries=1), "queries=1"),
            (dict(max_pages=8), "extent=8"),
            (dict(dtype=torch.bfloat16), "bfloat16"),
        ):
            with pytest.raises(ValueError, match=message):
                decode(call, lengths, schedule=mla_schedule(lengths, **of_schedule | wrong))
        with pytest.raises(ValueError, match="num_splits: must be None with a schedule, got 2"):
            decode(call, lengths, schedule=schedule, num_splits=2)
        with pytest.raises(TypeError, match="schedule: must be"):
            decode(call, lengths, schedule=schedule.cuts)
        with pytest.raises(ValueError, match=r"kv_lengths: shape must be \[4\], got \[3\]"):
            schedule.update(lengths[:3])
        with simulating("sm_90a", sm_count=4), pytest.raises(ValueError, match=r"by 3 CTAs.*by 4 CTAs"):
            decode(call, lengths, schedule=schedule)
        assert torch.equal(schedule.cuts, before)
    q = torch.zeros(4, 2, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"schedule: was made for 4 requests.* the call is one that is not"):
        attention(q, q, q, schedule=schedule, backend="sim")


@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_calls_that_are_not_cut(backend, simulate_as):
    """Their schedule has nothing on the device, and still tells its calls from others. On sm_100a no call is cut for
    by another launch."""
    simulate_as("sm_100a")
    call, lengths = call_of(8, 2, torch.bfloat16), lengths_of(*LENGTHS)
    schedule = mla_schedule(lengths, heads=8, queries=2, max_pages=PAGES, backend=backend)
    assert isinstance(schedule, DecodeSchedule) and schedule.cuts is None
    schedule.update(lengths + 1)
    options = dict(scale=SCALE, schedule=schedule, backend=backend)
    with pytest.raises(ValueError, match="schedule: was made for"):
        mla_decode(call[0][:, :1], *call[1:], lengths, **options)
    if backend == "reference":
        compiled = torch.compile(
            lambda q: mla_decode(q, *call[1:], lengths, **options), fullgraph=True, backend="eager"
        )
        wanted = mla_decode(*call, lengths, scale=SCALE, backend=backend)
        assert torch.equal(mla_decode(*call, lengths, **options), wanted)
        assert torch.equal(compiled(call[0]), wanted)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (dict(heads=0), ValueError, "heads: must be"),
        (dict(heads=129), ValueError, "heads: must be"),
        (dict(max_pages=-1), ValueError, "max_pages: must be"),
        (dict(max_pages=2**29), ValueError, r"max_pages: must be within 0\.\.8388608"),
        (dict(queries=2**30), ValueError, "queries: must be"),
        (dict(dtype=torch.float32), ValueError, "dtype: must be one of"),
        (dict(q_dtype=torch.zeros(2)), TypeError, "q_dtype: must be a dtype"),
        (dict(q_dtype=torch.bfloat16), ValueError, "q_dtype: must be None, or"),
        (dict(backend="sm80", max_pages=0), ValueError, "backend"),
        (dict(kv_lengths=torch.zeros(2)), TypeError, "kv_lengths: dtype"),
    ],
)
def test_bad_input(wrong, error, message):
    named = dict(kv_lengths=lengths_of(3, 4), heads=8, max_pages=2) | wrong
    with pytest.raises(error, match=message):
        mla_schedule(named.pop("kv_lengths"), **named)
