"""Insert and compress on a GPU: the quantiser's bits, and the same however they are called, in CUDA graphs too."""

import pytest
import torch
from helpers.cache_cases import POISON, Compressor, Run, grow

from warpspec.latent.cache import IndexPool, LatentPool, compress, insert_window, rope_table, store_rows
from warpspec.latent.cache.quantize import quantize_rows

pytestmark = pytest.mark.gpu

COMPRESSORS = [
    ("csa", "v4-fp8", False),
    ("csa", "mxfp4", True),
    ("csa", "fp8", False),
    ("hca", "v4-fp8", False),
]
STORED = [(LatentPool, "v4-fp8"), (LatentPool, "bf16"), (IndexPool, "mxfp4"), (IndexPool, "fp8")]


@pytest.mark.parametrize(("kind", "name"), STORED)
def test_store_rows_bits(kind, name):
    """Against the definition, on many rows of any magnitudes, NaN and Inf among them."""
    fmt = kind.formats[name]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3000, fmt.dim, generator=generator)
    rows[:2000] *= torch.exp2(10 * torch.randn(2000, fmt.dim, generator=generator))
    rows[2000:2200] = torch.randint(-24, 25, (200, fmt.dim), generator=generator) / 8
    rows[2300, 5], rows[2301, -1] = torch.nan, torch.inf
    rows = rows.bfloat16()
    pool = kind.empty(40, 100, name, device="cuda")
    pool.data.fill_(POISON)
    slots = torch.randperm(4000, generator=generator)[:3000].to(torch.int32)
    store_rows(rows.cuda(), pool, slots.cuda())
    expected = kind.empty(40, 100, name)
    expected.data.fill_(POISON)
    expected.write(slots, rows)
    assert torch.equal(pool.data.cpu(), expected.data)


def test_insert_window():
    """Close to the reference; the same bits when tokens come one at a time; other rows untouched."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads = 300, 64
    q = torch.randn(tokens, heads, 512, generator=generator).bfloat16().cuda()
    kv = torch.randn(tokens, 512, generator=generator).bfloat16().cuda()
    table = rope_table(1e4 ** (-torch.arange(32) / 32), 4096).cuda()
    positions = torch.randint(0, 4096, (tokens,), generator=generator).to(torch.int32).cuda()
    slots = torch.randperm(512, generator=generator)[:tokens].to(torch.int32).cuda()
    slots[::7] = -1
    weight = torch.rand(512, generator=generator).cuda()
    pools = [LatentPool.empty(4, 128, name, device="cuda") for name in ("v4-fp8", "v4-fp8", "bf16", "bf16")]
    for pool in pools:
        pool.data.fill_(POISON)
    whole = insert_window(q, kv, table, positions, weight=weight, pool=pools[0], slots=slots)
    parts = []
    for i in range(0, tokens, 7):
        at = slice(i, i + 7)
        parts.append(
            insert_window(q[at], kv[at], table, positions[at], weight=weight, pool=pools[1], slots=slots[at])
        )
    assert torch.equal(torch.cat(parts), whole) and torch.equal(pools[0].data, pools[1].data)
    insert_window(None, kv, table, positions, weight=weight, pool=pools[2], slots=slots)
    wanted = insert_window(
        q, kv, table, positions, weight=weight, pool=pools[3], slots=slots, backend="reference"
    )
    assert ((whole.float() - wanted.float()).abs() <= 2.0**-7 * wanted.float().abs()).all()
    stored = slots[slots >= 0].long()
    got, expected = pools[2].read(stored), pools[3].read(stored)
    assert ((got - expected).abs() <= 2.0**-7 * expected.abs()).all()
    assert torch.equal(pools[0].read(stored), requantized(got, pools[0]))


def requantized(rows, pool):
    """rows, bf16 numbers, as the pool reads them."""
    again = LatentPool.empty(1, len(rows), pool.format, device=rows.device)
    again.write(torch.arange(len(rows), device=rows.device), rows)
    return again.read(torch.arange(len(rows), device=rows.device))


@pytest.mark.parametrize(("kind", "name", "hadamard"), COMPRESSORS)
def test_compress(kind, name, hadamard):
    """Prefill, chunked, one token, speculative with rejections: the same bits; close to the reference."""
    tokens, drafts = (60, 3) if kind == "csa" else (400, 3)
    compressor = Compressor.random(kind, 5, tokens, dim=128 if name in ("mxfp4", "fp8") else 512)
    runs = [
        grow(
            Run.start(compressor, name, drafts, device="cuda"), tokens, way, backend="auto", hadamard=hadamard
        )
        for way in ("prefill", "chunked", "tokens", "speculative")
    ]
    wanted = grow(
        Run.start(compressor, name, drafts), tokens, "prefill", backend="reference", hadamard=hadamard
    )
    for request in range(5):
        first = runs[0].entries(request)
        assert len(first) == tokens // compressor.stride
        for run in runs[1:]:
            assert torch.equal(run.entries(request), first)
        assert (first.cpu() != wanted.entries(request)).float().mean() < 0.02


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_state_survives_graphs(kind):
    """A captured step of one token and three drafts, replayed with rejections, against the same calls made plainly."""
    compressor = Compressor.random(kind, 4, 300)
    plain, graphed = (Run.start(compressor, "v4-fp8", 3, device="cuda") for _ in range(2))
    for run in (plain, graphed):
        run.call([121, 126, 5, 3], backend="auto")
        run.call([4] * 4, [1, 1, 1, 1], backend="auto")  # compiles
    static = graphed.arguments([4] * 4)
    inputs = [static[n] for n in ("content_gate", "ape", "weight", "cos_sin")]
    rest = {n: t for n, t in static.items() if n not in ("content_gate", "ape", "weight", "cos_sin")}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compress(*inputs, **rest)
    generator = torch.Generator().manual_seed(2)
    for _ in range(12):
        accepted = torch.randint(1, 5, (4,), generator=generator).tolist()
        plain.call([4] * 4, accepted, backend="auto")
        now = graphed.arguments([4] * 4)
        for name in ("content_gate", "starts", "slots"):
            static[name].copy_(now[name])
        graph.replay()
        graphed.lengths += torch.tensor(accepted, dtype=torch.int32, device="cuda")
    for request in range(4):
        assert torch.equal(plain.entries(request), graphed.entries(request))
    prefill = grow(Run.start(compressor, "v4-fp8", 3, device="cuda"), 128, "prefill", backend="auto")
    assert torch.equal(prefill.entries(0), plain.entries(0)[: len(prefill.entries(0))])


def test_quantizer_reads_what_it_stores():
    rows = torch.randn(4, 512).bfloat16()
    data, scales = quantize_rows(rows.cuda(), LatentPool.formats["v4-fp8"])
    again = quantize_rows(rows, LatentPool.formats["v4-fp8"])
    assert torch.equal(data.cpu(), again[0]) and torch.equal(scales.cpu(), again[1])
