"""softmax_topk's kernel, compiled for both architectures, executed in the simulator: every way to divide a row."""

import pytest
import topk_cases as cases
import torch

from warpspec import sim
from warpspec.common.compile import resources
from warpspec.softmax.topk import softmax_topk
from warpspec.softmax.topk.choose import choose
from warpspec.softmax.topk.config import TopkConfig, smallest_capacity
from warpspec.softmax.topk.launch import compiled

ARCHS = ("sm_90a", "sm_100a")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POISON_INDEX = -7


def config_of(dtype, k, **fields):
    return TopkConfig(dtype=str(dtype).removeprefix("torch."), k_capacity=smallest_capacity(k), **fields)


def run(config, logits, k, arch="sm_90a", seed=0):
    """(probs, indices) of the kernel on logits (ROW, COLUMN); outputs poisoned before."""
    probs = torch.full((logits.shape[0], k), torch.nan)
    indices = torch.full((logits.shape[0], k), POISON_INDEX, dtype=torch.int32)
    sim.run(compiled(config, arch), logits, probs, indices, None, seed=seed)
    return probs, indices


def poisoned(logits, offset, gap, poison=torch.nan):
    """The same rows as a view: ``offset`` elements into a buffer, ``gap`` elements apart, poison everywhere else."""
    rows, length = logits.shape
    buffer = torch.full((offset + rows * (length + gap) + 8,), poison, dtype=logits.dtype)
    view = buffer.as_strided((rows, length), (length + gap, 1), offset)
    view.copy_(logits)
    return view


# How a row may be divided: warps, CTAs of a cluster, rows of a CTA, vectors of a lane.
WAYS = {
    "a warp a row": dict(rows=4, warps=1, unroll=2),
    "a warp a CTA": dict(rows=1, warps=1, unroll=4),
    "two warps": dict(warps=2, unroll=1),
    "eight warps": dict(warps=8, unroll=2),
    "sixteen warps": dict(warps=16, unroll=1),
    "cluster of two": dict(warps=4, cluster=2, unroll=2),
    "cluster of eight": dict(warps=2, cluster=8, unroll=1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_way_to_divide_a_row(arch, way):
    """Rows of many lengths, off every boundary, some shorter than the warps that share them."""
    for dtype, length, k in ((torch.float32, 1031, 7), (torch.bfloat16, 2309, 32), (torch.float16, 40, 1)):
        config = config_of(dtype, k, **WAYS[way])
        for offset in (0, 3):
            logits = poisoned(cases.random_rows(3, length, dtype, seed=offset), offset, gap=5)
            cases.judge(*run(config, logits, k, arch, seed=offset), logits, k)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("way", ["eight warps", "sixteen warps", "cluster of two"])
def test_largest_k(arch, way):
    for length in (128, 129, 3001):
        logits = poisoned(cases.random_rows(2, length, seed=length), 1, gap=2)
        for k in (128, 33):
            cases.judge(*run(config_of(torch.float32, k, **WAYS[way]), logits, k, arch), logits, k)


@pytest.mark.parametrize("way", ["a warp a row", "eight warps", "cluster of two"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adversarial_rows(way, dtype):
    """Ties, sorted rows (nothing is below the threshold), NaN, infinities, the ends of the number range."""
    for length, k in ((777, 9), (2600, 32)):
        rows = cases.adversarial_rows(length, k, dtype)
        logits = torch.stack(list(rows.values()))
        probs, indices = run(config_of(dtype, k, **WAYS[way]), logits, k)
        for i, name in enumerate(rows):
            try:
                cases.judge(probs[i : i + 1], indices[i : i + 1], logits[i : i + 1], k)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def test_adversarial_rows_largest_k():
    rows = cases.adversarial_rows(2900, 128)
    logits = torch.stack(list(rows.values()))
    cases.judge(*run(config_of(torch.float32, 128, **WAYS["eight warps"]), logits, 128), logits, 128)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 31, 32, 33, 127, 128])
def test_k_is_the_row(length):
    """k = V: a sort. Rows that are shorter than a vector, all head and tail among them."""
    rows = 5
    logits = cases.random_rows(rows, length, seed=length)
    logits[1] = 0.0
    logits[2, length // 2] = torch.nan
    logits[3, : length // 2 + 1] = -torch.inf
    logits = poisoned(logits, offset=1, gap=1)
    ways = ("a warp a row", "two warps") if length <= 32 else ("eight warps",)
    for way in ways:
        cases.judge(*run(config_of(torch.float32, length, **WAYS[way]), logits, length), logits, length)


def test_renormalized():
    for dtype in DTYPES:
        logits = cases.random_rows(4, 515, dtype, scale=20.0)
        logits[3] = -torch.inf
        logits[1, 7] = torch.nan
        config = config_of(dtype, 6, **WAYS["two warps"], renormalize=True)
        probs, indices = run(config, logits, 6)
        cases.judge(probs, indices, logits, 6, renormalize=True)
        torch.testing.assert_close(probs[[0, 2]].sum(-1), torch.ones(2))


@pytest.mark.parametrize("way", ["a warp a row", "eight warps", "cluster of eight"])
def test_repeatable_bit_for_bit(way):
    """Whatever the order in which warps run."""
    logits = cases.random_rows(3, 4099, torch.bfloat16)
    config = config_of(torch.bfloat16, 20, **WAYS[way])
    first = run(config, logits, 20, seed=1)
    for seed in (2, 3):
        for got, expected in zip(run(config, logits, 20, seed=seed), first, strict=True):
            assert torch.equal(got, expected)


def test_aligned_rows_leave_the_edges_out():
    """Without edges nothing is read twice, nothing left out."""
    for dtype in DTYPES:
        logits = cases.random_rows(4, 1024, dtype)
        config = config_of(dtype, 8, **WAYS["two warps"], edges=False)
        cases.judge(*run(config, logits, 8), logits, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [32, 128])
@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_spills(arch, k, dtype):
    """Every kernel that ``choose`` can choose has its state in registers."""
    seen = set()
    for rows in (1, 64, 1000, 20000):
        for length in (100, 400, 3000, 20000, 200000):
            seen.add(choose(rows, length, k, str(dtype).removeprefix("torch."), True, False, 132))
    for config in seen:
        (kernel,) = resources(compiled(config, arch)).values()
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
    """Every configuration that ``choose`` chooses for these, at 2**20 columns too."""
    for rows, length, k in ((1, 2**20, 128), (2, 129280, 8), (3, 50257, 10), (9, 4096, 64)):
        logits = cases.random_rows(rows, length, dtype)
        config = choose(rows, length, k, str(dtype).removeprefix("torch."), True, False, 132)
        cases.judge(*run(config, logits, k, arch), logits, k)
