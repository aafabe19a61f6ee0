"""softmax_topk's kernel, compiled for both architectures, executed in the simulator: every way to divide a row."""

import itertools

import helpers.topk_cases as cases
import pytest
import torch
from helpers.suites import long, long_but

from warpspec import sim
from warpspec.common.compile import resources
from warpspec.common.launch import SIMULATED
from warpspec.softmax.topk import softmax_topk
from warpspec.softmax.topk.config import HELD_MOST_K, SORTED_ELEMENTS, TopkConfig, smallest_capacity
from warpspec.softmax.topk.launch import topk_kernel
from warpspec.softmax.topk.plan import choose_config

ARCHS = ("sm_90a", "sm_100a")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POISON_INDEX = -7


def config_of(dtype, k, **fields):
    return TopkConfig(dtype=str(dtype).removeprefix("torch."), k_capacity=smallest_capacity(k), **fields)


def run(config, logits, k, arch="sm_90a", seed=0):
    """(probs, indices) of the kernel on logits (ROW, COLUMN); outputs poisoned before."""
    probs = torch.full((logits.shape[0], k), torch.nan)
    indices = torch.full((logits.shape[0], k), POISON_INDEX, dtype=torch.int32)
    topk_kernel.run(config, SIMULATED[arch], logits, probs, indices, seed=seed)
    return probs, indices


def poisoned(logits, offset, gap, poison=torch.nan):
    """Rows as a view: ``offset`` elements into a buffer, ``gap`` elements apart, poison everywhere else."""
    rows, length = logits.shape
    buffer = torch.full((offset + rows * (length + gap) + 8,), poison, dtype=logits.dtype)
    view = buffer.as_strided((rows, length), (length + gap, 1), offset)
    view.copy_(logits)
    return view


# How a row may be divided: warps, CTAs of a cluster, rows of a CTA, vectors of a lane, lanes of a held row.
STREAMS = {
    "a warp a row": dict(rows=4, warps=1, unroll=2),
    "a warp a CTA": dict(rows=1, warps=1, unroll=4),
    "two warps": dict(warps=2, unroll=1),
    "eight warps": dict(warps=8, unroll=2),
    "sixteen warps": dict(warps=16, unroll=1),
    "cluster of two": dict(warps=4, cluster=2, unroll=2),
    "cluster of eight": dict(warps=2, cluster=8, unroll=1),
}
AGAIN = {
    "again, a warp a row": dict(again=True, rows=4, warps=1, unroll=2),
    "again, eight warps": dict(again=True, warps=8, unroll=2),
    "again, cluster of two": dict(again=True, warps=4, cluster=2, unroll=2),
    "again, cluster of eight": dict(again=True, warps=2, cluster=8, unroll=1),
    "again, cluster of sixteen": dict(again=True, warps=1, cluster=16, unroll=1),
}
HELD = {
    "held by 8 lanes": dict(held=True, lanes=8, warps=1, rows=16, unroll=3),
    "held by 16 lanes": dict(held=True, lanes=16, warps=1, rows=8, unroll=4),
    "held by a warp": dict(held=True, warps=1, rows=4, unroll=2),
    "held by four warps": dict(held=True, warps=4, unroll=2),
}
WAYS = STREAMS | AGAIN | HELD


def longest(config) -> int:
    """Length of the longest row that a configuration takes."""
    return config.capacity * config.per_vector if config.held else 5000


# By default on kernels that other tests have, too; test_repeatable_bit_for_bit judges four more.
DEFAULT = [
    ("sm_90a", "a warp a row"),
    ("sm_100a", "eight warps"),
    ("sm_100a", "again, cluster of two"),
    ("sm_90a", "held by 8 lanes"),
    ("sm_100a", "held by 16 lanes"),
]


@pytest.mark.usefixtures("check_order")
@pytest.mark.parametrize(("arch", "way"), [
    case if case in DEFAULT else long(*case) for case in itertools.product(ARCHS, WAYS)
])  # fmt: skip
def test_every_way_to_divide_a_row(arch, way):
    """Rows off every boundary, some shorter than the warps that share them."""
    narrow = (torch.bfloat16, torch.float16)[list(WAYS).index(way) % 2]
    if way == "held by 8 lanes":  # its rows cannot have so many ends
        narrow = torch.float32
    dtype = torch.float32 if arch == "sm_90a" else narrow
    config = config_of(dtype, 5, **WAYS[way])
    for offset, length in ((0, min(2309, longest(config))), (3, min(1031, longest(config) - 9)), (1, 40)):
        logits = poisoned(cases.random_rows(3, length, dtype, seed=offset), offset, gap=5)
        cases.judge(*run(config, logits, 5, arch, seed=offset), logits, 5)


@pytest.mark.usefixtures("check_order")
@pytest.mark.parametrize(("arch", "dtype", "lanes", "length", "k", "renormalize"), [
    ("sm_90a", torch.bfloat16, 4, 32, 8, False),
    ("sm_100a", torch.float32, 8, 60, 3, True),
    ("sm_90a", torch.float16, 1, 8, 8, False),
    long("sm_90a", torch.bfloat16, 4, 32, 8, True),
    long("sm_100a", torch.float32, 8, 60, 3, False),
    long("sm_90a", torch.float16, 1, 8, 8, True),
])  # fmt: skip
def test_lanes_that_sort(arch, dtype, lanes, length, k, renormalize):
    """Hard rows, full and not, and more lanes than rows."""
    fields = dict(held=True, sorts=True, warps=1, lanes=lanes, rows=128 // lanes, edges=False)
    unroll = SORTED_ELEMENTS * dtype.itemsize // 16
    config = config_of(dtype, k, unroll=unroll, renormalize=renormalize, **fields)
    logits = torch.stack(list(cases.adversarial_rows(length, k, dtype).values()))
    cases.judge(*run(config, logits, k, arch), logits, k, renormalize)
    assert sim.last_report().launches[0].local_bytes == 0


@pytest.mark.parametrize("way", [long("again, a warp a row"), "again, cluster of two"])
def test_chunks_of_several_tiles(way):
    """Rows of more tiles than a lane has chunks; all of the top in one lane, at both ends, nowhere (equal, sorted)."""
    arch, dtype = ("sm_100a", torch.float16) if way == "again, cluster of two" else ("sm_90a", torch.float32)
    config = config_of(dtype, 20, **WAYS[way])
    length = 40 * config.tile_vectors * config.per_vector - 3
    row = cases.random_rows(1, length, dtype, seed=length)[0]
    one_lane = row.clone()
    one_lane[:: config.tile_vectors * config.per_vector // config.unroll] += 100.0
    at_ends = row.clone()
    at_ends[:7], at_ends[-9:] = 50.0, 50.0
    logits = poisoned(
        torch.stack([row, one_lane, at_ends, torch.full_like(row, 2.0), row.sort()[0]]), 3, gap=2
    )
    cases.judge(*run(config, logits, 20, arch), logits, 20)


@pytest.mark.parametrize(
    "way", ["eight warps", *map(long, ("cluster of two", "again, eight warps", "again, cluster of two"))]
)
def test_largest_k(way):
    for length in (128, 129, 3001):
        logits = poisoned(cases.random_rows(2, length, seed=length), 1, gap=2)
        for k in (128, 33):
            cases.judge(*run(config_of(torch.float32, k, **WAYS[way]), logits, k), logits, k)


def judge_adversarial(config, length, k, dtype, arch="sm_90a"):
    rows = cases.adversarial_rows(length, k, dtype)
    logits = torch.stack(list(rows.values()))
    probs, indices = run(config, logits, k, arch)
    for i, name in enumerate(rows):
        try:
            cases.judge(probs[i : i + 1], indices[i : i + 1], logits[i : i + 1], k)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize(
    ("arch", "way", "dtype"),
    [  # most on kernels of test_every_way_to_divide_a_row
        ("sm_90a", "a warp a row", torch.float32),
        ("sm_100a", "eight warps", torch.float16),
        long("sm_90a", "cluster of two", torch.float16),
        long("sm_90a", "again, eight warps", torch.float32),
        ("sm_100a", "again, cluster of two", torch.float16),
        ("sm_100a", "held by 16 lanes", torch.float16),
        ("sm_90a", "held by four warps", torch.bfloat16),
    ],
    ids=str,
)
def test_adversarial_rows(arch, way, dtype):
    """Ties, sorted rows (nothing is below the threshold), NaN, infinities, the ends of the number range."""
    config = config_of(dtype, 9, **WAYS[way])
    judge_adversarial(config, min(2600, longest(config) - 1), 9, dtype, arch)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_adversarial_rows_every_way(arch, way, dtype):
    edges = way != "held by 8 lanes" or dtype == torch.float32
    for k in (1, 5, 9, 20, 32):
        config = config_of(dtype, k, **WAYS[way], edges=edges)
        if not config.held or k <= HELD_MOST_K[config.lanes]:
            length = min(2600, longest(config))
            judge_adversarial(config, length if not edges else length - 1, k, dtype, arch)


@pytest.mark.long
def test_adversarial_rows_largest_k():
    judge_adversarial(config_of(torch.float32, 128, **WAYS["eight warps"]), 2900, 128, torch.float32)


@pytest.mark.parametrize("length", long_but((1, 3, 8, 33, 128), (1, 2, 3, 5, 8, 31, 33, 128)))
def test_k_is_the_row(length):
    """k = V: a sort. Rows that are shorter than a vector, all head and tail among them."""
    logits = cases.random_rows(5, length, seed=length)
    logits[1] = 0.0
    logits[2, length // 2] = torch.nan
    logits[3, : length // 2 + 1] = -torch.inf
    logits = poisoned(logits, offset=1, gap=1)
    for way in ("a warp a row", "held by a warp") if length <= 8 else ("eight warps",):
        cases.judge(*run(config_of(torch.float32, length, **WAYS[way]), logits, length), logits, length)


@pytest.mark.parametrize(
    "way", [long("a warp a row"), "eight warps", "held by 16 lanes", long("held by four warps")]
)
def test_renormalized(way):
    config = config_of(torch.float32, 6, **WAYS[way], renormalize=True)
    logits = cases.random_rows(4, 255, scale=20.0)
    logits[3] = -torch.inf
    logits[1, 7] = torch.nan
    probs, indices = run(config, logits, 6)
    cases.judge(probs, indices, logits, 6, renormalize=True)
    torch.testing.assert_close(probs[[0, 2]].sum(-1), torch.ones(2))


@pytest.mark.parametrize(
    "way", ["eight warps", "cluster of eight", "again, cluster of eight", "held by four warps"]
)
def test_repeatable_bit_for_bit(way):
    """Whatever the order in which warps run."""
    dtype = torch.bfloat16 if way == "held by four warps" else torch.float32
    config = config_of(dtype, 5, **WAYS[way])
    logits = cases.random_rows(3, min(3000, longest(config)), dtype)
    first = run(config, logits, 5, seed=1)
    cases.judge(*first, logits, 5)
    for seed in (2, 3):
        for got, expected in zip(run(config, logits, 5, seed=seed), first, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("way", ["two warps", "held by 16 lanes"])
def test_rows_without_edges(way):
    """Where all rows lie on boundaries, the code for their ends is left out; where they fill the registers, checks."""
    for full in (False, True) if way == "held by 16 lanes" else (False,):
        config = config_of(torch.bfloat16, 8, **WAYS[way], edges=False, full=full)
        logits = cases.random_rows(4, 512 if full else 136, torch.bfloat16)
        cases.judge(*run(config, logits, 8), logits, 8)


def chosen(dtypes, ks, renormalize):
    """Configurations that ``choose`` chooses, for problems of every kind."""
    return {
        choose_config(rows, length, k, str(dtype).removeprefix("torch."), edges, renormalize, 132)
        for rows in (1, 64, 1000, 20000)
        for length in (100, 400, 3000, 20000, 200000)
        for edges in (False, True)
        for dtype in dtypes
        for k in ks
    }


@pytest.mark.parametrize("arch", ["sm_90a", long("sm_100a")])
def test_nothing_spills(arch):
    for config in sorted(chosen([torch.float32], [8], False), key=repr)[9 * ARCHS.index(arch) :: 18]:
        (kernel,) = resources(topk_kernel.compiled(config, arch)).values()
        assert kernel.local_bytes == 0, config


@pytest.mark.parametrize("fields", [WAYS["a warp a CTA"], long(dict(warps=2, cluster=8, unroll=4))], ids=str)
def test_registers_are_as_many_as_asked_for(fields):
    """An SM gives them to as many warps in each of its quarters: more CTAs than that have fewer, and spill."""
    config = config_of(torch.float16, 9, **fields)
    (kernel,) = resources(topk_kernel.compiled(config, "sm_90a")).values()
    assert kernel.local_bytes == 0, config


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_spills_in_any_kernel(arch, dtype):
    for config in chosen([dtype], [5, 16, 32, 128], False) | chosen([dtype], [8, 64], True):
        (kernel,) = resources(topk_kernel.compiled(config, arch)).values()
        assert kernel.local_bytes == 0, config


def test_public_function_simulates_on_the_cpu():
    logits = cases.random_rows(6, 300).view(2, 3, 300)
    probs, indices = softmax_topk(logits, 5)
    assert probs.shape == indices.shape == (2, 3, 5)
    cases.judge(probs.view(6, 5), indices.view(6, 5), logits.view(6, 300), 5)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_long_rows(arch, dtype):
    """Every configuration that ``choose`` chooses for these. 2**20 columns run on a GPU only: an hour here."""
    for rows, length, k in ((1, 2**17, 128), (2, 129280, 8), (3, 50257, 10), (9, 4096, 64)):
        logits = cases.random_rows(rows, length, dtype)
        config = choose_config(rows, length, k, str(dtype).removeprefix("torch."), True, False, 132)
        cases.judge(*run(config, logits, k, arch), logits, k)
