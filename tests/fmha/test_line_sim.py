"""Work cut by length, in the simulator: pieces of tiles, joined, are what whole tiles give."""

import contextlib
from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import Case, arguments, check, poisoned_out
from helpers.page_layouts import paged
from helpers.simulate import choosing, cutting_by_length, run_unchecked
from helpers.suites import long
from helpers.varlen_cases import Packed, random_batch

from warpspec import sim
from warpspec.common.launch import SIMULATED
from warpspec.fmha import attention, attention_varlen, launch
from warpspec.fmha.config import Schedule
from warpspec.fmha.line import round_count
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.problem import AttentionProblem

# One request among others that many CTAs share; rows without keys, requests without queries.
MIXED = Packed("mixed", seq_q=(3, 0, 1, 70, 5), seq_k=(900, 20, 0, 1100, 5), causal=True)
FEW = replace(MIXED, seq_k=(400, 20, 0, 300, 5))  # by the kernel of MIXED
DECODE = Packed(
    "decode", seq_q=(1,) * 9, seq_k=(900, 3, 0, 250, 1400, 64, 65, 1, 700), heads_q=8, head_dim=128, page_size=16,
    sink=True, poisoned=(3,),
)  # fmt: skip
STATE = Packed("state", seq_q=(150, 2), seq_k=(150, 900), heads_q=2, heads_kv=1, causal=True, normalize=False)
LONG = Packed("long", seq_q=(2,), seq_k=(3000,), heads_q=8, heads_kv=2, page_size=64, causal=True)
WINDOW = Packed("window", seq_q=(200, 40, 1), seq_k=(900, 40, 700), window=(300, 0), sink=True, page_size=128)
WIDE = Packed("wide", seq_q=(20, 1, 0, 4), seq_k=(300, 700, 5, 64), heads_kv=1, head_dim=256, causal=True)
STRIDE = Packed(
    "stride",
    seq_q=(20, 1, 0, 300),
    seq_k=(300, 700, 5, 640),
    heads_kv=1,
    head_dim=128,
    causal=True,
    key_stride=4,
)
ARCHS = ("sm_90a", "sm_100a")
CASES = [(MIXED, 5), (DECODE, 3), (LONG, 11)]
MORE = [(STATE, 5), (WINDOW, 4), (WIDE, 2), (STRIDE, 3), (MIXED, 1), (MIXED, 132), (LONG, 132)]


@pytest.fixture
def cut(simulate_as):
    """A function that makes plans cut all that can be cut, however small; the arguments are ``simulate_as``'s."""
    with contextlib.ExitStack() as contexts:

        def choose(*arguments, **changes):
            simulate_as(*arguments, **changes)
            contexts.enter_context(choosing(Way.LINE))

        yield choose


def run(batch: Packed):
    arguments = batch.arguments()
    result = attention_varlen(
        **arguments, out=batch.poisoned_out(), return_lse=batch.normalize, backend="sim"
    )
    batch.check(result)
    launches = sim.last_report().launches
    assert len(launches) == 2 and all(found.local_bytes == 0 for found in launches)
    return tuple(result)


@pytest.mark.long
@pytest.mark.parametrize(
    "arch, batch, sms",
    [(arch, *case) for case in CASES + MORE for arch in ARCHS],
    ids=lambda x: getattr(x, "id", x),
)
def test_cases(cut, arch, batch, sms):
    cut(arch, sm_count=sms)
    run(batch)


@pytest.mark.parametrize(("batch", "sms"), [(FEW, 5), long(DECODE, 3)], ids=lambda x: getattr(x, "id", x))
def test_bits_depend_on_the_batch_alone(cut, batch, sms):
    """Not on the order in which CTAs run."""
    results = []
    for seed in (0, 1):
        cut("sm_90a", sm_count=sms, seed=seed)
        o, lse = run(batch)
        queries = sum(batch.seq_q)  # nobody writes what is behind them
        results.append((o[:queries], lse[:, :queries]))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first.nan_to_num(), second.nan_to_num())


@pytest.mark.long
def test_equal_tiles_stay_whole(cut):
    """Where chunks are an eighth longer than they had to be at most, they give the bits of whole tiles."""
    batch = Packed("equal", seq_q=(1,) * 7, seq_k=(500,) * 7, heads_q=8, heads_kv=2)
    results = []
    for way, sms in ((Way.LINE, 5), (None, 5), (Way.LINE, 3)):  # chunks: 15, 14 tiles; then 9
        cut("sm_90a", sm_count=sms)
        with choosing(way, wanted=lambda one: one.shape.ctas_per_sm == 3):
            arguments = batch.arguments() | {"backend": "sim"}
            results.append(attention_varlen(**arguments)[: sum(batch.seq_q)])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[2], results[1])  # these were cut


def shape_of_few(arch: str):
    """The shape of FEW's tiles, whose kernel other batches take, too, which saves the time to compile another."""
    few = AttentionProblem.of(**FEW.arguments(), memory=False)
    with choosing(Way.LINE):
        return launch.plan(few, replace(SIMULATED[arch], sm_count=5)).config.shape


def test_rounds_of_chunks(cut):
    """Whole tiles in all rounds but the last, by the kernel of FEW."""
    batch = Packed(
        "rounds", seq_q=(60, 1, 64, 3), seq_k=(60, 200, 64, 130), heads_q=96, heads_kv=48, causal=True
    )
    shape = shape_of_few("sm_90a")
    cut("sm_90a", sm_count=1)
    with choosing(Way.LINE, shape=shape):
        config = launch.plan(
            AttentionProblem.of(**batch.arguments(), memory=False), SIMULATED["sm_90a"]
        ).config
        assert round_count(batch.total_q // config.rows.queries * 48, config.shape.ctas_per_sm) > 1
        run(batch)


def test_decoding_with_kv_lengths(cut):
    """A rectangle of few queries, whose lengths the device knows."""
    cut("sm_90a", sm_count=3)
    lengths, generator = (270, 0, 64, 133), torch.Generator().manual_seed(0)
    q = torch.randn(4, 2, 8, 64, generator=generator).bfloat16()
    k, v = torch.randn(2, 4, 270, 2, 64, generator=generator).bfloat16()
    pages, table = paged([k, v], lengths, 32, spare_slots=2, seed=0)
    inputs = {"kv_lengths": torch.tensor(lengths, dtype=torch.int32), "causal": True, "sink": None}
    out = torch.full_like(q, torch.nan)
    result = attention(q, *pages, **inputs, page_table=table, out=out, return_lse=True, backend="sim")
    assert len(sim.last_report().launches) == 2
    check(Case("lengths"), result, {"q": q, "k": k, "v": v, **inputs}, against_torch=False)


@pytest.mark.parametrize(("sms", "heads"), [(3, (16, 2)), long(8, (3, 3)), long(4, (8, 8))])
def test_heads_in_step(cut, check_order, sms, heads):
    """Over codes: CTAs beside one another take the same chunk of different heads; a CTA may be left over."""
    cut("sm_90a", sm_count=sms)
    lengths, generator = (150, 0, 64, 33, 400), torch.Generator().manual_seed(sms)
    q = torch.randn(5, 1, heads[0], 64, generator=generator).bfloat16()
    k, v = (50 * torch.randn(2, 5, 400, heads[1], 64, generator=generator)).to(torch.float8_e4m3fn)
    options = {"kv_lengths": torch.tensor(lengths, dtype=torch.int32), "return_lse": True}
    options |= {f"{name}_scale": torch.tensor([0.02]) for name in "kv"}
    target = replace(SIMULATED["sm_90a"], sm_count=sms)
    config, _, ctas, _ = launch.plan(AttentionProblem.of(q, k, v, memory=False, **options), target)
    assert config.scheduler.in_step and ctas == 2 * sms // heads[1] * heads[1]
    result = attention(q, k, v, **options, out=torch.full_like(q, torch.nan), backend="sim")
    wanted = attention(q, k, v, **options, backend="reference")
    torch.testing.assert_close(result, wanted, rtol=2.0**-7, atol=2.0**-9)
    assert len(sim.last_report().launches) == 2


@pytest.mark.parametrize("arch", ARCHS)
def test_lengths_that_nobody_checked_touch_nothing_else(cut, arch):
    """Descending, negative and too large entries: memory outside the tensors is not touched; the simulator says so."""
    cut(arch)
    arguments = MIXED.arguments()
    q, k, v = (arguments[name].nan_to_num(0.0, 0.0, 0.0) for name in ("q", "k", "v"))
    o = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    cu_seqlens = torch.tensor([5, 2**31 - 1, -7, 0, 1000, 3], dtype=torch.int32)
    arguments |= dict(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, return_lse=True)
    with choosing(Way.LINE, shape=shape_of_few(arch)):
        planned = launch.plan(AttentionProblem.of(**arguments, memory=False), SIMULATED[arch])
        assert planned.config.scheduler.schedule is Schedule.LINE
        run_unchecked(arguments, o=o, arch=arch, lse=lse)
    assert o[5].isfinite().all()  # the first request begins here
    assert o.nan_to_num(0.0).abs().max() <= v.abs().max()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 240))
def test_random_batches(cut, seed):
    batch = random_batch(seed, num_splits=None, shared_kv=False)
    cut(ARCHS[seed % 2], sm_count=1 + seed % 7, seed=seed)
    run(batch)


@pytest.mark.long
@pytest.mark.parametrize("window", [None, (100, 0)])
def test_paired_consumers(cut, check_order, window):
    """D 512, K and V one tensor: a scheduler warp beside two load warps; a request without keys, and one of three."""
    cut("sm_90a", sm_count=3)
    case = Case(
        "512", batch=4, seq_q=2, seq_k=500, heads_q=8, heads_kv=2, head_dim=512, shared_kv=True, causal=True,
        kv_lengths=(500, 3, 0, 129), sink=True, window=window,
    )  # fmt: skip
    inputs = arguments(case)
    (pages,), table = paged((inputs["k"],), case.kv_lengths, 64)
    options = {"k": pages, "page_table": table, "return_lse": True, "out": poisoned_out(case)}
    with cutting_by_length():
        result = attention(**{**inputs, **options}, backend="sim")
    launches = sim.last_report().launches
    assert len(launches) == 1 and all(found.local_bytes == 0 for found in launches)
    check(case, result, inputs, against_torch=False)
