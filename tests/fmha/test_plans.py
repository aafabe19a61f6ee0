"""Plans: what is chosen is feasible for any problem and GPU, follows the model of the time, and suits plain cases."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from helpers.attention_configs import configured, made_problem
from helpers.page_layouts import PAGE_SIZES
from helpers.simulate import plan_for
from helpers.suites import long

from warpspec.common.hardware import MODELS, WARP_THREADS, Speeds
from warpspec.common.launch import SIMULATED, Target, simulated
from warpspec.fmha import launch, sm90
from warpspec.fmha.block_mask import Visits
from warpspec.fmha.config import Schedule
from warpspec.fmha.expand import MOST_BYTES, expanded, may_expand, passes
from warpspec.fmha.features import RequestLayout
from warpspec.fmha.logits import BiasLayout, LogitOptions
from warpspec.fmha.plan import ANY_CTAS, candidates, expectation, make_plan
from warpspec.fmha.plan.cost import Way, microseconds
from warpspec.fmha.plan.expanding import expected_times
from warpspec.fmha.plan.scenarios import Requests, scenarios
from warpspec.fmha.plan.work import Tiling, window_edges, work_of
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import key_span
from warpspec.fmha.sm90.shapes import Shape

UNKNOWN = replace(SIMULATED["sm_90a"], sm_count=78, l2_bytes=60 << 20, speeds=Speeds(3.5, 140.0))  # as an H20
TARGETS = {gpu.name: Target.of_model(gpu) for gpu in MODELS} | {"unknown": UNKNOWN}
H200 = TARGETS["H200"]


def random_problem(draw: random.Random) -> AttentionProblem:
    """Any sizes and switches that go together."""
    head_dim, packed = draw.choice((40, 64, 96, 128, 192, 256, 512)), draw.random() < 0.5
    heads_kv, group = draw.choice((1, 2, 8)), draw.choice((1, 2, 3, 5, 7, 8, 16, 20, 64, 100))
    batch, seq_q = (
        round(2 ** draw.uniform(0, 9)),
        round(2 ** draw.uniform(0, 14)) if draw.random() < 0.6 else 1,
    )
    seq_k = seq_q + round(2 ** draw.uniform(0, 17))
    page_size = draw.choice((None, None, *PAGE_SIZES))
    total = draw.randint(seq_q, seq_q * batch)
    bias = not packed and draw.random() < 0.2
    window = draw.choice((None, None, 0, 127, 5000))
    return made_problem(
        batch, seq_q, seq_k, heads_kv * group, heads_kv, head_dim,
        causal=draw.random() < 0.7,
        window_left=window,
        window_right=None if window is None else draw.choice((None, 0, 3)),
        has_sink=draw.random() < 0.3,
        return_lse=draw.random() < 0.3,
        shared_kv=draw.random() < 0.2,
        logits=LogitOptions(0.1, draw.choice((None, None, None, 30.0))),
        has_kv_lengths=page_size is not None or (not packed and draw.random() < 0.3),
        page_size=page_size or 0,
        bias=BiasLayout(draw.choice(("bfloat16", "float32"))) if bias else None,
        bias_rows="aligned" if bias else None,
        packed_q=packed,
        packed_k=packed and page_size is None,
        total_q=total if packed else None,
        least_q=total if packed else None,
        num_splits=draw.choice((None, None, None, 1, 3)),
    )  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("seed", [0, *map(long, range(1, 20))])
def test_plans_of_random_problems_are_feasible(name, seed):
    """Configurations check their budgets. A plan has CTAs and as many splits as asked for; times are numbers."""
    target, draw = TARGETS[name], random.Random(seed)
    choices = launch.ATTENTION.of(target.architecture).CHOICES
    for _ in range(60):
        problem = random_problem(draw)
        plan = make_plan(choices, problem, target)
        assert plan.ctas >= 1 and plan.section >= 1 and plan.splits >= 1
        assert plan.config.output.splits == (plan.splits > 1)
        assert problem.num_splits in (None, plan.splits)
        if problem.requests.page_size:
            assert plan.config.tile_n % plan.config.kv.page_keys == 0
            assert plan.config.kv.boxes()[1] <= WARP_THREADS  # a lane has the page of each
        time = expectation(choices, problem, target)
        times = [time(candidate) for candidate in candidates(choices, problem, target)]
        assert all(0 < value < math.inf for value in times)


def test_every_candidate_makes_a_kernel():
    """Not only the chosen one: constants change."""
    draw, seen = random.Random(3), set()
    for target in (H200, TARGETS["B200"]):
        choices = launch.ATTENTION.of(target.architecture).CHOICES
        for _ in range(25):
            problem = random_problem(draw)
            for one in candidates(choices, problem, target):
                seen.add(one.way)
                choices.config.of(
                    problem, target, shape=one.shape, pack=one.tiling.pack, splits=one.splits > 1,
                    schedule=choices.schedules[one.way],
                )  # fmt: skip
    assert seen == set(Way)


def test_work_is_what_tiles_visit():
    """Query tiles exactly, KV tiles nearly, of random requests."""
    draw = random.Random(1)
    for _ in range(100):
        problem = random_problem(draw)
        problem = replace(
            problem,
            mask=replace(problem.mask, causal=True, has_right=False),
            requests=RequestLayout(has_kv_lengths=problem.requests.has_kv_lengths),
            window_right=None,
        )
        requests = [
            Requests(1, q, q + draw.randint(0, 3000))
            for q in (draw.randint(1, 2000) for _ in range(draw.randint(1, 6)))
        ]
        tiling = Tiling(draw.randint(1, 3), 64, 1, draw.choice((64, 80, 128)), 2, 1, min(problem.group, 4))
        found, heads = work_of(problem, tiling, requests), problem.heads_kv * -(-problem.group // tiling.pack)
        bounds = {"causal": True, "left": problem.window_left, "right": None, "key_stride": 1}
        tiles = kv = 0
        for _, queries, keys in requests:
            for first in range(keys - queries, keys, tiling.queries):
                last = min(first + tiling.queries, keys) - 1
                tiles += heads
                kv += heads * key_span(first, last, keys, tiling.tile_n, bounds).count
        assert found.tiles == tiles
        assert found.kv == pytest.approx(kv, rel=0.3, abs=2 * tiles)


def test_scenarios_have_what_the_host_knows():
    draw = random.Random(2)
    for _ in range(300):
        problem = random_problem(draw)
        for case in scenarios(problem):
            count, queries = sum(one.count for one in case), sum(one.count * one.queries for one in case)
            assert count == pytest.approx(problem.batch)
            assert all(one.count >= 0 and one.queries > 0 and one.keys > 0 for one in case)
            assert max(one.keys for one in case) <= problem.seq_k * 1.001 + problem.seq_q
            if not problem.requests.packed_q:
                assert queries == pytest.approx(problem.batch * problem.seq_q)


def test_more_work_takes_longer():
    """The model, for every way: of twice the keys, of four times the requests, on a slower GPU."""
    problem = made_problem(8, 1, 4096, 32, 8, 128, has_kv_lengths=True)
    costs = launch.ATTENTION.of(H200.architecture).CHOICES.costs
    tiling = Tiling(1, 64, 1, 64, 3, 2, 4)

    def time(way, count, keys, target=H200):
        work = work_of(problem, tiling, [Requests(count, 1, keys)])
        return microseconds(work, tiling, way, 3 if way is Way.SPLIT else 1, target, costs)

    for way in Way:
        assert time(way, 64, 4096) < time(way, 64, 8192) < time(way, 256, 8192)
        assert time(way, 256, 8192) < time(way, 256, 8192, replace(H200, speeds=Speeds(2.0, 400.0)))
        assert time(way, 256, 8192) < time(way, 256, 8192, UNKNOWN)


# Plain cases, whose answer does not depend on a constant's last digit.


def packed(lengths_q, longest, *, arch="sm_90a", heads=(32, 8), dim=128, page=16, **options):
    """(schedule of a packed call, whether its CTAs take parts of the keys from a queue)."""
    total, requests = sum(lengths_q), len(lengths_q)
    q = torch.empty(total, heads[0], dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1000, page, heads[1], dim, dtype=torch.bfloat16, device="meta")
    tensors = {
        "cu_seqlens_q": torch.empty(requests + 1, dtype=torch.int32, device="meta"),
        "kv_lengths": torch.empty(requests, dtype=torch.int32, device="meta"),
        "page_table": torch.empty(requests, -(-longest // page), dtype=torch.int32, device="meta"),
    }
    config = plan_for(arch, q=q, k=k, v=k, max_seqlen_q=max(lengths_q), **tensors, **options).config
    return config.scheduler.schedule, config.queues_partitions


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_is_cut_by_length(arch):
    whole = launch.ATTENTION.of(SIMULATED[arch].architecture).CHOICES.schedules
    whole = {(whole.get(way), False) for way in (Way.PERSISTENT, Way.SINGLE, Way.QUEUE)}
    line, parts = (Schedule.LINE, False), (Schedule.QUEUE, True)
    assert packed([1] * 24 + [16] * 2, 16384, causal=True, arch=arch) in (line, parts)
    assert packed([1] * 24, 16384, causal=True, arch=arch) == (parts if arch == "sm_90a" else line)
    sorted_tiles = (Schedule.QUEUE, False) if arch == "sm_90a" else line  # whole ones, the longest first
    assert packed([1] * 24 + [256] * 2, 16384, causal=True, arch=arch) == sorted_tiles
    assert packed([1] * 4, 64, arch=arch) in whole  # little work
    assert packed([1] * 32, 8192, num_splits=2, arch=arch) not in (line, parts)
    assert packed([1] * 256, 8192, window=(127, 0), arch=arch) in whole  # tiles alike
    assert packed([4000] * 16, 4096, causal=True, arch=arch) in whole  # many whole tiles


def test_decoding_takes_one_consumer_and_prefill_several():
    for dim, heads in itertools.product((64, 128), ((32, 8), (64, 8))):
        q, k = (torch.empty(32, 1, n, dim, dtype=torch.bfloat16, device="meta") for n in heads)
        k = k.expand(32, 4096, heads[1], dim)
        assert plan_for("sm_90a", q=q, k=k, v=k).config.consumers == 1
        q = torch.empty(2, 8192, heads[0], dim, dtype=torch.bfloat16, device="meta")
        k = torch.empty(2, 8192, heads[1], dim, dtype=torch.bfloat16, device="meta")
        assert plan_for("sm_90a", q=q, k=k, v=k, causal=True).config.consumers > 1


@pytest.mark.parametrize("group", [5, 7, 20])
def test_heads_share_a_tile_where_most_requests_decode(group):
    """However many queries the longest one has: a tile of one head would have one row of 64."""
    q = torch.empty(64 + 512, group, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1000, 64, 1, 128, dtype=torch.bfloat16, device="meta")
    tensors = {
        "cu_seqlens_q": torch.empty(66, dtype=torch.int32, device="meta"),
        "kv_lengths": torch.empty(65, dtype=torch.int32, device="meta"),
        "page_table": torch.empty(65, 32, dtype=torch.int32, device="meta"),
    }
    assert (
        plan_for("sm_90a", q=q, k=k, v=k, max_seqlen_q=512, causal=True, **tensors).config.rows.pack == group
    )


def test_one_long_row_fills_the_gpu():
    q = torch.empty(1, 1, 64, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 65536, 8, 128, dtype=torch.bfloat16, device="meta")
    for sms in (66, 132):
        plan = plan_for(simulated("sm_90a", sm_count=sms), q=q, k=k, v=k)
        assert 0.6 * sms <= 8 * plan.splits <= 3 * sms


@pytest.mark.parametrize(("queries", "heads"), [(1, 64), (2, 32), (3, 64), (4, 16)])
def test_tiles_of_latent_keys_that_are_cut_have_no_idle_rows(queries, heads):
    """Three queries of 128 heads are tiles of one query each, in step; other numbers of them share a tile."""
    kv = torch.empty(8192, 64, 1, 576, dtype=torch.bfloat16, device="meta")
    q = torch.empty(30, queries, 128, 576, dtype=torch.bfloat16, device="meta")
    table = torch.empty(30, 140, dtype=torch.int32, device="meta")
    lengths = torch.empty(30, dtype=torch.int32, device="meta")
    call = dict(q=q, k=kv, v=None, v_dim=512, scale=0.04, causal=True, page_table=table, kv_lengths=lengths)
    found = plan_for("sm_90a", **call)
    assert found.config.scheduler.adds_up and found.config.rows.pack == heads
    assert found.config.scheduler.queries_in_step is (queries == 3)
    assert found.ctas % (queries * 128 // 64) == 0


def test_latent_keys_stay_whole_where_requests_fill_the_gpu():
    """MLA's states of split keys, 512 columns a head, cost more than an idle SM: many long requests, which may be
    unequal, are cut by length, and few are split."""
    kv = torch.empty(8192, 64, 1, 576, dtype=torch.bfloat16, device="meta")

    def splits(batch, keys):
        q = torch.empty(batch, 1, 64, 576, dtype=torch.bfloat16, device="meta")
        tensors = {
            "page_table": torch.empty(batch, keys // 64, dtype=torch.int32, device="meta"),
            "kv_lengths": torch.empty(batch, dtype=torch.int32, device="meta"),
        }
        found = plan_for("sm_90a", q=q, k=kv, v=None, v_dim=512, scale=0.04, **tensors)
        return found.splits, found.config.scheduler.cuts_tiles

    assert splits(128, 4096)[0] == splits(96, 2048)[0] == 1 and splits(32, 8192) == (1, True)
    assert splits(80, 128) == (1, False) and splits(2, 16384)[0] > 8


@pytest.mark.parametrize(
    "kv_format, heads, queries, keys, first",
    [
        ("e4m3", 32, 8192, 8192, True),
        ("nvfp4", 32, 8192, 8192, True),
        ("nvfp4", 8, 512, 8192, True),
        ("nvfp4", 8, 96, 7264, False),
        ("e4m3", 4, 160, 6304, False),  # few rows meet many keys
        ("nvfp4", 4, 24, 32768, False),
        ("nvfp4", 4, 1, 8192, False),  # warps convert codes in registers
    ],
)
def test_keys_in_codes_are_dequantised_first_where_that_pays(kv_format, heads, queries, keys, first):
    """As was measured (docs/measurements.md). heads: KV heads, of four query heads each."""
    problem = made_problem(4, queries, keys, heads * 4, heads, 128, causal=True)
    problem = replace(problem, format=replace(problem.format, kv_format=kv_format))
    assert launch.expands_on(problem, H200) is first
    assert not launch.expands_on(replace(problem, format=replace(problem.format, kv_format=None)), H200)


def test_idle_tiles_between_others_take_ctas():
    """With more queries than a tile's, tiles without a query stand between the others, otherwise after them."""
    tiling, requests = Tiling(2, 64, 1, 64, 2, 1, 8, True), [Requests(3, 39, 868)]
    q = torch.empty(3 * 39, 64, 256, dtype=torch.bfloat16, device="meta")
    k = torch.empty(3 * 868, 8, 256, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(4, dtype=torch.int32, device="meta")

    def problem(most):
        tensors = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": most, "max_seqlen_k": 868}
        return AttentionProblem.of(q=q, k=k, v=k, causal=True, memory=False, **tensors)

    # Splits give way to others where idle tiles may be between them.
    for most, ctas in ((39, ANY_CTAS), (4, 132)):
        assert make_plan(sm90.CHOICES, replace(problem(most), num_splits=3), H200).ctas == ctas
    assert work_of(problem(39), tiling, requests).idle == 8 * (3 * 39 // 16 + 3 - 3 * 3) > 0
    assert work_of(problem(16), tiling, requests).idle == 0


def test_sections_follow_the_l2():
    """Causal heads worked on at a time: fewer with less L2 (of 8192 keys of D 128, ten fit 40 MiB)."""
    q = torch.empty(1, 8192, 128, 128, dtype=torch.bfloat16, device="meta")
    sections = [
        plan_for(replace(H200, l2_bytes=mib << 20), q=q, k=q, v=q, causal=True).section
        for mib in (50, 400, 4000)
    ]
    assert sections == sorted(sections) and len(set(sections)) > 1


@pytest.mark.parametrize(("tile_n", "page_size", "keys"), [
    (128, 16, 16), (128, 128, 128), (128, 384, 128), (128, 48, 16), (80, 64, 16), (80, 80, 80), (64, 112, 16),
])  # fmt: skip
def test_a_tile_is_read_in_boxes_that_lie_within_pages(tile_n, page_size, keys):
    shape = Shape(3, tile_n, 2, 1, 160, 32)
    kv = configured(
        sm90.AttentionConfig, head_dim=128, shape=shape, page_size=page_size, has_kv_lengths=True
    ).kv
    assert (kv.page_keys, kv.pages) == (keys, tile_n // keys)
    assert kv.boxes()[1] <= WARP_THREADS  # a lane has the page of each


@pytest.mark.parametrize(
    ("queries", "keys", "width", "first"), [(64, 64, 127, -127), (64, 48, 127, 5), (9, 80, 511, -3)]
)
def test_kv_tiles_at_the_edges_of_windows_are_counted(queries, keys, width, first):
    """Against the keys that 240 tiles of queries see, one by one."""
    visited = 0
    for tile in range(240):
        begin = first + tile * queries
        visited += len({key // keys for key in range(begin, begin + width + queries)})
    assert visited / 240 - (width + queries) / keys == pytest.approx(
        window_edges(first, width, queries, keys)
    )


def test_few_tiles_for_each_cta_leave_some_cta_two_long_ones():
    """One equal tile more than there are CTAs takes a round more, unless half of the tiles are short."""
    tiling, costs = Tiling(2, 64, 1, 128, 2, 1, 1), sm90.CHOICES.costs
    problem = made_problem(1, 128, 8192, 1, 1, 128)

    def time(way, requests):
        return microseconds(work_of(problem, tiling, requests), tiling, way, 1, H200, costs)

    for way in (Way.SINGLE, Way.QUEUE):
        round_ = time(way, [Requests(132, 128, 8192)])
        assert time(way, [Requests(133, 128, 8192)]) > 1.7 * round_
        mixed = [Requests(66, 128, 8192), Requests(66, 128, 128), Requests(1, 128, 256)]
        assert time(way, mixed) < 1.3 * round_


def test_keys_beyond_l2_are_read_once():
    """Two query tiles of a head read its keys at different times on a line, and at one time as splits in order."""

    def problem(queries, batch=5):
        pages = {"has_kv_lengths": True, "page_size": 256}
        return made_problem(batch, queries, 10240, 128, 8, 128, causal=True, **pages)

    tiling = Tiling(2, 64, 1, 128, 3, 1, 16)
    once, twice = (work_of(problem(n), tiling, [Requests(5, n, 10240)]) for n in (8, 16))
    assert once.again == 0 and twice.again == pytest.approx(once.bytes, rel=0.02)
    plan = make_plan(sm90.CHOICES, problem(16), H200)
    assert plan.splits > 1 and plan.section == 1
    assert make_plan(sm90.CHOICES, problem(16, batch=1), H200).section == 8  # all fit


def test_rows_that_share_lines_of_l2_are_read_together():
    """Few queries of many keys whose rows end amid a line of L2 get tiles of two KV heads, or, of an odd number, short
    partitions of the keys."""

    def plan(heads, dim, queries=1, keys=7168):
        pages = {"has_kv_lengths": True, "page_size": 256}
        return make_plan(sm90.CHOICES, made_problem(41, queries, keys, heads, heads, dim, **pages), H200)

    assert [plan(16, dim).config.rows.kv_heads for dim in (72, 80, 96, 104, 128)] == [2, 2, 2, 2, 1]
    odd = plan(15, 96)
    assert odd.config.rows.kv_heads == 1 and odd.config.queues_partitions and odd.splits > 3
    others = plan(16, 96, queries=64), plan(16, 96, keys=256), plan(1, 96)
    assert all(other.config.rows.kv_heads == 1 for other in others)


def test_paired_consumers_have_further_ways_where_these_were_timed():
    """K and V two tensors, lengths that the device knows: packed queries, or few."""

    def ways(seq_q: int, **options) -> set[Way]:
        problem = made_problem(40, seq_q, 4000, 32, 4, 512, causal=True, **options)
        return {found.way for found in candidates(sm90.CHOICES, problem, H200)}

    assert ways(1, has_kv_lengths=True) >= {Way.SPLIT, Way.PARTITIONS}
    assert Way.QUEUE in ways(900, packed_q=True, packed_k=True, least_q=9000)
    new = (Way.QUEUE, Way.SINGLE, Way.PARTITIONS)
    for others in ({"has_kv_lengths": True, "shared_kv": True}, {}, {"bias": BiasLayout("float32")}):
        assert ways(1, **others).isdisjoint(new)
    assert ways(900, has_kv_lengths=True).isdisjoint(new)


def test_a_few_rounds_of_long_tiles_are_cut():
    """Where whole tiles would leave much of their last round idle, their keys are split, or their line is cut, if that
    is worth the second launch: not for tiles of few keys, nor for consumers that share rows."""

    def plan(queries, keys, dim=256, batch=4, heads=(16, 8), causal=True):
        return make_plan(sm90.CHOICES, made_problem(batch, queries, keys, *heads, dim, causal=causal), H200)

    assert plan(799, 30677).splits > 1
    assert plan(799, 900).splits == plan(799, 30677, dim=512).splits == 1
    assert plan(4680, 4680, 72, 1, (16, 16), causal=False).config.scheduler.cuts_tiles
    assert plan(1, 3000, 64, 37, (8, 8), causal=False).splits > 1  # 296 tiles: two or three CTAs an SM


def test_plans_follow_the_lengths_of_lists():
    """Short lists stay whole, long ones of few query tiles are split; many query tiles go through few heads at a time,
    few ones through all."""

    def plan(visited, batch=1, queries=2560, heads=8):
        lists = {"block_size": (128, 128), "has_order": True, "visited": visited}
        problem = made_problem(batch, queries, queries, heads, heads // 2, 128, **lists)
        return make_plan(sm90.CHOICES, problem, H200)

    short, long_ = Visits(3.0, 2.0, 5.0, 5.0), Visits(14.0, 0.0, 16.0, 16.0)
    assert plan(short).splits == plan(Visits(0.0, 0.0, 0.0, 0.0)).splits == plan(long_, heads=64).splits == 1
    assert plan(long_, queries=2048, heads=2).splits > 1
    assert [plan(short, batch, heads=16).section for batch in (1, 2, 8)] == [8, 8, 11]


def test_some_request_that_decodes_has_the_most_keys():
    problem = replace(
        made_problem(96, 113, 2019, 8, 1, 128, causal=True, packed_q=True, total_q=208, least_q=208),
        requests=RequestLayout(packed_q=True, has_kv_lengths=True, page_size=16),
    )
    for case in scenarios(problem):
        assert max(each.keys for each in case if each.queries == 1) == 2019
        assert sum(each.count for each in case) == pytest.approx(96)


def test_keys_in_front_of_windows_are_not_counted_as_dequantised():
    """A chunk of 2048 queries sees 2175 of 65536 keys: their bytes alone are those of the first launch."""
    problem = made_problem(2, 2048, 65536, 64, 8, 64, causal=True)
    problem = replace(problem, format=replace(problem.format, kv_format="e4m3"))
    windowed = replace(problem, window_left=127, mask=replace(problem.mask, has_left=True))
    short = replace(windowed, seq_k=2175)
    first = [expected_times(sm90.CHOICES, each, H200)[0] for each in (problem, windowed, short)]
    assert first[1] == pytest.approx(first[2], rel=0.05) and first[0] > 2 * first[1]


def test_passes_of_what_is_dequantised_first_stay_within_the_memory():
    """8 KV heads of D 128: 2 GiB for each 524288 keys."""
    for keys, count in ((262144, 1), (262145, 2), (1 << 20, 4), (1 << 21, 8), ((1 << 21) + 1, None)):
        problem = made_problem(1, 8192, keys, 32, 8, 128, causal=True)
        problem = replace(problem, format=replace(problem.format, kv_format="e4m3"))
        assert passes(problem) == count and may_expand(problem) is (count is not None)
        if count:
            each = expanded(problem)
            assert (each.heads_q, each.heads_kv, each.group) == (32 // count, 8 // count, 4)
            assert 2 * keys * each.heads_kv * 128 * 2 <= MOST_BYTES
