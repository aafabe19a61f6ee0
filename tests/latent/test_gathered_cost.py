"""Which number of splits a call gets, and whether CTAs share out its KV tiles."""

import pytest

from warpspec.common.launch import SIMULATED
from warpspec.fmha.schedule import split_range
from warpspec.latent.gathered import cost, launch
from warpspec.latent.gathered.problem import GatheredProblem
from warpspec.latent.mla import float8

H200 = SIMULATED["sm_90a"]
KERNELS = {
    **cost.COSTS,
    "clusters": cost.OF_CLUSTERS[cost.LISTS],
    "transposed": cost.TRANSPOSED,
    "raw": cost.RAW,
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_number_of_splits_is_best_by_the_model_and_leaves_none_without_a_tile(kernel, known):
    for tasks in (1, 7, 40, 131, 133, 900):
        for tiles in (1, 2, 5, 33, 512):
            sizes = (KERNELS[kernel], tasks, tiles, 64 * tasks)
            splits = cost.best_splits(*sizes, 132, known)
            counts = range(1, min(tiles, 264) + 1)
            times = [cost.expected_equal(*sizes, count, 132, known) for count in counts]
            assert times[splits - 1] == min(times)
            assert all(split_range(split, splits, tiles)[1] > 0 for split in range(splits))


@pytest.mark.parametrize("kernel", KERNELS)
def test_unequal_work_is_shared_out_where_splits_would_wait_for_the_longest(kernel):
    costs = KERNELS[kernel]
    assert cost.shares_out(costs, 70, 304, 70 * 64, 1, 132, known=False)
    assert not cost.shares_out(costs, 4, 2, 4 * 64, 1, 132, known=False)
    assert not cost.shares_out(costs, 9 * 132, 300, 9 * 132 * 64, 1, 132, known=False)


def test_short_lines_are_cut_and_long_first_rounds_hide_shorter_ones():
    """Codes: a task's end costs more where it is cut, and what shorter tasks leave undone is not waited for."""
    costs = cost.COSTS[cost.CODES]
    short = cost.shared_time(costs, 40, 3.5, 4, 132)  # in chunks of less than a task with its start and end
    assert short > cost.shared_time(costs, 40, 1, 1, 132) + costs.cut
    times = [cost.equal_time(costs, 77, 112, 77 * 64, 3, 132, mean) for mean in (112, 56, None)]
    assert times[1] < times[0] == times[2]


def lists(tokens, heads, slots, **fields):
    return GatheredProblem(tokens, heads, "v3.2-fp8", (slots,), (True,), 0.1, **fields)


def plan(problem, target=H200):
    found = launch.make_plan(problem, target)
    return "shared" if found.config.scheduler.adds_up else found.splits


def test_plans():
    """Calls as they were timed on an H200: short lists are split, and 70 queries of 128 heads shared out."""
    assert plan(lists(5, 32, 128)) == plan(lists(8, 16, 128)) == 2
    assert plan(lists(70, 128, 2048)) == "shared" and plan(lists(8, 128, 2048)) > 4
    assert plan(lists(70, 128, 2048, num_splits=1)) == 1
    paged = {"normalize": True, "return_lse": False, "num_splits": None}
    assert plan(float8.problem_of(37, 1, 128, 8064, 0.1, **paged)) == "shared"
    assert plan(float8.problem_of(2, 1, 16, 16384, 0.1, **paged)) > 16
    assert plan(lists(5, 32, 128), SIMULATED["sm_100a"]) == 1  # not timed there


def test_ctas_share_keys_unless_each_has_one_tile():
    """Two CTAs with the halves of 128 heads convert keys together, but not a round of single KV tiles."""

    def cluster(*sizes, **fields):
        return launch.make_plan(lists(*sizes, **fields), H200).config.gathers.cluster

    assert cluster(5, 128, 64) == cluster(2, 128, 192, num_splits=3) == 1
    assert cluster(5, 128, 65, num_splits=1) == cluster(67, 128, 64) == 2
