"""index_queries: bits of the reference, simulated; index_scores: the definition; selection within a workspace."""

from functools import partial

import pytest
import torch
from helpers.suites import long

from warpspec.common.compile import resources
from warpspec.common.errors import UnsupportedProblem
from warpspec.latent.cache import IndexPool, rope_table, table_slots
from warpspec.latent.indexer import IndexQueries, index_queries, index_scores, ops, problem, select_entries
from warpspec.latent.indexer.kernels import INDEX
from warpspec.latent.indexer.scores_config import ScoresConfig

TABLE = rope_table(1e4 ** (-torch.arange(32) / 32), 256)


def queries(tokens=3, heads=8, format="mxfp4", backend="reference", **options):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, heads, 128, generator=generator).bfloat16()
    weights = torch.randn(tokens, heads, generator=generator)
    positions = torch.randint(0, 256, (tokens,), generator=generator).to(torch.int32)
    return index_queries(q, weights, TABLE, positions, format=format, backend=backend, **options)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_kernel(simulate_as, arch):
    """Rotation differs by roundings now and then; where it does not, the bits are the reference's."""
    simulate_as(arch)
    got, wanted = queries(backend="sim"), queries()
    assert (got.pool.data != wanted.pool.data).float().mean() < 0.01
    assert (got.values - wanted.values).norm() < 0.02 * wanted.values.norm()


@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_positions_beyond_the_table(backend):
    """On the CPU an error; what a GPU makes of them, which the host does not see: NaN."""
    asked = torch.ones(2, 4, 128).bfloat16(), torch.ones(2, 4), TABLE
    for beyond in (-1, 256):
        positions = torch.tensor([3, beyond], dtype=torch.int32)
        with pytest.raises(ValueError, match=rf"positions: must be within 0..255 .* got {beyond} at index 1"):
            index_queries(*asked, positions, backend=backend)
        for hadamard, lost in ((True, 128), (False, 64)):
            pool = IndexPool.empty(2, 4, "bf16")
            ops.run_queries(asked[0], TABLE, positions, pool.data, "bf16", hadamard, backend)
            rows = pool.read(torch.arange(8).view(2, 4))
            assert rows[0].isfinite().all() and rows[1].isnan().sum() == 4 * lost
            assert rows[1, :, -lost:].isnan().all()


def test_values():
    """Rotated by the matrix's columns, within FP4's steps; without quantisation, within bf16's."""
    exact = queries(format="bf16", hadamard=True).values
    plain = queries(format="bf16", hadamard=False).values
    assert torch.allclose(exact.norm(dim=-1), plain.norm(dim=-1), rtol=0.01)
    assert not torch.allclose(exact, plain, atol=0.5)
    assert 0.02 < (queries().values - exact).norm() / exact.norm() < 0.2


def case(format):
    generator = torch.Generator().manual_seed(3)
    pool = IndexPool.empty(6, 8, format)
    pool.data.fill_(0xFF)  # NaN in rows that are not seen
    pool.write(torch.arange(40), torch.randn(40, 128, generator=generator).bfloat16())
    table = torch.tensor([[4, 0, 2], [1, 3, 5]], dtype=torch.int32)
    requests = torch.tensor([0, 1, 1], dtype=torch.int32)
    lengths = torch.tensor([24, 16, 3], dtype=torch.int32)
    return pool, table, requests, lengths


@pytest.mark.parametrize("format", ["mxfp4", "fp8"])
def test_scores(format):
    asked = queries(format=format)
    pool, table, requests, lengths = case(format)
    logits = index_scores(asked, pool, table, requests, lengths, backend="reference")
    assert logits.shape == (3, 24)
    for t in range(3):
        for i in range(24):
            if i >= lengths[t]:
                assert logits[t, i] == -torch.inf
                continue
            key = pool.read(table[requests[t], i // 8] * 8 + i % 8)
            wanted = sum(
                w * max(0.0, float(q @ key)) for w, q in zip(asked.weights[t], asked.values[t], strict=True)
            )
            assert abs(logits[t, i] - wanted) < 1e-3


@pytest.mark.parametrize(
    ("arch", "format", "heads", "size"),
    [
        ("sm_100a", "mxfp4", 16, 80),
        ("sm_90a", "fp8", 24, 80),
        ("sm_100a", "fp8", 24, 80),
        long("sm_90a", "mxfp4", 16, 80),  # test_stream has such scores
        *(
            long(arch, *case)
            for arch in ("sm_90a", "sm_100a")
            for case in (("mxfp4", 8, 80), ("fp8", 16, 20), ("mxfp4", 64, 32))
        ),
    ],
)
def test_scores_kernel(check_order, monkeypatch, simulate_as, format, heads, size, arch):
    """The kernels against the reference, on rows whose blocks differ by much; pages and requests that are not there, a
    length past the table, rows of NaN that are not seen, one that is; more queries than a launch takes."""
    simulate_as(arch, sm_count=2)
    monkeypatch.setattr(ops, "MOST_QUERIES", 3)
    monkeypatch.setattr(problem, "check_range", lambda *arguments: None)  # as on a GPU
    generator = torch.Generator().manual_seed(2)
    asked = queries(tokens=5, heads=heads, format=format)
    pool = IndexPool.empty(480 // size, size, format)
    pool.data.fill_(0xFF)
    spread = torch.exp2(2 * torch.randn(400, 4, generator=generator)).repeat_interleave(32, dim=1)
    rows = (torch.randn(400, 128, generator=generator) * spread).bfloat16()
    table = torch.stack(
        [torch.randperm(400 // size, generator=generator)[: -(-240 // size)] for _ in range(2)]
    )
    table = table.to(torch.int32)
    table[1, 160 // size :] = -1
    rows[int(table[0, 10 // size]) * size + 10 % size, 3] = torch.nan
    pool.write(torch.arange(400), rows)
    requests, lengths = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 1, 2, -1], [2**31 - 1, 200, 3, 240, 240])
    )
    got = index_scores(asked, pool, table, requests, lengths, backend="sim")
    wanted = index_scores(asked, pool, table, requests, lengths, backend="reference")
    assert got[0, 10].isnan() and got[1, 160:].eq(-torch.inf).all() and got[2, 3:].eq(-torch.inf).all()
    assert got[3:].eq(-torch.inf).all()
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isfinite(), wanted.isfinite())
    x, y = (t[wanted.isfinite()].double() for t in (got, wanted))
    assert 1 - 2 * (x * y).sum() / (x.square() + y.square()).sum() < 1e-5


@pytest.mark.parametrize("format", ["mxfp4", long("fp8")])
@pytest.mark.parametrize(
    ("lengths", "pages", "sms"),
    [
        ([300, 0, 0, 17, 640, 64, 65, 1], 10, 2),  # off tiles, none; a page and a request that are not there
        long([3, 5, 1700, 9, 2], 27, 3),  # one long among short
        long([100, 0, 30], 3, 6),  # fewer tiles than warpgroups
        long([640], 10, 3),
        long([0, 0, 0], 2, 2),
        long([50] * 40 + [0] * 3 + [200], 4, 3),
    ],
)
def test_balanced_scores(check_order, monkeypatch, simulate_as, lengths, pages, sms, format):
    """Tiles dealt by lengths: the same bits, and -inf in the same places."""
    tokens = len(lengths)
    simulate_as("sm_90a", sm_count=sms)
    monkeypatch.setattr(problem, "check_range", lambda *arguments: None)  # as on a GPU
    generator = torch.Generator().manual_seed(1)
    asked, pool = queries(tokens=tokens, heads=16, format=format), IndexPool.empty(2 * pages, 64, format)
    rows = torch.randn(pool.capacity, 128, generator=generator).bfloat16()
    pool.write(torch.arange(pool.capacity), rows)
    table = torch.randperm(2 * pages, generator=generator).view(2, pages).to(torch.int32)
    requests = (torch.arange(tokens) % 2).to(torch.int32)
    if tokens == 8:
        table[1, 1], requests[5] = -1, -1
    lengths, found = torch.tensor(lengths, dtype=torch.int32), []
    for balanced in (False, True):
        config = ScoresConfig(format, 16, 64, balanced=balanced)
        monkeypatch.setattr(ScoresConfig, "of", lambda *arguments, config=config: config)
        found.append(index_scores(asked, pool, table, requests, lengths, backend="sim"))
    assert torch.equal(*found) and found[0].isneginf().any() == (lengths < pages * 64).any()


def test_scores_way():
    """The way of sm_90a: FP8 keys of one query in the faster of both (us, an H200: registers, copied); several queries
    dealt by length, by CTAs that cut equal ones alike. Nothing spills; who launches dependent waits before it reads."""
    way = partial(ScoresConfig.of, heads=64, page_size=64, sm_count=132)
    for columns, registers, copied in [
        (16384, 5.0, 3.1), (65536, 6.3, 5.2), (131072, 9.3, 8.0), (262144, 12.7, 9.3), (524288, 22.8, 23.3),
    ]:  # fmt: skip
        config = way("fp8", queries=1, columns=columns)
        assert (copied if config.copied else registers) < 1.025 * min(registers, copied)
        assert way("mxfp4", queries=1, columns=columns) == ScoresConfig("mxfp4", 64, 64)
    for format, queries, ctas in [
        ("fp8", 64, 128),
        ("mxfp4", 3, 132),
        ("fp8", 256, 128),
        ("mxfp4", 100, 132),
    ]:
        config = way(format, queries=queries, columns=32768)
        assert config.balanced and not config.copied and config.choose_splits(queries, 32768, 132) == ctas
    kernel = INDEX.kernels["sm90"].scores
    prefill = way("fp8", queries=4096, columns=16384)
    assert prefill == ScoresConfig("fp8", 64, 64)
    assert all(found.local_bytes == 0 for found in resources(kernel.compiled(prefill, "sm_90a")).values())
    for config in (way("fp8", queries=1, columns=16384), way("fp8", queries=2, columns=16384)):
        compiled = kernel.compiled(config, "sm_90a")
        assert all(found.local_bytes == 0 for found in resources(compiled).values())
        ptx = compiled.artifacts.PTX
        first_read = min(
            ptx.find(name) % len(ptx) for name in ("ld.global", "cp.async.c", "griddepcontrol.launch")
        )
        assert config.dependent and ptx.index("griddepcontrol.wait") < first_read


def exact_case(format, heads, pages, equal):
    """(queries, pool, table, requests, lengths) whose scores are exact in any order, and often equal; all keys alike,
    ``equal``. Scores that are NaN, infinite or of no page; NaN past every length; a request that there is not."""
    generator = torch.Generator().manual_seed(5)
    tokens, entries = 8, 64 * pages
    values = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0])

    def rows(count):
        found = values[torch.randint(0, 8, (count, 128), generator=generator)]
        found[:, ::32] = 6.0  # a block's scale is 1, in FP4
        return found.bfloat16()

    asked = IndexPool.empty(tokens, heads, format)
    asked.write(torch.arange(tokens * heads), rows(tokens * heads))
    weights = torch.randint(-2, 4, (tokens, heads), generator=generator).float()
    weights[5, 0] = -torch.inf
    pool = IndexPool.empty(2 * pages, 64, format)
    pool.data.fill_(0xFF)
    table = torch.randperm(2 * pages, generator=generator).view(2, pages).to(torch.int32)
    keys = rows(1).expand(entries, -1).clone() if equal else rows(entries)
    keys[1, 7] = torch.nan
    pool.write(table_slots(table[:1], torch.arange(entries - 9)[None], 64)[0], keys[: entries - 9])
    pool.write(table_slots(table[1:], torch.arange(entries)[None], 64)[0], keys.flip(0))
    table[1, 1], table[1, -1] = -1, 2 * pages
    lengths = [entries - 9, entries + 5, 0, 1, 128, entries - 9, 193, entries]
    requests, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 0, 1, 0, 0, 0, -1], lengths))
    return IndexQueries(asked, weights), pool, table, requests, lengths


@pytest.mark.parametrize(
    ("arch", "format", "heads", "pages", "equal", "counts"),
    [
        ("sm_90a", "mxfp4", 8, 5, False, (40,)),
        long("sm_100a", "mxfp4", 8, 13, False, (40, 2048)),  # its scores: test_scores_kernel
        *(
            long(arch, *case, (40, 2048))
            for arch in ("sm_90a", "sm_100a")
            for case in (
                ("fp8", 24, 13, False),
                ("mxfp4", 64, 4, False),
                ("mxfp4", 8, 280, False),
                ("fp8", 8, 260, True),
            )
        ),
    ],
)
def test_stream(check_order, monkeypatch, simulate_as, arch, format, heads, pages, equal, counts):
    """Scores and selection in one launch select what the reference does: entries that end within a tile and a chunk,
    one, none, more than a chunk; k below and above their number."""
    simulate_as(arch)
    monkeypatch.setattr(problem, "check_range", lambda *arguments: None)  # as on a GPU
    arguments = exact_case(format, heads, pages, equal)
    for k in counts:
        got = select_entries(*arguments, k, workspace_bytes=0, backend="sim")
        wanted = select_entries(*arguments, k, backend="reference")
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
        assert got[1][0] == min(k, 64 * pages - 9) and got[1][[2, 3, 7]].tolist() == [0, 1, 0]


def test_operators_are_traced(simulate_as):
    """Queries, scores, selection; in one launch, too."""
    simulate_as("sm_100a")
    _, pool, table, requests, lengths = exact_case("mxfp4", 8, 2, False)
    generator = torch.Generator().manual_seed(0)
    q, weights = torch.randn(8, 8, 128, generator=generator).bfloat16(), torch.ones(8, 8)

    def call(q, **options):
        asked = index_queries(q, weights, TABLE, lengths, backend="reference")
        return select_entries(asked, pool, table, requests.clamp(min=0), lengths.clamp(max=128), 5, **options)

    for options in ({"backend": "reference"}, {"backend": "sim", "workspace_bytes": 0}):
        traced = torch.compile(lambda q: call(q, **options), backend="eager", fullgraph=True)  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(traced(q), call(q, **options), strict=True))


def test_workspace_does_not_matter():
    asked = queries()
    pool, table, requests, lengths = case("mxfp4")
    whole = select_entries(asked, pool, table, requests, lengths, 5, backend="reference")
    for size in (0, 100):
        pieces = select_entries(
            asked, pool, table, requests, lengths, 5, workspace_bytes=size, backend="reference"
        )
        assert torch.equal(whole[0], pieces[0]) and torch.equal(whole[1], pieces[1])
    assert whole[1].tolist() == [5, 5, 3] and whole[0][2].tolist() == [8, 9, 10, -1, -1]


def test_bad_arguments():
    asked = queries()
    pool, table, requests, lengths = case("mxfp4")
    other = IndexPool.empty(6, 8, "fp8")
    with pytest.raises(UnsupportedProblem, match="both of mxfp4 or fp8, got 'fp8' and 'mxfp4'"):
        index_scores(asked, other, table, requests, lengths, backend="sim")
    with pytest.raises(UnsupportedProblem, match="a multiple of 8 heads up to 64, got 12"):
        index_scores(queries(heads=12), pool, table, requests, lengths, backend="sim")
    with pytest.raises(ValueError, match=r"lengths: .* got 25"):
        index_scores(asked, pool, table, requests, lengths + 1, backend="reference")
    with pytest.raises(TypeError, match="queries: must be an IndexQueries"):
        index_scores(None, pool, table, requests, lengths)
    few = IndexPool.empty(2, 8, "mxfp4")
    for fields, error, message in [
        ((few, asked.weights), ValueError, r"pool: must have a page .* \[3, 8\], got 2 pages of 8"),
        ((asked.pool, asked.weights[:, :4].contiguous()), ValueError, r"pool: must have a page .* \[3, 4\]"),
        ((asked.pool, asked.weights.double()), TypeError, "weights: dtype"),
        ((asked.pool.data, asked.weights), TypeError, "pool: must be an IndexPool"),
    ]:
        with pytest.raises(error, match=message):
            IndexQueries(*fields)
    with pytest.raises(ValueError, match=r"requests: .* got 2 at index 0"):
        select_entries(asked, pool, table, requests + 2, lengths, 5, workspace_bytes=0)
    with pytest.raises(NotImplementedError, match="q: gradients"):
        index_queries(
            torch.zeros(1, 4, 128).bfloat16().requires_grad_(), torch.ones(1, 4), TABLE, requests[:1]
        )
    with pytest.raises(ValueError, match="workspace_bytes: must be"):
        select_entries(asked, pool, table, requests, lengths, 5, workspace_bytes=-1)
    with pytest.raises(ValueError, match="q: heads must be a multiple of 4, got 3"):
        queries(heads=3)
    with pytest.raises(ValueError, match="format: must be one of"):
        queries(format="e4m3")
