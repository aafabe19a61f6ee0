"""Tile orders: every tile once, whatever the section and the number of persistent CTAs; balance."""

import heapq
import itertools

import numpy as np
import pytest

from warpspec.fmha.device.grid import DivisorTileGrid
from warpspec.fmha.plan.sections import TILE_OVERHEAD, balanced_section, last_of_queue
from warpspec.fmha.schedule import TileGrid, key_span, place_in_round


def persistent(total: int, ctas: int, cta: int) -> list[int]:
    """Tiles of one CTA, as sm90's kernel goes through them."""
    whole, rest = divmod(total, ctas)
    rounds = whole + (place_in_round(whole, cta, ctas) < rest)
    return [r * ctas + place_in_round(r, cta, ctas) for r in range(rounds)]


@pytest.mark.parametrize("ctas", [1, 2, 7, 60, 200])
@pytest.mark.parametrize("section", [None, 1, 4, 5, 24, 100])
def test_every_tile_once(section, ctas):
    grid = TileGrid(query_tiles=5, head_tiles=2, heads_kv=3, batch=4)
    indices = list(itertools.chain.from_iterable(persistent(grid.size, ctas, cta) for cta in range(ctas)))
    assert sorted(indices) == list(range(grid.size))
    tiles = {grid.decode(i, longest_first=True, section=section) for i in indices}
    assert tiles == set(itertools.product(range(5), range(2), range(3), range(4)))


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("section", [1, 4, 5, 24, 100])
def test_a_grid_of_divisors_has_the_same_order(section, longest_first):
    """Where extents are divisors the formula is another: plain numbers serve both."""
    grid = TileGrid(query_tiles=5, head_tiles=2, heads_kv=3, batch=4)
    order = {"longest_first": longest_first, "section": section, "minimum": min}
    divisors = DivisorTileGrid(query_tiles=5, head_tiles=2, heads_kv=3, batch=4)
    for index in range(grid.size):
        assert divisors.decode(index, **order) == grid.decode(index, **order)


def test_long_tiles_come_first_within_a_section():
    grid = TileGrid(query_tiles=4, head_tiles=1, heads_kv=5, batch=1)
    order = [grid.decode(i, longest_first=True, section=2) for i in range(grid.size)]
    assert [tile[0] for tile in order] == [3, 3, 2, 2, 1, 1, 0, 0] * 2 + [
        3,
        2,
        1,
        0,
    ]  # the last section is short
    assert [tile[2] for tile in order[:8]] == [0, 1] * 4


def load_of_cta(grid: TileGrid, counts: list[int], ctas: int, section: int) -> np.ndarray:
    """What each persistent CTA has to do, in KV tiles."""
    work = np.array(counts) + TILE_OVERHEAD
    return np.array([
        sum(work[grid.decode(i, longest_first=True, section=section)[0]] for i in persistent(grid.size, ctas, cta))
        for cta in range(ctas)
    ])  # fmt: skip


def causal_counts(length: int, rows: int, keys: int) -> list[int]:
    return [-(-min(first + rows, length) // keys) for first in range(0, length, rows)]


@pytest.mark.parametrize(("heads", "length", "rows", "keys"), [
    (64, 8192, 128, 128), (64, 8192, 192, 128), (32, 8192, 128, 80),
    (16, 16384, 128, 80),  # one head to a section, all that fits L2: 1.53
    (16, 8192, 128, 80), (32, 16384, 128, 128), (16, 8192, 128, 128), (1000, 8192, 128, 128),
])  # fmt: skip
def test_the_busiest_cta_has_little_more_than_the_mean(heads, length, rows, keys):
    counts, ctas = causal_counts(length, rows, keys), 132
    grid = TileGrid(len(counts), 1, heads, 1)
    section = balanced_section(grid, ctas, counts, lambda section: 1.0)
    assert 1 <= section <= heads
    loads = load_of_cta(grid, counts, ctas, section)
    assert max(loads) <= 1.03 * np.mean(loads)


@pytest.mark.parametrize(("heads", "length", "rows", "keys", "ctas"), [
    (64, 8192, 192, 96, 132),  # rounds would have 20 heads: 1.027
    (128, 8192, 128, 128, 132), (200, 8192, 192, 80, 132), (36, 6666, 192, 80, 114),
])  # fmt: skip
def test_a_queue_ends_with_short_tiles(heads, length, rows, keys, ctas):
    """Each CTA takes the next tile when it has done its own; sections that do not fit L2 cost more."""
    counts = causal_counts(length, rows, keys)
    grid = TileGrid(len(counts), 1, heads, 1)
    section = balanced_section(grid, ctas, counts, lambda section: 1 + section / 1000, last_of_queue)
    ends = [0.0] * ctas
    for index in range(grid.size):
        query_tile = grid.decode(index, longest_first=True, section=section)[0]
        heapq.heapreplace(ends, ends[0] + counts[query_tile] + TILE_OVERHEAD)
    assert section < heads and max(ends) <= 1.02 * np.mean(ends)


def test_a_section_that_costs_more_than_its_balance_gains_is_not_taken():
    counts, ctas = causal_counts(8192, 128, 80), 132
    grid = TileGrid(len(counts), 1, 32, 1)
    whole = balanced_section(grid, ctas, counts, lambda section: 1.0)
    small = balanced_section(grid, ctas, counts, lambda section: 1.0 if section <= 3 else 1.1)
    assert small <= 3 < whole
    loads = load_of_cta(grid, counts, ctas, small)
    assert max(loads) <= 1.1 * np.mean(loads)


def test_where_ctas_have_a_tile_each_all_heads_are_one_section():
    grid = TileGrid(query_tiles=3, head_tiles=1, heads_kv=2, batch=1)
    assert balanced_section(grid, 132, [1, 2, 3], lambda section: 1.0) == 2
    assert balanced_section(TileGrid(3, 1, 2, 0), 132, [1, 2, 3], lambda section: 1.0) == 1


def test_one_query_tile_has_one_order_and_costs_no_search():
    """A decoding step over a cache that has grown by a key is a new problem, planned anew."""

    def cost(section):
        raise AssertionError("searched")

    assert balanced_section(TileGrid(1, 1, 8, 512), 264, [3], cost) == 4096


@pytest.mark.parametrize("bounds", [
    {"causal": True}, {"causal": True, "left": 100, "right": 3}, {"causal": True, "key_stride": 4},
    {"causal": False, "left": 40, "right": 0},
])  # fmt: skip
@pytest.mark.parametrize(("start", "length"), [(0, 1000), (-300, 700), (800, 900), (5, 0)])
def test_spans_of_many_tiles_at_a_time(bounds, start, length):
    first = start + np.arange(0, 1000, 16)
    spans = key_span(first, first + 15, length, 80, bounds, np.minimum, np.maximum)
    assert list(spans.count) == [key_span(row, row + 15, length, 80, bounds).count for row in first.tolist()]
