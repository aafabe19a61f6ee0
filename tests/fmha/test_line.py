"""The line that work is cut along: sums in closed form, and cuts."""

import itertools
import random

import pytest

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
@pytest.mark.parametrize("overhead", [0, 3])
def test_cuts_grow_and_leave_no_tiny_piece(kv_tiles, overhead):
    found = [cut(i / 997, kv_tiles, overhead=overhead) for i in range(997)]
    assert found == sorted(found)
    assert overhead or set(found) <= {0, kv_tiles} | set(range(2, kv_tiles - 1))
    assert kv_tiles < 8 or len(set(found)) > kv_tiles // 2
    front = int(997 * overhead / max(kv_tiles + overhead, 1))
    assert not any(found[:front])


def test_rounds():
    assert round_count(0, 132) == round_count(132 * ROUND_TILES, 132) == 1
    assert round_count(3 * 132 * ROUND_TILES, 132) == 3
    assert round_count(10**9, 132) == MOST_ROUNDS


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
