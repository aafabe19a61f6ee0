"""The line that work is cut along: sums in closed form, cuts, and which problems are cut by length."""

import itertools
import random

import pytest
import torch
from helpers.simulate import plan_for

from warpspec.fmha.features import Schedule
from warpspec.fmha.line import FAR, MOST_ROUNDS, ROUND_TILES, clamped_sum, cut, round_count, stretch
from warpspec.fmha.mask import key_range


@pytest.mark.parametrize("first", [-1000, -17, -1, 0, 1, 8, 99, 100, 101, 5000])
@pytest.mark.parametrize("step", [1, 8, 24, 128])
def test_sums_have_a_closed_form(first, step):
    for count, limit in itertools.product((0, 1, 2, 13, 100), (0, 1, 7, 100, 3000)):
        wanted = sum(min(max(first + step * i, 0), limit) for i in range(count))
        assert clamped_sum(count, first, step, limit) == wanted


BOUNDS = [
    {"causal": causal, "left": left, "right": right, "key_stride": 1}
    for causal, left, right in itertools.product((False, True), (None, 0, 100, -20), (None, 0, 30, -70))
] + [{"causal": True, "left": None, "right": None, "key_stride": 4}]


@pytest.mark.parametrize("bounds", BOUNDS, ids=lambda b: "-".join(map(str, b.values())))
def test_a_tile_is_as_long_as_the_keys_it_visits(bounds):
    """Within a tile's queries at its edges, never less than its overhead, whatever the window and the positions."""
    queries, tile_n = 24, 64
    for length, start, tiles in ((1000, 0, 42), (1000, 500, 21), (300, -50, 13), (0, 0, 1), (77, 76, 1)):
        line = stretch(start, length, tiles, queries=queries, tile_n=tile_n, bounds=bounds)
        for tile in range(tiles):
            lowest = start + tile * queries
            first, _ = key_range(lowest, length, **bounds)
            _, end = key_range(lowest + queries - 1, length, **bounds)
            visited = max(end - first, 0) * bounds["key_stride"]
            found = line.upto(tile + 1) - line.upto(tile) - line.overhead
            assert found >= 0
            # A window that ends before it begins still has a length where its edges lie within the tile.
            assert abs(found - visited) <= queries + bounds["key_stride"], (length, start, tile)


@pytest.mark.parametrize("key_stride", [1, 128, 2**20, 2**29])
def test_positions_stay_within_32_bits(key_stride):
    bounds = {"causal": True, "left": None, "right": None, "key_stride": key_stride}
    for length, start in ((2**20, 2**31 - 1), (2**20, -(2**31)), (0, 0), (7, 2**29)):
        line = stretch(start, length, 3, queries=8, tile_n=128, bounds=bounds)
        assert 0 <= line.limit <= FAR and abs(line.first_end) <= FAR
        assert line.limit - line.first_end < 2**31 and line.upto(1) >= line.overhead


@pytest.mark.parametrize("kv_tiles", [0, 1, 2, 3, 7, 100])
def test_cuts_grow_and_leave_no_tiny_piece(kv_tiles):
    found = [cut(i / 997, kv_tiles) for i in range(997)]
    assert found == sorted(found)
    assert set(found) <= {0, kv_tiles} | set(range(2, kv_tiles - 1))
    assert kv_tiles < 8 or len(set(found)) > kv_tiles // 2


def test_rounds():
    assert round_count(0, 132) == round_count(132 * ROUND_TILES, 132) == 1
    assert round_count(3 * 132 * ROUND_TILES, 132) == 3
    assert round_count(10**9, 132) == MOST_ROUNDS


def packed(lengths_q, longest, *, arch="sm_90a", heads=(32, 8), dim=128, page=16, **options):
    """How a packed call over pages is done: "cut" by length, from a "queue", or otherwise, ""."""
    total, requests = sum(lengths_q), len(lengths_q)
    q = torch.empty(total, heads[0], dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1000, page, heads[1], dim, dtype=torch.bfloat16, device="meta")
    tensors = {
        "cu_seqlens_q": torch.empty(requests + 1, dtype=torch.int32, device="meta"),
        "kv_lengths": torch.empty(requests, dtype=torch.int32, device="meta"),
        "page_table": torch.empty(requests, -(-longest // page), dtype=torch.int32, device="meta"),
    }
    config = plan_for(arch, q=q, k=k, v=k, max_seqlen_q=max(lengths_q), **tensors, **options).config
    return "cut" if config.schedule is Schedule.LINE else "queue" if config.schedule is Schedule.QUEUE else ""


def test_what_is_cut_by_length():
    assert packed([1] * 32, 8192) == "cut"
    assert packed([1] * 64 + [2048] * 2, 8192, causal=True) == "cut"
    assert packed([512], 8192, causal=True) == "cut"
    assert packed([1] * 32, 8192, arch="sm_100a") == "cut"
    assert packed([1] * 4, 64) == ""  # little work
    assert packed([1] * 32, 8192, num_splits=2) == ""
    assert packed([1] * 256, 8192, window=(127, 0)) == ""  # tiles alike
    assert packed([100, 200], 1024, causal=True) == ""  # a tile a CTA at most, of few keys
    assert packed([1000] * 4, 4096, heads=(8, 1), causal=True) == "cut"  # two tiles a CTA
    assert packed([1024] * 4, 1664, heads=(8, 1), causal=True) == ""  # two alike, of few keys
    assert packed([512] * 2, 1664, heads=(40, 5), causal=True) == "cut"  # two and a half
    assert packed([1] * 33, 1280, heads=(64, 8)) == ""  # a tile a CTA
    assert packed([1] * 92, 2048, heads=(64, 8)) == ""  # three in turn
    assert packed([1] * 32, 2048, heads=(64, 8)) == "cut"  # or longer ones
    assert packed([1] * 64, 1024, heads=(32, 8)) == ""  # two rounds, nearly
    assert packed([1] * 64, 2048, heads=(32, 8)) == "cut"
    assert packed([1] * 40, 1024, heads=(32, 8)) == "cut"  # one and a bit
    assert packed([4000] * 16, 4096, causal=True) == "queue"  # many whole tiles
    assert packed([400] * 16, 400, causal=True) == "queue"
    assert packed([4000] * 16, 4096, causal=True, arch="sm_100a") == ""
    assert packed([400] * 16, 400, causal=True, window=(127, 0)) == ""  # several CTAs an SM


def test_random_numbers_of_tiles_take_all_of_the_line():
    """Chunks of a line end where the next ones begin, and the last at the line's end, as the kernels number them."""
    draw = random.Random(1)
    for _ in range(20):
        total, ctas, rounds = draw.randint(1, 10**6), draw.randint(1, 300), draw.randint(1, 5)
        size = -(-total // (ctas * rounds))
        ends = sorted(
            (min(size * (r * ctas + c), total), min(size * (r * ctas + c + 1), total))
            for r, c in itertools.product(range(rounds), range(ctas))
        )
        assert ends[0][0] == 0 and ends[-1][1] == total
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
