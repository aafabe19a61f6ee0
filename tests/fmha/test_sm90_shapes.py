"""Which tile shape a problem gets on sm_90a (``fmha.sm90.shapes``). Plans only; nothing is compiled."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.page_layouts import PAGE_SIZES
from helpers.simulate import plan_for

from warpspec.common.hardware import WARP_THREADS
from warpspec.common.launch import simulated
from warpspec.fmha import sm90
from warpspec.fmha.sm90.shapes import (
    BIASED,
    BIASED_PAGES,
    DECODE,
    LONG,
    NARROW,
    PREFILL,
    SHARED,
    SHORT,
    SMALL,
    SPLIT,
    fits_pages,
)

HALF = simulated("sm_90a", sm_count=66)


def plan(*arguments, **options):
    """(configuration, splits)"""
    return plan_of(*arguments, **options)[:2]


def plan_of(
    d=128, batch=2, seq_q=8192, seq_k=8192, heads=(32, 32), page_size=None, shared=False, bias=None,
    target="sm_90a", **options,
):  # fmt: skip

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, kv = meta(batch, seq_q, heads[0], d), meta(batch, seq_k, heads[1], d)
    if page_size:
        pages = -(-seq_k // page_size)
        kv = meta(batch * pages, page_size, heads[1], d)
        options["kv_lengths"] = meta(batch, dtype=torch.int32)
        options["page_table"] = meta(batch, pages, dtype=torch.int32)
    if bias:
        options["bias"] = meta(1, 1, seq_q, seq_k, dtype=bias)
    return plan_for(target, q=q, k=kv, v=None if shared else kv, **options)


@pytest.mark.parametrize(("shape", "options"), [
    (LONG[128], dict(causal=True)),
    (LONG[128], dict(seq_q=2048, batch=8)),
    (LONG[128], dict(seq_q=2048, heads=(64, 8), causal=True)),
    (LONG[128], dict(causal=True, page_size=16)),
    (PREFILL[128], dict(seq_q=2048, batch=8, causal=True)),
    (PREFILL[128], dict(seq_q=2048, batch=1, heads=(8, 8))),  # 88 of LONG's tiles, on 132 SMs
    (PREFILL[128], dict(causal=True, page_size=64)),
    (SHORT[128], dict(batch=7, seq_q=320, seq_k=27295, heads=(32, 8), causal=True, page_size=128)),
    (LONG[128], dict(causal=True, window=(4096, 0))),
    (PREFILL[64], dict(d=64)),
    (SHORT[64], dict(d=64, heads=(64, 8), causal=True, window=(1023, 0))),
    (SHORT[64], dict(d=64, seq_q=617, seq_k=617, heads=(64, 8), causal=True)),
    (SHORT[128], dict(batch=12, seq_q=371, seq_k=371, heads=(32, 8), causal=True)),
    (PREFILL[128], dict(batch=12, seq_q=371, seq_k=371, causal=True)),  # half of 192 queries' keys are not seen
    (SMALL[128], dict(seq_q=250, seq_k=320, heads=(4, 1), causal=True)),
    (SMALL[256], dict(d=256, seq_q=320, seq_k=320, heads=(4, 1), causal=True, window=(511, 0))),
    (PREFILL[128], dict(batch=1, seq_q=250, seq_k=8000, heads=(4, 1), causal=True)),
    (NARROW[64], dict(d=64, causal=True, window=(127, 0))),
    (BIASED[128], dict(seq_q=256, seq_k=256, bias=torch.float32)),
    (BIASED_PAGES[128], dict(seq_q=256, seq_k=256, bias=torch.float32, page_size=64)),
    (DECODE[64], dict(d=64, batch=128, seq_q=1, seq_k=1024, heads=(64, 8))),
    (DECODE[128], dict(batch=20, seq_q=1, seq_k=1024, heads=(32, 8))),  # three parts each
    (SPLIT[64], dict(d=64, batch=1, seq_q=1, seq_k=65536, heads=(64, 8))),
    (SHARED[512], dict(d=512, heads=(128, 1), shared=True)),
])  # fmt: skip
def test_what_suits_a_problem(shape, options):
    config, splits = plan(**options)
    assert config.shape is shape
    assert splits > 1 or shape not in (SPLIT[64], SPLIT[128]) or shape is SMALL[128]


def test_shapes_follow_the_number_of_sms():
    """A GPU with half the SMs gives half the work the shape that the whole GPU gives all of it."""
    for shape, batch, options in (
        (LONG[128], 1, dict(seq_q=2048, heads=(32, 4), causal=True)),
        (SHORT[128], 6, dict(seq_q=371, seq_k=371, heads=(32, 8), causal=True)),
        (PREFILL[128], 2, dict(seq_q=250, seq_k=320, heads=(16, 4), causal=True)),
    ):
        assert plan(batch=batch, **options, target=HALF)[0].shape == shape, options
        assert plan(batch=2 * batch, **options)[0].shape == shape
        assert plan(batch=batch, **options)[0].shape != shape


def test_sections_follow_the_l2():
    """Causal heads worked on at a time: fewer with less L2 (of 16384 keys of D 128, five fit 40 MiB)."""
    whole = simulated("sm_90a")
    sections = [
        plan_of(
            batch=1, seq_q=16384, seq_k=16384, causal=True, target=replace(whole, l2_bytes=mib << 20)
        ).section
        for mib in (25, 50, 400)
    ]
    assert sections == sorted(sections) and len(set(sections)) > 1


@pytest.mark.parametrize(("d", "page_size"), list(itertools.product(PREFILL, PAGE_SIZES)))
def test_every_problem_through_pages_has_a_shape_that_fits(d, page_size):
    heads = [(32, 32), (64, 8), (24, 8), (128, 1)]
    masks = [dict(), dict(causal=True), dict(causal=True, window=(100, 0)), dict(window=(5000, None))]
    for seq_q, of, mask, bias, shared in itertools.product(
        (1, 9, 300, 8192), heads, masks, (None, torch.bfloat16), (False, True)
    ):
        if bias and seq_q > 300:
            continue
        config, _ = plan(
            d, seq_q=seq_q, seq_k=512 * 16, heads=of, page_size=page_size, shared=shared, bias=bias, **mask
        )
        assert fits_pages(config.tile_n, page_size)


@pytest.mark.parametrize(("tile_n", "page_size", "keys"), [
    (128, 16, 16), (128, 128, 128), (128, 384, 128), (128, 48, 16), (80, 64, 16), (80, 80, 80), (64, 112, 16),
])  # fmt: skip
def test_a_tile_is_read_in_boxes_that_lie_within_pages(tile_n, page_size, keys):
    shape = replace(LONG[128], tile_n=tile_n)
    config = sm90.AttentionConfig(
        "bfloat16", head_dim=128, shape=shape, page_size=page_size, has_kv_lengths=True
    )
    assert (config.page_keys, config.tile_pages) == (keys, tile_n // keys)
    assert config.kv_boxes()[1] <= WARP_THREADS  # a lane has the page of each


def test_pages_of_any_size_have_a_shape():
    for page_size in (48, 80, 112, 256):
        for seq_q in (1, 300, 8192):
            plan(128, seq_q=seq_q, seq_k=page_size * 8, heads=(32, 8), page_size=page_size, causal=True)
