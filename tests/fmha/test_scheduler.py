"""Tile orders: every tile once, whatever the section and the number of persistent CTAs; balance."""

import itertools

import numpy as np
import pytest

from warpspec.fmha.scheduler import TILE_OVERHEAD, TileGrid, balanced_section, place_in_round


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


@pytest.mark.parametrize(("heads", "rows", "keys", "largest", "bound"), [
    (64, 128, 128, 9, 1.02), (64, 192, 128, 20, 1.03), (32, 128, 80, 4, 1.03),
])  # fmt: skip
def test_the_busiest_cta_has_little_more_than_the_mean(heads, rows, keys, largest, bound):
    query_tiles, ctas = -(-8192 // rows), 132
    counts = [-(-min((tile + 1) * rows, 8192) // keys) for tile in range(query_tiles)]
    grid = TileGrid(query_tiles, 1, heads, 1)
    section = balanced_section(grid, ctas, counts, largest)
    assert 1 <= section <= largest
    work = np.array(counts) + TILE_OVERHEAD
    loads = [
        sum(
            work[grid.decode(i, longest_first=True, section=section)[0]]
            for i in persistent(grid.size, ctas, cta)
        )
        for cta in range(ctas)
    ]
    assert max(loads) <= bound * np.mean(loads)


def test_a_section_fits_the_heads_there_are():
    grid = TileGrid(query_tiles=3, head_tiles=1, heads_kv=2, batch=1)
    assert balanced_section(grid, 132, [1, 2, 3], 50) == 2
    assert balanced_section(grid, 2, [1, 2, 3], 0) == 1
