"""index_topk: the definition against torch's sort, the kernel (simulated) against the definition."""

import pytest
import torch
from helpers.index_cases import KINDS, rows
from helpers.suites import long, long_but

from warpspec.common.compile import resources
from warpspec.common.launch import simulating
from warpspec.latent.indexer import index_topk, problem
from warpspec.latent.indexer.config import SelectConfig, StreamConfig
from warpspec.latent.indexer.device.select import SELECT
from warpspec.latent.indexer.kernels import INDEX
from warpspec.latent.indexer.sm100.config import Sm100ScoresConfig


@pytest.fixture(params=["sm_100a", long("sm_90a")])
def simulated(request):
    with simulating(request.param):
        yield request.param


@pytest.mark.parametrize("kind", KINDS)
def test_definition(kind):
    """The selection is that of torch.sort of (value, index), in fp64."""
    logits = rows(kind, 5, 300)
    lengths = torch.tensor([300, 0, 1, 77, 200], dtype=torch.int32)
    slots, counts = index_topk(logits, 40, lengths=lengths, backend="reference")
    for row, length, got, count in zip(
        logits, lengths.tolist(), slots.tolist(), counts.tolist(), strict=True
    ):
        value = [float("inf") if x != x else x for x in row[:length].tolist()]
        nan = [x != x for x in row[:length].tolist()]
        order = sorted(
            (i for i in range(length) if value[i] != -torch.inf), key=lambda i: (not nan[i], -value[i], i)
        )
        wanted = sorted(order[:40])
        assert count == len(wanted) and got == wanted + [-1] * (40 - count)


def both(logits, k, **options):
    got = index_topk(logits, k, backend="sim", **options)
    wanted = index_topk(logits, k, backend="reference", **options)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("kind", long_but(("normal", "equal"), KINDS))
def test_kernel(simulated, kind):
    """Rows of any kind, k below, at and above their length; more than one chunk; strides."""
    for k, length in ((512, 4000), (2048, 2048), (3, 40000), (1, 100), (9, 3000), (1, 1)):
        wide = torch.full((2, length + 5), torch.inf)
        wide[:, 3 : 3 + length] = rows(kind, 2, length, seed=k)
        lengths = torch.tensor([length, max(0, length - 9)], dtype=torch.int32)
        both(wide[:, 3 : 3 + length], k, lengths=lengths)


def test_splits(check_order, simulated):
    """Few long rows are split over CTAs: lengths that end within a split and before others, equal logits on both sides
    of a split's end, NaN, fewer than k that count."""
    logits = rows("special", 4, 70000, seed=3)
    logits[0, 17000:18000] = torch.inf
    logits[3] = -torch.inf
    logits[3, 69999] = 1.0
    lengths = torch.tensor([70000, 20000, 0, 70000], dtype=torch.int32)
    table = torch.randperm(4 * 70, generator=torch.Generator().manual_seed(0)).view(4, 70).to(torch.int32)
    requests = torch.arange(4, dtype=torch.int32)
    both(logits, 900, lengths=lengths, page_table=table, requests=requests, page_size=1000)


def test_pages(simulated, monkeypatch):
    """Slots by page table; pages and requests that are not there give -1 and still count, as do pages of which no row
    has a slot: times the page size, int32 would make the first one of it."""
    monkeypatch.setattr(problem, "check_range", lambda *arguments: None)  # as on a GPU
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(20, generator=generator).view(2, 10).to(torch.int32)
    table[1, 3], table[1, 5], table[0, 0] = -1, 2**27, 2**31 - 1
    requests = torch.tensor([1, 0, 2], dtype=torch.int32)
    both(rows("normal", 3, 320), 100, page_table=table, requests=requests, page_size=32)
    both(rows("normal", 0, 320), 100, page_table=table, requests=requests[:0], page_size=32)


@pytest.mark.parametrize(
    ("kernel", "config", "arch"),
    [
        (SELECT, SelectConfig(True, False), "sm_100a"),
        (INDEX.kernels["sm100"].stream, StreamConfig.of(Sm100ScoresConfig, "mxfp4", 8, 64), "sm_100a"),
        long(SELECT, SelectConfig(True, False), "sm_90a"),
        long(INDEX.kernels["sm100"].stream, StreamConfig.of(Sm100ScoresConfig, "fp8", 64, 64), "sm_100a"),
    ],
)
def test_nothing_spills(kernel, config, arch):
    for found in resources(kernel.compiled(config, arch)).values():
        assert found.local_bytes == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(2, 8).half()}, TypeError, "logits: dtype"),
        ({"logits": torch.zeros(8)}, ValueError, "logits: shape"),
        ({"k": 0}, ValueError, r"k: must be within 1..2048, got 0"),
        ({"k": 2049}, ValueError, "k: must be within"),
        ({"k": 2.0}, TypeError, "k: must be an int"),
        ({"lengths": torch.tensor([3, 9]).int()}, ValueError, "lengths: .* got 9 at index 1"),
        ({"lengths": torch.tensor([3, 9])}, TypeError, "lengths: dtype"),
        ({"page_size": 4}, ValueError, "must be given together, got page_size only"),
        (
            {"page_table": torch.zeros(1, 2).int(), "requests": torch.tensor([0, 1]).int(), "page_size": 4},
            ValueError,
            "requests: .* got 1 at index 1",
        ),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = {"logits": torch.zeros(2, 8), "k": 3, "backend": "reference"} | change
    with pytest.raises(error, match=message):
        index_topk(**arguments)
