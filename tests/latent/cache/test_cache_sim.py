"""Insert and compress in the simulator: bits of the reference's quantisers, and the same however they are called."""

from dataclasses import replace

import pytest
import torch
from helpers.cache_cases import POISON, Compressor, Run, grow
from helpers.suites import long

from warpspec.common.compile import resources
from warpspec.common.launch import simulating
from warpspec.latent.cache import IndexPool, LatentPool, insert_window, ops, rope_table, store_rows
from warpspec.latent.cache.config import CompressConfig, InsertConfig
from warpspec.latent.cache.device.compress import COMPRESS
from warpspec.latent.cache.device.insert import INSERT

ARCHES = ("sm_100a", "sm_90a")
TABLE = rope_table(1e4 ** (-torch.arange(32) / 32), 512)
COMPRESSORS = [
    ("sm_100a", ("csa", "mxfp4", True)),
    ("sm_90a", ("hca", "v4-fp8", False)),
    long("sm_100a", ("hca", "v4-fp8", False)),
    *(long(arch, ("csa", name, False)) for arch in ARCHES for name in ("v4-fp8", "fp8")),
    long("sm_90a", ("csa", "mxfp4", True)),
]


@pytest.fixture
def simulated(request):
    """Backend "sim" runs kernels for the architecture of the parameter."""
    with simulating(request.param):
        yield request.param


def on_both(cases):
    """All for sm_100a, the first two for sm_90a; the others of it belong to the long suite."""
    pairs = [("sm_100a", case) for case in cases] + [("sm_90a", case) for case in cases[:2]]
    return pairs + [long("sm_90a", case) for case in cases[2:]]


def poisoned(kind, pages, size, name):
    pool = kind.empty(pages, size, name)
    pool.data.fill_(POISON)
    return pool


@pytest.mark.parametrize("simulated", ARCHES, indirect=True)
def test_insert(simulated, monkeypatch):
    """Queries and keys within a rounding of the reference; fp8 rows are the bits that bf16 rows quantise to. Positions
    that the table lacks make NaN."""
    monkeypatch.setattr(ops, "check_insert_values", lambda *arguments: None)  # as on a GPU
    generator = torch.Generator().manual_seed(0)
    tokens, heads = 5, 3
    q = torch.randn(tokens, heads + 1, 512, generator=generator).bfloat16()[:, 1:]
    kv = (4 * torch.randn(tokens, 520, generator=generator)).bfloat16()[:, 8:]
    kv[2, 5] = torch.nan
    positions = torch.tensor([0, 7, 511, 512, -1], dtype=torch.int32)
    slots = torch.tensor([4, -1, 9, 10, 0], dtype=torch.int32)  # 10 is beyond the pool
    weight = (0.5 + torch.rand(512, generator=generator)).bfloat16()
    rest = dict(weight=weight, slots=slots)
    pools = {}
    for name in ("bf16", "v4-fp8"):
        pools[name] = poisoned(LatentPool, 2, 5, name)
        out = torch.full_like(q, torch.nan)
        got = insert_window(q, kv, TABLE, positions, pool=pools[name], out=out, backend="sim", **rest)
        assert got is out
    expected = poisoned(LatentPool, 2, 5, "bf16")
    wanted = insert_window(q, kv, TABLE, positions, pool=expected, backend="reference", **rest)
    assert_close(got, wanted)
    assert got[3:, :, -64:].isnan().all() and got[3:, :, :-64].isfinite().all()
    stored = torch.tensor([4, 9, 0])
    assert_close(pools["bf16"].read(stored), expected.read(stored))
    again = poisoned(LatentPool, 2, 5, "v4-fp8")
    rows = pools["bf16"].data.view(torch.bfloat16).reshape(-1, 512)  # with the bits of NaN
    again.write(stored, rows[stored])
    assert torch.equal(pools["v4-fp8"].data, again.data)


def assert_close(got, wanted):
    """Equal but for a rounding of bf16 here and there; NaN where NaN is."""
    got, wanted = got.float(), wanted.float()
    assert torch.equal(got.isnan(), wanted.isnan())
    apart = (got - wanted).nan_to_num(0.0).abs()
    assert (apart <= 2.0**-7 * wanted.nan_to_num(0.0).abs()).all() and (apart > 0).float().mean() < 0.01


@pytest.mark.parametrize(
    ("simulated", "case"),
    on_both([(LatentPool, "v4-fp8"), (IndexPool, "mxfp4"), (IndexPool, "fp8"), (LatentPool, "bf16")]),
    indirect=["simulated"],
)
def test_store_rows_bits(simulated, case):
    """The quantiser's bits, on any magnitudes, ties, zeros, NaN and Inf; every byte beside them is left alone."""
    kind, name = case
    fmt = kind.formats[name]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(12, fmt.dim, generator=generator)
    rows[:6] *= torch.exp2(12 * torch.randn(6, fmt.dim, generator=generator))
    rows[6] = (torch.randint(-12, 13, (fmt.dim,), generator=generator) / 4).float()  # ties of e2m1
    rows[6, ::32] = 6
    rows[7], rows[7, 3] = 0, -0.0
    rows[8] *= 1e-38
    rows[9, 1], rows[9, -1], rows[10, 40] = torch.nan, -torch.inf, torch.inf
    rows[11] = torch.finfo(torch.bfloat16).max
    rows = rows.bfloat16()
    slots = torch.tensor([11, 3, -5, 0, 7, 14, 2, 6, 9, 4, 8, 2**31 - 1], dtype=torch.int32)
    got, wanted = (poisoned(kind, 3, 5, name) for _ in range(2))
    store_rows(rows, got, slots, backend="sim")
    store_rows(rows, wanted, slots, backend="reference")
    assert torch.equal(got.data, wanted.data)


@pytest.mark.parametrize(("simulated", "case"), COMPRESSORS, indirect=["simulated"])
def test_compress(simulated, case):
    """Prefill, chunked, one token, speculative: the same bits, and those of the reference's quantiser where its rows
    are the same; the state goes on from one to another."""
    kind, name, hadamard = case
    tokens, drafts = (26, 3) if kind == "csa" else (260, 3)
    compressor = Compressor.random(kind, 2, tokens, dim=128 if name in ("mxfp4", "fp8") else 512)
    ways = ("prefill", "chunked", "speculative", *(["tokens"] if kind == "csa" else []))
    first = grow(Run.start(compressor, name, drafts), tokens, ways[0], backend="sim", hadamard=hadamard)
    for way in ways[1:]:
        run = Run.start(compressor, name, drafts)
        if kind == "hca":  # long windows: a prefill first, then what is special
            run.call([120, 125], backend="sim", hadamard=hadamard)
        grow(run, tokens, way, backend="sim", hadamard=hadamard)
        for request in range(2):
            assert torch.equal(run.entries(request), first.entries(request)), way
    wanted = grow(
        Run.start(compressor, name, drafts), tokens, "prefill", backend="reference", hadamard=hadamard
    )
    for request in range(2):
        got, expected = first.entries(request), wanted.entries(request)
        assert len(got) and (got != expected).float().mean() < 0.02
    assert torch.equal(first.tail.progress[1:], wanted.tail.progress[1:])


@pytest.mark.parametrize(
    ("simulated", "kind"), [("sm_100a", "csa"), ("sm_90a", "hca")], indirect=["simulated"]
)
def test_lost_states_are_nan(simulated, kind):
    """A start that does not go on from what was written: no plausible entry, until tokens are all new again. The host
    sees it on the CPU only, so here it is not asked."""
    stride = 4 if kind == "csa" else 128
    compressor = Compressor.random(kind, 2, 3 * stride + 5)
    run = Run.start(compressor, "v4-fp8", max_draft=3)
    run.call([stride - 2, stride - 2], backend="sim")
    run.lengths[1] += 1  # one token never came
    run.call([2, 2 * stride + 4], backend="sim", checked=False)
    right, wrong = (run.pool.read(run.entry_slots(i)) for i in range(2))
    lost = 2 if kind == "csa" else 1  # entries that need lost tokens
    assert (
        right.isfinite().all()
        and wrong[:lost].isnan().all()
        and wrong[lost:].isfinite().all()
        and len(wrong) > lost
    )


@pytest.mark.parametrize("simulated", ["sm_100a"], indirect=True)
@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_entries_beyond_the_table(simulated, backend):
    """Rotated numbers of such entries are NaN; their other numbers are right."""
    compressor = Compressor.random("csa", 1, 12)
    run = Run.start(replace(compressor, cos_sin=compressor.cos_sin[:8]), "v4-fp8", max_draft=3)
    run.call([12], backend=backend, checked=False)
    rows = run.pool.read(run.entry_slots(0))
    assert rows[:2].isfinite().all() and rows[2, :-64].isfinite().all() and rows[2, -64:].isnan().all()


@pytest.mark.parametrize("simulated", ["sm_100a"], indirect=True)
def test_what_the_host_does_not_see(simulated):
    """Requests that there are not, extents out of order and past the tokens: nothing of them is stored, and nothing is
    read past its end, which the simulator would say."""
    run = Run.start(Compressor.random("csa", 2, 20), "v4-fp8", max_draft=3)
    arguments = run.arguments([9, 11])
    pool = arguments["pool"]
    before = run.tail.progress.clone()

    def call(requests, starts, cu_seqlens):
        batch = {"requests": requests, "starts": starts, "cu_seqlens": cu_seqlens}
        given = arguments | {name: torch.tensor(x, dtype=torch.int32) for name, x in batch.items()}
        ops.run_compress(ops.CompressCall(**given, eps=1e-6, hadamard=False, backend="sim"))

    for requests, starts in (([3, -1], [0, 0]), ([1, 2], [-4, -(2**31)])):
        call(requests, starts, [0, 9, 20])
        assert (pool.data == POISON).all() and torch.equal(run.tail.progress, before)
    for extents in ([5, 2**31 - 1, -7], [-(2**31), 30, 20], [20, 9, 0]):
        call([1, 2], [0, 2**31 - 1], extents)
    outside = torch.ones(pool.capacity, dtype=torch.bool)
    outside[arguments["slots"][arguments["slots"] >= 0].long()] = False
    page, data, scales = pool._bytes_of(outside.nonzero()[:, 0])
    assert (pool.data[page, data] == POISON).all() and (pool.data[page, scales] == POISON).all()


def test_nothing_spills():
    kernels = (
        (INSERT, InsertConfig("latent", "v4-fp8", weight="bfloat16"), "sm_90a"),
        (COMPRESS, CompressConfig("csa", 4, 3, "index", "mxfp4", hadamard=True), "sm_100a"),
        (COMPRESS, CompressConfig("hca", 128, 3, "latent", "v4-fp8"), "sm_90a"),
    )
    for kernel, config, arch in kernels:
        for found in resources(kernel.compiled(config, arch)).values():
            assert found.local_bytes == 0
