"""How many KV splits a shape gets, and that the parts of a split are what they claim."""

import itertools
from functools import partial

import pytest
import torch

from warpspec.common.hardware import GPUS, gpu_model
from warpspec.common.launch import Target
from warpspec.fmha.logits import LogitOptions
from warpspec.fmha.mask import key_range
from warpspec.fmha.plan import make_plan
from warpspec.fmha.plan import splits as model_of_splits
from warpspec.fmha.plan.splits import combine_clocks, tile_clocks, visited_tiles
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import key_span, split_range
from warpspec.fmha.sm90 import CHOICES

SM_COUNT = GPUS["sm_100a"].sm_count
choose_splits = partial(model_of_splits.choose_splits, sm_count=SM_COUNT)
KEYS_64K = 65536
# Head size, M tiles and rows of one token at batch 1, and tile shapes a kernel may have.
DECODE = {
    "gpt-oss, 64/8 heads": dict(head_dim=64, m_tiles=8, rows=64, tile_m=128, tile_n=128, ctas_per_sm=2),
    "llama, 64/8 heads": dict(head_dim=128, m_tiles=8, rows=64, tile_m=128, tile_n=128),
    "llama, two CTAs": dict(head_dim=128, m_tiles=8, rows=64, tile_m=128, tile_n=64, ctas_per_sm=2),
    "D 256": dict(head_dim=256, m_tiles=8, rows=64, tile_m=128, tile_n=64),
    "v4-flash, 64/1 heads": dict(head_dim=512, m_tiles=1, rows=64, tile_m=64, tile_n=64, shared_kv=True),
    "v4-pro, 128/1 heads": dict(head_dim=512, m_tiles=2, rows=128, tile_m=64, tile_n=64, shared_kv=True),
}


@pytest.mark.parametrize("model", DECODE)
def test_one_row_of_64k_keys_fills_the_device(model):
    shape = DECODE[model]
    slots = SM_COUNT * shape.get("ctas_per_sm", 1)
    splits = choose_splits(kv_tiles=KEYS_64K // shape["tile_n"], **shape)
    assert 0.95 * slots <= shape["m_tiles"] * splits <= slots, "one wave, and a full one"


@pytest.mark.parametrize("model", DECODE)
def test_never_more_splits_than_tiles_and_none_without_a_tile(model):
    for kv_tiles in (0, 1, 2, 3, 7, 8, 9, 31, 100, 511, 512, 513, 4096):
        splits = choose_splits(kv_tiles=kv_tiles, **DECODE[model])
        assert 1 <= splits <= max(kv_tiles, 1)
        assert all(split_range(split, splits, kv_tiles)[1] > 0 for split in range(splits)) or kv_tiles == 0


@pytest.mark.parametrize("model", DECODE)
def test_one_split_where_the_tiles_fill_the_device_or_there_is_little_to_share(model):
    shape = DECODE[model]
    slots = SM_COUNT * shape.get("ctas_per_sm", 1)
    for batches in (slots // shape["m_tiles"] + 1, 10 * slots):
        many = {**shape, "m_tiles": shape["m_tiles"] * batches, "rows": shape["rows"] * batches}
        assert choose_splits(kv_tiles=512, **many) == 1
    assert choose_splits(kv_tiles=1, **shape) == choose_splits(kv_tiles=2, **shape) == 1


def test_more_keys_never_mean_fewer_ctas():
    for shape in DECODE.values():
        chosen = [choose_splits(kv_tiles=tiles, **shape) for tiles in (4, 16, 64, 256, 1024)]
        assert chosen == sorted(chosen)


def test_a_smaller_device_gets_fewer_splits():
    shape = dict(DECODE["llama, 64/8 heads"], kv_tiles=512)
    assert choose_splits(sm_count=20, **shape) == 5  # 40 CTAs: two full waves, where 16 would be most of one
    assert choose_splits(sm_count=8, **shape) == 1


def test_no_other_count_is_better_by_the_model():
    shape = DECODE["v4-pro, 128/1 heads"]
    tile = tile_clocks(shape["head_dim"], shape["tile_m"], shape["tile_n"], shape["shared_kv"])

    def clocks(splits, kv_tiles):
        longest = max(split_range(split, splits, kv_tiles)[1] for split in range(splits))
        waves = -(-shape["m_tiles"] * splits // SM_COUNT)
        return waves * (4000 + longest * tile) + combine_clocks(splits, shape["rows"], 512, SM_COUNT)

    for kv_tiles in (5, 12, 50, 128, 200, 1024):
        chosen = choose_splits(kv_tiles=kv_tiles, **shape)
        assert clocks(chosen, kv_tiles) == min(clocks(splits, kv_tiles) for splits in range(1, kv_tiles + 1))


def test_clocks_of_a_tile_are_those_of_the_unit_that_binds():
    assert tile_clocks(64, 128, 128, False) == 128 * 128 / 16  # exponentials, and as long to load
    assert tile_clocks(128, 128, 128, False) == 2 * 128 * 128 * 2 / 32  # K and V at 32 bytes a clock
    assert tile_clocks(512, 64, 64, True) == 2 * 2 * 64 * 64 * 512 / 4096  # both products at half the rate
    assert combine_clocks(1, 64, 128, SM_COUNT) == 0 < combine_clocks(2, 64, 128, SM_COUNT)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 148])
def test_parts_cover_every_tile_once(splits):
    for tiles in (0, 1, 2, 6, 7, 8, 100, 147, 148, 149, 1000):
        parts = [split_range(split, splits, tiles) for split in range(splits)]
        visited = [tile for first, count in parts for tile in range(first, first + count)]
        assert visited == list(range(tiles))
        counts = [count for _, count in parts]
        assert max(counts) - min(counts) <= 1 and min(counts) >= 0


@pytest.mark.parametrize(
    "left, right, causal", [*itertools.product((None, 0, 5), (None, 0, 3), (False, True))]
)
def test_visited_tiles_is_the_most_that_any_place_needs(left, right, causal):
    keys, length = 4, 41
    for queries in (1, 3, 8):
        bound = visited_tiles(
            seq_k=length, queries=queries, tile_n=keys, left=left, right=right, causal=causal
        )
        bounds = dict(causal=causal, left=left, right=right)
        counts = [
            key_span(lowest, lowest + queries - 1, length, keys, bounds).count
            for lowest in range(-10, length + 10)
            if key_range(lowest + queries - 1, length, **bounds)[1] > 0
        ]
        assert max(counts) == bound


# (batch, keys, query heads, KV heads, D), and the counts that took at most 5% longer than the best that was timed: some
# of 41 calls drawn on 2026-11-28 (docs/records/2026-11-28-attention-ways.md), in 35 of which the choice is of these.
MEASURED = [
    ((10, 8073, 32, 4, 128), {6}),
    ((34, 2285, 16, 2, 128), {1, 2, 3}),
    ((59, 577, 32, 4, 64), {1}),
    ((2, 283, 32, 4, 64), {4, 5, 6}),
    ((26, 2805, 16, 2, 64), {5, 6, 7}),
    ((19, 3570, 32, 4, 64), {3, 5}),
    ((1, 14129, 64, 8, 64), {23, 28}),
    ((6, 4786, 64, 8, 64), {4, 5, 8}),
    ((15, 509, 64, 8, 64), {1}),
    ((9, 1089, 8, 4, 256), {3}),
    ((4, 12048, 4, 2, 256), {16}),
    ((5, 3711, 32, 16, 256), {3, 4}),
    ((2, 10299, 32, 16, 256), {4, 8, 12}),
    ((1, 4462, 4, 2, 256), {24, 28, 56}),
]


@pytest.mark.parametrize(("shape", "fast"), MEASURED, ids=str)
def test_decoding_on_an_h200_is_split_as_was_fastest_there(shape, fast):
    batch, keys, heads_q, heads_kv, head_dim = shape
    sizes = {"batch": batch, "seq_q": 1, "seq_k": keys, "heads_q": heads_q, "heads_kv": heads_kv}
    kind = {
        "head_dim": head_dim,
        "device": torch.device("meta"),
        "logits": LogitOptions(0.1),
    }
    target = Target.of_model(gpu_model("H200"))
    assert make_plan(CHOICES, AttentionProblem(**sizes, **kind), target).splits in fast
