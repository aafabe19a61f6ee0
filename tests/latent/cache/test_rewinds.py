"""``compress`` in any pattern of calls: any starts, lengths and rewinds, against all tokens at once.

A ``Truth`` knows by the contract alone which tokens a request has, from where on, and how far back a call may start.
Each entry that a call makes must be the definition's, or NaN where it needs a token that the request does not have.
"""

import random

import pytest
import torch
from helpers.cache_cases import PAGE_SIZE, Compressor, Run, expected_entries
from helpers.suites import long

from warpspec.common.launch import SIMULATED
from warpspec.latent.cache import table_slots
from warpspec.latent.cache.reference import finish_entry

REQUESTS, TOKENS = 2, 96
STRIDES = {"csa": 4, "hca": 8}
TOLERANCE = 5e-3  # of an entry's norm: three roundings to bf16


class Truth:
    """A request that has its tokens at positions ``known`` to ``end`` - 1."""

    def __init__(self):
        self.known = self.end = self.furthest = 0

    def may_start(self, start: int, max_draft: int) -> bool:
        return start == 0 or max(self.known, self.furthest - max_draft) <= start <= self.end

    def write(self, start: int, count: int, max_draft: int) -> None:
        if start == 0 or not self.may_start(start, max_draft):
            self.known, self.furthest = start, 0
        self.end = start + count
        self.furthest = max(self.furthest, self.end)


def test_a_token_is_folded_once():
    """Taken back by one call what another call before the last wrote."""
    for max_draft in (2, 3):
        run = Run.start(Compressor.random("hca", 1, 16, stride=8), "bf16", max_draft)
        for start, count in ((0, 5), (5, 1), (4, 12)):
            run.lengths.fill_(start)
            run.call([count], backend="reference")
        assert torch.equal(run.entries(0), grow_at_once(run).entries(0))


@pytest.mark.parametrize(
    ("kind", "backend"), [("csa", "reference"), ("hca", "reference"), ("csa", "sim"), long("hca", "sim")]
)
def test_drafts_are_counted_from_the_furthest(kind, backend):
    """A start within max_draft of the last call's end, but not of the furthest: the tokens before it have been folded,
    or written over."""
    run = Run.start(Compressor.random(kind, 1, 40, stride=STRIDES[kind], dim=128), "bf16", max_draft=2)
    run.call([20], [18], backend=backend)
    run.call([1], [0], backend=backend)
    run.lengths.fill_(17)
    with pytest.raises(ValueError, match=r"starts: .* 19 tokens, of which the first 18 .* 18\.\.19, got 17"):
        run.call([7], backend=backend)
    run.call([23], backend=backend, checked=False)
    stride = STRIDES[kind]
    made = run.pool.read(run.entry_slots(0))[16 // stride :]
    lost = 2 if kind == "csa" else 1
    assert made[:lost].isnan().all() and made[lost:].isfinite().all() and len(made) > lost


@pytest.mark.parametrize("schedules", [12, long(1500)])
@pytest.mark.parametrize("kind", STRIDES)
def test_reference(kind, schedules):
    for seed in range(schedules):
        fuzz(kind, random.Random(seed).choice((0, 1, 2, 3, 5, 9, 20)), seed, calls=12, backend="reference")


SIMULATED_CASES = [
    ("sm_100a", "csa", 2, 2),
    long("sm_90a", "hca", 9, 1),
    long("sm_100a", "hca", 2, 2),
    *(long(arch, kind, d, 20) for arch in SIMULATED for kind in STRIDES for d in (0, 1, 3, 9)),
]


@pytest.mark.usefixtures("check_order")
@pytest.mark.parametrize(("arch", "kind", "max_draft", "schedules"), SIMULATED_CASES)
def test_kernel(simulate_as, arch, kind, max_draft, schedules):
    """The kernel's entries, and its count of tokens, as the reference has it."""
    simulate_as(arch)
    for seed in range(schedules):
        got, wanted = (fuzz(kind, max_draft, seed, calls=9, backend=b) for b in ("sim", "reference"))
        assert torch.equal(got.tail.progress[1:], wanted.tail.progress[1:]), f"seed {seed}"


def fuzz(kind: str, max_draft: int, seed: int, *, calls: int, backend: str) -> Run:
    """A schedule of calls, each entry checked when it is made. Where a start is impossible, ``compress`` refuses it
    and changes nothing; then it is called as on a GPU, where the host does not see it."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    compressor = Compressor.random(kind, REQUESTS, TOKENS, stride=STRIDES[kind], dim=128, seed=seed)
    run = Run.start(compressor, "bf16", max_draft)
    truths = [Truth() for _ in range(REQUESTS)]
    schedule = []
    for _ in range(calls):
        starts = [draw_start(draw, truth, max_draft) for truth in truths]
        counts = [draw_count(draw, start, compressor.stride, max_draft) for start in starts]
        schedule.append(list(zip(starts, counts, strict=True)))
        for i, (start, count) in enumerate(schedule[-1]):
            fresh = torch.randn(compressor.content_gate[i, start : start + count].shape, generator=generator)
            compressor.content_gate[i, start : start + count] = fresh * torch.tensor([1.0, 3.0])[:, None]
        run.lengths[:] = torch.tensor(starts)
        pairs = list(zip(truths, starts, counts, strict=True))
        possible = all(t.may_start(start, max_draft) for t, start, count in pairs if count)
        if not possible:
            before = run.tail.progress.clone()
            with pytest.raises(ValueError, match="starts: request"):
                run.call(counts, backend=backend)
            assert torch.equal(run.tail.progress, before)
        run.call(counts, backend=backend, checked=possible)
        for i, (truth, start, count) in enumerate(pairs):
            if count:
                truth.write(start, count, max_draft)
                check_entries(run, i, truth, start, f"{kind}, max_draft {max_draft}: {schedule}, request {i}")
    for i, truth in enumerate(truths):
        if truth.known == 0 and truth.end:
            run.lengths[i] = truth.end
            at_once = grow_at_once(run, backend)
            assert torch.equal(run.entries(i), at_once.entries(i)), schedule
    return run


def draw_start(draw: random.Random, truth: Truth, max_draft: int) -> int:
    """Mostly one that is possible; of these, and of the others, those next to the bounds most often."""
    kind = draw.random()
    if kind < 0.05 or truth.end > TOKENS - 10:
        return 0
    earliest = max(truth.known, truth.furthest - max_draft)
    if kind < 0.2:
        return draw.choice((max(earliest - 1, 0), truth.end + 1, draw.randrange(TOKENS - 10)))
    return draw.choice((truth.end, earliest, draw.randint(earliest, truth.end)))


def draw_count(draw: random.Random, start: int, stride: int, max_draft: int) -> int:
    """No tokens, a step of speculative decoding, or a chunk."""
    most = draw.choice((0, 1 + max_draft, 1 + max_draft, 1, 3 * stride))
    return min(draw.randint(min(most, 1), most), TOKENS - start)


def check_entries(run: Run, request: int, truth: Truth, start: int, what: str) -> None:
    """The entries that a call from start on has completed."""
    compressor = run.compressor
    stride = compressor.stride
    reach = stride * (2 if compressor.kind == "csa" else 1)
    entries = torch.arange(start // stride, truth.end // stride)
    slots = table_slots(run.table[request : request + 1], entries[None], PAGE_SIZE)[0]
    pooled = expected_entries(compressor, request, truth.end).float()
    for entry, got in zip(entries.tolist(), run.pool.read(slots), strict=True):
        first = entry * stride
        if max(first + stride - reach, 0) < truth.known:
            assert got.isnan().all(), f"{what}: entry {entry} has no right to be"
            continue
        wanted = finish_entry(
            pooled[entry], first, compressor.cos_sin, compressor.weight, 1e-6, False
        ).float()
        error = float((got - wanted).norm() / wanted.norm())
        assert error < TOLERANCE, f"{what}: entry {entry} is {error:.1%} off"


def grow_at_once(run: Run, backend: str = "reference") -> Run:
    """A run whose requests get in one call all tokens that run's have."""
    again = Run.start(run.compressor, run.pool.format, run.tail.max_draft)
    again.call(run.lengths.tolist(), backend=backend)
    return again
