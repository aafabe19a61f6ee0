"""Into which pieces the key tiles of attention's gradients are cut: judged by simulated list scheduling, without a
kernel; and the device chooses what the host's arithmetic says."""

import heapq
import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch

from warpspec.common.hardware import gpu_model
from warpspec.common.launch import Target, simulating
from warpspec.fmha.backward import call, guesses, launch, lengths, pieces, rounds, runs, schedule, sections
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.schedule import Order
from warpspec.fmha.operands import Operands, Options
from warpspec.fmha.problem import AttentionProblem

WANTED = (True, True, True, False, False)
H200 = Target.of_model(gpu_model("H200"))


def busiest(ctas: list[float], sms: int) -> float:
    """When the last SM is done, if each takes the next CTA as soon as it is free."""
    ends = [0.0] * sms
    for time in ctas:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


def steps_of(length: int, group: int) -> list[int]:
    """Steps of the key tiles of a causal request at D 128: 128 keys, 64 queries."""
    return [(-(-length // 64) - key // 64) * group for key in range(0, length, 128)]


def limits_of(length: pieces.PieceLength, steps: list[int]) -> list[int]:
    """The values of L that the device tries, but the last, which cuts nothing."""
    lanes, total = range(pieces.LENGTHS - 1), sum(steps)
    return [min(max(int(pieces.limit_of(length, total, i)) + 1, i + 1), max(steps)) for i in lanes]


def counts_of(steps: list[int], limit: int) -> list[int]:
    return [max(-(-count // limit), 1) for count in steps]


def predicted(length: pieces.PieceLength, steps: list[int], limit: int) -> float:
    counts = counts_of(steps, limit)
    sizes = [count / parts for count, parts in zip(steps, counts, strict=True)]
    long = [(parts, size) for parts, size in zip(counts, sizes, strict=True) if size >= pieces.LONG * limit]
    number, total = sum(parts for parts, _ in long), sum(parts * size for parts, size in long)
    load = pieces.Load(sum(counts), sum(n for n in counts if n > 1), number, total, max(sizes))
    return pieces.expected_steps(length, sum(steps), load)


def dealt_steps(length: pieces.PieceLength, heads: int, steps: list[int], limit: int, way: int = 0) -> float:
    return lengths.dealt_steps(length, heads, steps, limit, way)


def simulated(length: pieces.PieceLength, steps: list[int], limit: int, rows: list[int], sms: int) -> float:
    """Steps' time of all that is cut so. rows: of each section, in which the longest pieces come first."""
    counts = counts_of(steps, limit)
    sizes = [-(-count // parts) for count, parts in zip(steps, counts, strict=True) for _ in range(parts)]
    sizes.sort(reverse=True)
    ctas = [size + length.start for section in rows for size in sizes for _ in range(section)]
    return busiest(ctas, sms) + length.cost * sum(n for n in counts if n > 1)


def test_packed_requests_take_little_more_than_the_best_pieces():
    draw, sms, ratios, dealt, uncut = random.Random(5), 132, [], [], []
    for _ in range(60):
        heads, group = draw.choice((1, 2, 4, 8)), draw.choice((1, 4, 8, 16))
        most = draw.choice((200, 1000, 3000))
        steps = [n for _ in range(draw.randint(1, 9)) for n in steps_of(draw.randint(1, most), group)]
        section = draw.choice((heads, max(heads // 2, 1)))
        length = pieces.PieceLength(2.2, heads / sms, 0.03 * heads, section / heads, 10**6)
        mean = sum(steps) * heads / sms
        others = [max(round(mean * 1.1**i), 1) for i in range(-20, 20)]
        times = {
            limit: simulated(length, steps, limit, [section] * (heads // section), sms)
            for limit in (*limits_of(length, steps), max(steps), *others)
        }
        own = [*limits_of(length, steps), max(steps)]
        chosen = min(own, key=lambda limit: predicted(length, steps, limit))
        ratios.append(times[chosen] / min(times.values()))
        chosen = min(own, key=lambda limit: dealt_steps(length, heads, steps, limit))
        dealt.append(times[chosen] / min(times.values()))
        uncut.append(times[max(steps)] / min(times.values()))
    assert statistics.geometric_mean(ratios) < 1.05 and max(ratios) < 1.35
    assert statistics.geometric_mean(dealt) < 1.006 and max(dealt) < 1.06
    assert statistics.geometric_mean(uncut) > 1.5  # or the draws say nothing


def last_cut(
    length: pieces.PieceLength, steps: list[int], limit: int, heads: int, cut: int, sms: int
) -> float:
    """Steps' time if the key tiles of the last ``cut`` of the KV heads are cut, each a section."""
    counts = counts_of(steps, limit)
    sizes = [-(-count // parts) for count, parts in zip(steps, counts, strict=True) for _ in range(parts)]
    ctas = sorted(steps, reverse=True) * (heads - cut) + sorted(sizes, reverse=True) * cut
    left = length.cost * cut / heads * sum(n for n in counts if n > 1)
    return busiest([size + length.start for size in ctas], sms) + left


def test_whole_tiles_in_the_first_sections():
    """Simulated: where the device may leave the key tiles of all but the last KV heads whole, it takes less time, and
    little more than the best way."""
    draw, sms, gains, losses = random.Random(8), 132, [], []
    for _ in range(25):
        heads, group = draw.choice((4, 8)), draw.choice((2, 4, 8))
        steps = [n for _ in range(draw.randint(2, 8)) for n in steps_of(draw.randint(300, 4000), group)]
        length = pieces.PieceLength(1.3, heads / sms, 0.03 * heads, 1 / heads, 3 * sms // heads)
        ways = itertools.product((*limits_of(length, steps), max(steps)), range(lengths.WAYS))
        found = {which: dealt_steps(length, heads, steps, *which) for which in ways}
        times = {
            (limit, way): last_cut(length, steps, limit, heads, way or heads, sms)
            for (limit, way), time in found.items()
            if time < math.inf
        }
        equal = min((which for which in times if not which[1]), key=found.__getitem__)
        chosen = min(times, key=found.__getitem__)
        gains.append(times[chosen] / times[equal])
        losses.append(times[chosen] / min(times.values()))
    assert statistics.geometric_mean(gains) < 0.99 and max(gains) < 1.05
    assert statistics.geometric_mean(losses) < 1.02


def test_equal_requests_take_little_more_than_the_best_pieces():
    draw, ratios, uncut = random.Random(6), [], []
    for _ in range(40):
        heads, group, batch = draw.choice((1, 2, 4, 8)), draw.choice((1, 4, 8, 16)), draw.choice((1, 1, 2, 4))
        sizes = (batch, draw.randint(100, 2500))
        q, k, v = (
            torch.empty(*sizes, n, 128, dtype=torch.bfloat16, device="meta")
            for n in (heads * group, heads, heads)
        )
        problem = BackwardProblem.check(
            AttentionProblem.of(q, k, v, causal=True, return_lse=True, memory=False), ("q", "k", "v")
        )
        config = replace(launch.plan_main(problem, H200), heads_inside=False)
        steps = sorted(schedule.tile_steps(problem, config), reverse=True)
        step, rows = schedule.STEP_US[128], heads * batch
        cost = 4 * 128 * 128 * 4 * rows / schedule.JOIN_BYTES_US / step
        length = pieces.PieceLength(schedule.CTA_US / step, 0.0, cost, 1.0, 0)

        times = {}
        for n in range(1, 33):
            section = sections.section_of(problem, config, H200, sections.ctas_of(problem, config, steps, n))
            together = [min(section, rows - first) for first in range(0, rows, section)]
            times[n] = simulated(length, steps, -(-steps[0] // n), together, 132)
        chosen = schedule.choose_pieces(problem, config, steps, H200)
        ratios.append(times[chosen] / min(times.values()))
        uncut.append(times[1] / min(times.values()))
    assert statistics.geometric_mean(ratios) < 1.03 and max(ratios) < 1.25
    assert statistics.geometric_mean(uncut) > 1.3


def equal_tiles(tiles: int, steps: int, rows: int, pieces: int, whole: int) -> float:
    """Microseconds of rows of this many key tiles of this many steps, D 128, if those of the rows after ``whole`` are
    cut into pieces."""
    part, step = tiles * pieces * (rows - whole), schedule.STEP_US[128]
    ctas = [steps] * (tiles * whole) + [-(-steps // pieces)] * part
    join = 4 * 128 * 128 * 4 / schedule.JOIN_BYTES_US * part + schedule.JOIN_US
    return busiest([n * step + schedule.CTA_US for n in ctas], 132) + (join if pieces > 1 else 0.0)


def test_sms_that_are_free_together_are_dealt_what_each_would_take():
    draw = random.Random(1)
    for _ in range(100):
        times = draw.choices((3, 5, 8), k=draw.randint(1, 9))
        rows, section, sms = draw.randint(1, 12), draw.randint(1, 5), draw.randint(1, 20)
        grouped, alone = rounds.idle(sms), [0.0] * sms
        rounds.deal(grouped, times, rows, section)
        for first in range(0, rows, section):
            for time in times:
                for _ in range(min(section, rows - first)):
                    heapq.heapreplace(alone, alone[0] + time)
        assert sorted(time for time, count in grouped for _ in range(count)) == sorted(alone)


def test_the_last_rows_alone_are_cut_where_rounds_are_few():
    """The choice takes little more than the best number of rows and of pieces."""
    draw, ratios, cut = random.Random(8), [], 0
    for _ in range(8):
        heads, batch, length = draw.choice((2, 8, 16)), draw.choice((1, 2, 5)), draw.randint(1500, 4000)
        q, k, v = (
            torch.empty(batch, length, n, 128, dtype=torch.bfloat16, device="meta")
            for n in (heads * 2, heads, heads)
        )
        problem = BackwardProblem.check(
            AttentionProblem.of(q, k, v, return_lse=True, memory=False), ("q", "k", "v")
        )
        shape = (-(-length // 128), 2 * -(-length // 64), heads * batch)
        order = schedule.choose_order(problem, launch.plan_main(problem, H200), H200)
        assert order.section == 1
        cut += order.whole > 0
        best = min(equal_tiles(*shape, n, whole) for n in range(1, 13) for whole in range(shape[2]))
        ratios.append(equal_tiles(*shape, order.pieces, order.whole) / best)
    assert statistics.geometric_mean(ratios) < 1.02 and max(ratios) < 1.06 and cut >= 2


def requests_of(lengths: list[int], group: int) -> list[runs.Request]:
    """Requests whose queries all see all of their keys, at D 128."""
    return [runs.Request(-(-length // 64) * group, -(-length // 128)) for length in lengths]


def equal_pieces(length: pieces.PieceLength, requests: list[runs.Request]) -> dict[int, float]:
    """The values of L that the device tries, and the predicted time of each."""
    steps = [steps for steps, tiles in requests for _ in range(tiles)]
    return {limit: predicted(length, steps, limit) for limit in (*limits_of(length, steps), max(steps))}


def sizes_of(requests: list[runs.Request], layout: runs.Layout, rows: int) -> list[int]:
    """Steps of all CTAs in order. Every key tile of every row must be there once."""
    sizes, seen = [], {number: 0 for number, request in enumerate(requests) if request.tiles}
    ends = [run.first_cta for run in layout.runs[1:]] + [layout.ctas]
    for run, end in zip(layout.runs, ends, strict=True):
        assert run.first_cta == len(sizes) and run.first_tile == seen[run.request]
        count, steps = (end - run.first_cta) // run.pieces, requests[run.request].steps
        seen[run.request] += count
        sizes += [-(-steps // run.pieces)] * (count * run.pieces)
    assert all(seen[number] == requests[number].tiles * rows for number in seen)
    return sizes


def test_pieces_that_shrink_end_together():
    """Simulated: drawn requests whose queries see all keys, laid out as the device does that deals candidates, take
    less than with pieces of one length, and little more anywhere. All key tiles are dealt, and no more pieces than
    there is room for."""
    draw, sms, ratios = random.Random(11), 132, []
    for _ in range(40):
        rows, group = draw.choice((1, 2, 4, 8)), draw.choice((2, 4, 8))
        lengths = [draw.randint(1, draw.choice((600, 2000, 5000))) for _ in range(draw.randint(1, 8))]
        requests = requests_of(lengths, group)
        length = pieces.PieceLength(1.3, rows / sms, 0.05 * rows, 1.0, 3 * sms)
        equal, numbers = equal_pieces(length, requests), range(runs.CANDIDATES)
        chosen = min(numbers, key=lambda number: runs.dealt_steps(length, requests, rows, number))
        kept, least = runs.candidate(chosen)
        layouts = [
            runs.lay_out(requests, rows, sms, *limits, length.further)
            for limits in ((min(equal, key=equal.__getitem__), 0.0), (least * length.start, kept * sms))
        ]
        times = []
        for layout in layouts:
            sizes = sizes_of(requests, layout, rows)
            assert len(sizes) - sum(request.tiles * rows for request in requests) <= length.further
            assert layout.cut <= 2 * length.further
            assert len(layout.runs) <= runs.most_runs(len(requests), layout.ctas, sms)
            times.append(busiest([size + length.start for size in sizes], sms) + 0.05 * layout.cut)
        if sum(steps * tiles for steps, tiles in requests) * length.share >= runs.DEALT_STEPS:
            ratios.append(times[1] / times[0])
    assert statistics.geometric_mean(ratios) < 0.97 and max(ratios) < 1.06
    assert sum(ratio < 0.95 for ratio in ratios) > 3


@pytest.mark.parametrize(
    "seed", [5, *(pytest.param(seed, marks=pytest.mark.long) for seed in (*range(5), 6, 7))]
)
def test_the_device_lays_runs_out_as_the_host(seed, monkeypatch, check_order):
    """Random requests whose queries see all keys, on a simulated GPU of a few SMs; only the first kernel runs."""
    draw = random.Random(seed)
    lengths = [draw.randint(0, draw.choice((200, 2500))) for _ in range(draw.randint(2, 6))]
    heads, sms = draw.choice((1, 2)), draw.choice((8, 20))
    prepared, made = first_kernel(lengths, heads, sms, monkeypatch, causal=False)
    table = next(t for t in made if t is not None and t.shape[1:] == (6,) and t.dtype == torch.int32)
    ctas, count = table[-1, :2].tolist()
    requests, length = requests_of(lengths, 4 // heads), prepared.length
    if sum(steps * tiles for steps, tiles in requests) * length.share < runs.DEALT_STEPS:
        times = equal_pieces(length, requests)
        layouts = {limit: runs.lay_out(requests, heads, sms, limit, 0.0, length.further) for limit in times}
        times["shrinking"] = runs.shrinking_steps(length, requests, heads)
        layouts["shrinking"] = runs.lay_out(
            requests, heads, sms, runs.LEAST * length.start, runs.KEPT * sms, length.further
        )
        near = 1.001
    else:
        numbers, near = range(runs.CANDIDATES), 1 + 1.01 * runs.HORIZON / runs.TIMES
        times = {number: runs.dealt_steps(length, requests, heads, number) for number in numbers}
        layouts = {
            number: runs.lay_out(requests, heads, sms, least * length.start, kept * sms, length.further)
            for number, (kept, least) in zip(numbers, map(runs.candidate, numbers), strict=True)
        }
    good = [layouts[key] for key, time in times.items() if time <= min(times.values()) * near]
    found = ([runs.Run(*run) for run in table[:count].tolist()], ctas)
    assert found in [(layout.runs, layout.ctas) for layout in good]
    assert any(layout not in good for layout in layouts.values())  # or the call says nothing


CHOSEN = {seed: [random.Random(seed).randint(1, 900) for _ in range(1 + seed)] for seed in range(6)}


@pytest.mark.parametrize(
    ("lengths_", "heads", "sms"),
    [
        ((1400, 130), 1, 6),  # enough to do for the device to deal pieces, of which the formula chooses others
        ((82, 6, 1275, 432), 4, 6),  # whole tiles in the first sections
        *(pytest.param(CHOSEN[seed], 1 + seed % 2, (20, 40)[seed % 2], marks=pytest.mark.long) for seed in CHOSEN),
        pytest.param((2000,), 1, 10, marks=pytest.mark.long),
        pytest.param((1800, 130), 1, 9, marks=pytest.mark.long),
        pytest.param((700, 900), 4, 9, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_the_device_chooses_as_the_host(lengths_, heads, sms, monkeypatch, check_order):
    """Requests on a simulated GPU of a few SMs; only the first kernel runs. A section is one of four KV heads, or all
    of fewer."""
    prepared, made = first_kernel(lengths_, heads, sms, monkeypatch, causal=True)
    found = next(t for t in made if t is not None and t.shape[1:] == (2,) and t.dtype == torch.int32)[
        :, 1
    ].tolist()
    steps, length = [n for rows in lengths_ for n in steps_of(rows, 4 // heads)], prepared.length
    steps += [0] * (len(found) - len(steps))
    limits = [*limits_of(length, steps), max(steps)]
    if sum(steps) * length.share < lengths.LEAST_STEPS:
        times = {(limit, 0): predicted(length, steps, limit) for limit in limits}
        near = 1.001
    else:
        ways = itertools.product(limits, range(lengths.WAYS))
        times = {(limit, way): dealt_steps(length, heads, steps, limit, way) for limit, way in ways}
        near = 1 + 1.01 * lengths.HORIZON / lengths.TIMES  # rounding may move a time to the next
    good = [which for which, time in times.items() if time <= min(times.values()) * near]
    order = next(t for t in made if t is not None and t.shape[1:] == (6,))
    sections = round(1 / length.last)
    rows = {way: (sections - (way or sections)) * heads // sections for _, way in good}
    assert (sorted(found), int(order[-1, 1])) in [
        (sorted(counts_of(steps, limit)), rows[way]) for limit, way in good
    ]
    assert set(good) != set(times)  # or the call says nothing
    assert sorted(order[: len(found), 0].tolist()) == list(range(len(found)))
    each = [steps_of(rows, 4 // heads) for rows in lengths_]
    whole = [(*each[request], *[0] * 9)[number] for _, request, number, *_ in order[: len(steps)].tolist()]
    assert whole == sorted(steps, reverse=True)


def first_kernel(lengths: list[int], heads: int, sms: int, monkeypatch, *, causal: bool) -> tuple:
    """(what is prepared, the workspace) of packed requests of 4 query heads, D 128, of which the first kernel alone was
    compiled and has run in the simulator."""
    chosen = launch.kernels
    monkeypatch.setattr(launch, "kernels", lambda *each: chosen(*each)._replace(main=None, results=None))
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    q, k, v = (torch.randn(sum(lengths), n, 128).bfloat16() for n in (4, heads, heads))
    operands = Operands(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, o=q, lse=torch.zeros(4, len(q)))
    options = Options(causal=causal, return_lse=True, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
    with simulating("sm_90a", sm_count=sms, seed=1) as target:
        checked = call.check(operands, options, "sim", WANTED, q, None)
        config = replace(launch.plan_main(checked.problem, target), cut=True)
        order = Order(2, heads if heads < 4 else 1)
        prepared = launch.prepare.__wrapped__(checked.problem, target, order, config)
        made = []

        def zeros(blocks, _):
            made.extend(each and torch.zeros(each.shape, dtype=each.dtype) for each in blocks)
            return made

        monkeypatch.setattr(launch, "allocate", zeros)
        later = {name: lambda *_: None for name in ("main", "results")}
        changed = checked._replace(prepared=prepared._replace(**later), workspace=None, direct=None)
        call.run(changed, operands, q, None)
    return prepared, made


def test_guessed_lengths():
    """The longest request and, within an eighth, the tokens that are known, at any lengths."""
    draw = random.Random(3)
    for _ in range(200):
        lengths = [draw.randint(1, draw.choice((10, 900, 6000))) for _ in range(draw.randint(1, 90))]
        for guess in guesses.guessed_lengths(len(lengths), max(lengths), sum(lengths)):
            assert sum(count for _, count in guess) == len(lengths)
            assert len(guess) <= guesses.MOST_LENGTHS + 1
            assert guess[0] == (max(lengths), 1) and all(1 <= length <= max(lengths) for length, _ in guess)
            tokens = sum(length * count for length, count in guess)
            assert tokens <= 1.15 * sum(lengths) + len(lengths)
            assert tokens >= 0.85 * sum(lengths) or len(lengths) == 1


def test_slices_are_chosen_without_the_lengths():
    """Simulated, drawn requests without a mask: slices that are chosen by guessed lengths take little longer than those
    that are chosen by the true ones, and both less than whole KV heads."""
    draw, sms, costs, ratios, gained = random.Random(5), 132, guesses.Costs(2.1, 2.8, 3.0, 0.1), [], []
    for _ in range(30):
        heads, group = draw.choice((1, 2, 4)), draw.choice((4, 6, 8))
        lengths = [draw.randint(500, 4000) for _ in range(draw.randint(2, 8))]
        numbers = [n for n in range(1, group + 1) if group % n == 0]
        requests = requests_of(lengths, group)
        guessed = [
            requests_of([length for length, count in each for _ in range(count)], group)
            for each in guesses.guessed_lengths(len(lengths), max(lengths), int(0.95 * sum(lengths)))
        ]
        times = {
            n: guesses.expected_us(
                [runs.Request(steps // n, tiles) for steps, tiles in requests], heads * n, n, sms, costs
            )
            for n in numbers
        }
        chosen = guesses.choose(guessed, heads, numbers, sms, costs)
        ratios.append(times[chosen.slices] / min(times.values()))
        gained.append(times[chosen.slices] / times[1])
    assert statistics.geometric_mean(ratios) < 1.01 and max(ratios) < 1.06
    assert statistics.geometric_mean(gained) < 0.99
