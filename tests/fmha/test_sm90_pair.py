"""D 512 on sm_90a: two consumers share the rows and exchange P. In the simulator, most with K and V one tensor."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import CASES, Case, arguments, check, poisoned_out, relative_error
from helpers.attention_configs import configured
from helpers.boxes import count_boxes
from helpers.page_layouts import paged
from helpers.peaks import HEADS, KEYS, check_as_exact_as_torch, every_peak
from helpers.simulate import choosing
from helpers.suites import long_but
from helpers.varlen_cases import Packed

from warpspec import sim
from warpspec.common.compile import resources
from warpspec.fmha import attention, attention_varlen, sm90
from warpspec.fmha.logits import BiasLayout
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.sm90.shapes import PAIR
from warpspec.sim.families import wgmma

LATENT = dict(head_dim=512, heads_kv=1, shared_kv=True)


@pytest.fixture
def simulate(simulate_as):
    """Function that runs a case on this many SMs (None: an H100's), judges it and returns the report."""

    def run(case: Case, *, ctas: int | None = None, seed: int = 0, **options):
        simulate_as("sm_90a", seed=seed, **({} if ctas is None else {"sm_count": ctas}))
        inputs = {**arguments(case, seed), **options}
        result = attention(**inputs, out=poisoned_out(case), return_lse=case.normalize, backend="sim")
        inputs.pop("num_splits", None)
        check(case, result, inputs)
        assert all(launch.local_bytes == 0 for launch in sim.last_report().launches)
        return sim.last_report()

    return run


CASES_OF_ITS_OWN = [
    Case("prefill", seq_q=20, seq_k=300, heads_q=16, causal=True, sink=True, **LATENT),
    Case("window", batch=2, seq_q=20, seq_k=300, heads_q=16, causal=True, window=(130, None), **LATENT),
    Case("state", seq_q=2, seq_k=200, heads_q=64, normalize=False, scale=-0.1, data="rising", **LATENT),
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES_OF_ITS_OWN, ids=lambda case: case.id)
def test_cases(simulate, case):
    simulate(case, num_splits=1)


LENGTHS = Case(
    "lengths", batch=7, seq_k=420, heads_q=64, kv_lengths=(64, 420, 0, 1, 129, 65, 256), sink=True, data="creeping",
    **LATENT,
)  # fmt: skip


SEEDS = [(seed, shared) for seed in range(4) for shared in (True, False)]


@pytest.mark.parametrize(("seed", "shared"), long_but([(1, False)], SEEDS))
def test_tiles_of_every_length(simulate, seed, shared):
    """Rows of 0 to 7 KV tiles after one another in a CTA, of 0 to 14 if K and V are two tensors: whose turn it is
    begins with either consumer."""
    simulate(replace(LENGTHS, shared_kv=shared), ctas=2, seed=seed, num_splits=1)


@pytest.mark.long
def test_two_head_tiles(simulate):
    """With 128 heads, both tiles of 64 heads load Q once, and KV tiles of their own."""
    for seed in range(3):
        launch = simulate(replace(LENGTHS, heads_q=128), ctas=4, seed=seed, num_splits=1).launches[0]
        tiles = sum(-(-length // 64) for length in LENGTHS.kv_lengths)
        rows = 6 * 128  # of one batch row no key is seen
        assert launch.tma_bytes_loaded == (rows + 2 * tiles * 64) * 2 * 512


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case(simulate, case):
    """With two tensors: ``test_sm90_sim``."""
    simulate(replace(case, head_dim=512, shared_kv=True))


# Of K and V as one tensor the default suite has MLA's kernel (test_latent_sim): one of D 512 takes 13 s to compile.
BOTH = pytest.mark.parametrize("shared", long_but([False], [True, False]))


@BOTH
@every_peak
def test_as_exact_as_torch(simulate_as, steps, shared):
    """Lengths and a sink that change nothing make it the kernel of LENGTHS."""
    simulate_as("sm_90a")
    sink = torch.full((HEADS,), -torch.inf, dtype=torch.bfloat16)  # a case's sinks have its dtype
    lengths = torch.tensor([KEYS], dtype=torch.int32)
    check_as_exact_as_torch(steps, 512, shared_kv=shared, sink=sink, kv_lengths=lengths, return_lse=True)


PAGED = Case("pages", batch=2, seq_k=300, heads_q=64, kv_lengths=(300, 70), sink=True, **LATENT)


@pytest.mark.long
def test_split_keys_through_pages(simulate_as):
    """Three parts of the keys, one of them empty in the shorter row."""
    simulate_as("sm_90a")
    dense = arguments(PAGED)
    (pages,), table = paged((dense["k"],), PAGED.kv_lengths, 16)
    options = dict(k=pages, page_table=table, num_splits=3, return_lse=True, out=poisoned_out(PAGED))
    check(PAGED, attention(**{**dense, **options}, backend="sim"), dense)
    assert all(launch.local_bytes == 0 for launch in sim.last_report().launches)


@pytest.mark.long
@pytest.mark.parametrize("page_size", [16, 128])
def test_pages(simulate_as, page_size):
    simulate_as("sm_90a")
    dense = arguments(PAGED)
    (pages,), table = paged((dense["k"],), PAGED.kv_lengths, page_size)
    options = dict(return_lse=True, num_splits=1, backend="sim")
    expected = attention(**dense, **options)
    got = attention(**{**dense, "k": pages, "page_table": table}, **options)
    assert all(one.equal(other) for one, other in zip(got, expected, strict=True))


@pytest.mark.long
def test_bias(simulate_as):
    simulate_as("sm_90a")
    inputs = arguments(Case("bias", batch=2, seq_q=3, seq_k=200, heads_q=64, **LATENT))
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(2, 1, 3, 200, generator=generator)
    bias[torch.rand(bias.shape, generator=generator) < 0.5] = -torch.inf
    bias[0, :, 1] = -torch.inf  # a row that sees no key
    o = attention(**inputs, bias=bias, backend="sim")
    expected = attention(**inputs, bias=bias, backend="reference")
    assert relative_error(o.float(), expected.float()) <= 4e-3
    assert (o[0, 1] == 0).all()


def counted(keys: int, heads: int) -> Case:
    """A decode step of one sequence, by the kernel of LENGTHS."""
    return Case("count", seq_k=keys, heads_q=heads, kv_lengths=(keys,), sink=True, **LATENT)


@BOTH
def test_every_product_is_computed_once(simulate, shared):
    keys, heads = 256, 128
    report = simulate(replace(counted(keys, heads), shared_kv=shared), num_splits=1)
    assert report.launches[0].mma_flops == 2 * 2 * heads * keys * 512
    m_tiles, tensors, row = heads // 64, 1 if shared else 2, 2 * 512
    assert report.launches[0].tma_bytes_loaded == (heads + m_tiles * tensors * keys) * row


TILE_BYTES = 64 * 512 * 2  # of 64 keys, and of Q of 64 rows


@pytest.fixture
def boxes(monkeypatch):
    return count_boxes(monkeypatch)


@pytest.mark.long  # a kernel of its own, which takes twelve seconds to compile
def test_one_of_the_ctas_that_share_keys_prefetches_them(simulate, boxes):
    """With many queries, all KV tiles but the first two, which are loaded at once: their boxes are asked for three
    times, for two M tiles and once before. A Q box is asked for once."""
    case = replace(counted(5 * 64, 8), seq_q=16)
    report = simulate(case, num_splits=1)
    assert report.launches[0].tma_bytes_prefetched == (5 - 2) * TILE_BYTES
    assert Counter(boxes.values()) == {1: 2 * 8, 2: 2 * 8, 3: 3 * 8}


@pytest.mark.long
def test_nothing_is_prefetched_for_few_queries(simulate, boxes):
    """Seven M tiles on two CTAs, one without keys: every box is asked for once."""
    report = simulate(LENGTHS, ctas=2, num_splits=1)
    assert report.launches[0].tma_bytes_prefetched == 0
    kv_tiles = sum(-(-length // 64) for length in LENGTHS.kv_lengths)
    assert Counter(boxes.values()) == {1: (7 - 1 + kv_tiles) * 8}


VARIANTS = {
    "decode": {"exact_maximum": True, "pack": 64, "has_sink": True, "has_lse": True},
    "splits": {"splits": True, "normalize": False, "has_kv_lengths": True, "page_size": 16, "pack": 64},
    "causal": {"causal": True, "pack": 64, "has_sink": True},
    "window": {
        "causal": True,
        "has_left": True,
        "has_kv_lengths": True,
        "pack": 8,
        "negate": True,
    },
    "bias": {"bias": BiasLayout("float32", batches=True), "pack": 64},
}


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_spills(variant):
    config = configured(sm90.AttentionConfig, head_dim=512, shared_kv=True, shape=PAIR, **VARIANTS[variant])
    (kernel,) = resources(sm90.ATTENTION.compiled(config, "sm_90a")).values()
    assert kernel.local_bytes == 0


# K and V two tensors: tiles and partitions of the keys from a queue, by a scheduler warp; one tile a CTA. Requests
# without queries or without keys; several query tiles; pages.
WIDE = dict(heads_q=8, heads_kv=1, head_dim=512)
TILES = Packed("tiles", seq_q=(40, 1, 0, 9), seq_k=(250, 170, 5, 64), causal=True, page_size=16, **WIDE)
DRAFTS = Packed("drafts", seq_q=(3, 0, 1, 4), seq_k=(500, 20, 0, 300), causal=True, sink=True, **WIDE)
WAYS = [
    (TILES, Way.QUEUE, 1),
    (replace(TILES, id="window", window=(100, 0), sink=True, page_size=None), Way.QUEUE, 1),
    (replace(TILES, id="two heads", heads_q=4, heads_kv=2, softcap=3.0), Way.QUEUE, 1),
    (replace(TILES, id="one each"), Way.SINGLE, 1),
    (DRAFTS, Way.PARTITIONS, 4),
    (replace(DRAFTS, id="state", normalize=False, sink=False, page_size=64), Way.PARTITIONS, 3),
    (replace(DRAFTS, id="told", seq_q=(3, 0, 20, 4), seq_k=(500, 20, 90, 300), hint_q=4), Way.PARTITIONS, 4),
]


@pytest.mark.long
@pytest.mark.parametrize(("batch", "way", "splits"), WAYS, ids=lambda value: getattr(value, "id", value))
def test_ways_of_two_tensors(simulate_as, check_order, batch, way, splits):
    simulate_as("sm_90a", sm_count=3)
    chosen = []
    with choosing(way, lambda found: not chosen.append(found), splits=splits):
        batch.check(
            attention_varlen(
                **batch.arguments(), out=batch.poisoned_out(), return_lse=batch.normalize, backend="sim"
            )
        )
    assert {one.way for one in chosen} == {way}
    assert all(launch.local_bytes == 0 for launch in sim.last_report().launches)


@pytest.mark.long
def test_which_cta_computes_a_tile_does_not_change_it(simulate_as, monkeypatch):
    """Either consumer may begin a tile, which its CTA's tiles before decide. Two sums of many instructions commute, so
    each instruction is added by itself, as on a GPU."""
    monkeypatch.setattr(wgmma, "LONGEST_PRODUCT", 1)
    results, used = [], sum(TILES.seq_q)
    for sm_count in (1, 2, 3):
        simulate_as("sm_90a", sm_count=sm_count)
        with choosing(Way.QUEUE):
            o, lse = attention_varlen(**TILES.arguments(), return_lse=True, backend="sim")
        results.append((o[:used], lse[:, :used]))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
