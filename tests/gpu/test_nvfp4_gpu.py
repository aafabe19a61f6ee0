"""Attention over NVFP4 keys and values on a Hopper GPU: as ``test_float8_gpu``, with block scales in both layouts."""

import random
from dataclasses import replace

import pytest
import torch
from helpers.float8_cases import NVFP4, Case, check, on_gpu

from warpspec.cache import insert
from warpspec.fmha import attention, attention_varlen

FP16 = torch.float16
pytestmark = pytest.mark.gpu
CASES = [
    Case(1, 3000, (16, 2), batch=3, lengths=(3000, 17, 0), scale="request", by_head=True),
    Case(1, 3000, (8, 1), batch=3, page=16, lengths=(2999, 33, 1), scale="request", sink=True, swizzled=True),
    Case(1, 5000, (8, 1), 64, batch=2, lengths=(5000, 300), splits=3, scale="tensor", swizzled=True),
    Case(1, 5000, (16, 2), swizzled=True),  # a CTA for each SM
    Case(1, 4100, (80, 40), by_head=True, dtype=FP16),
    Case(1, 2000, (8, 8), 256, dtype=FP16, scale=None, swizzled=True),
    Case(1, 2000, (4, 2), 256, page=64, lengths=(1990,), window=(700, 0), normalize=False),
    Case(2, 2000, (8, 2), 128, normalize=False, page=64, lengths=(1990,), by_head=True),
    Case(4, 1000, (4, 1), 64, causal=True, nan=True),
    Case(3, 1100, (8, 2), 128, dtype=FP16, causal=True, shared=True, window=(500, 3)),
    Case(16, 1100, (8, 8), 128, causal=True, sink=True, swizzled=True, nan=True),
    Case(5, 1100, (24, 8), 128, causal=True, page=128, batch=2, lengths=(1000, 3)),
    Case(3, 900, (32, 2), 128, batch=2, page=16, lengths=(900, 33)),
    Case(150, 700, (16, 2), batch=2, page=16, lengths=(700, 33), scale="request", causal=True),
    Case(700, 700, (4, 2), 64, dtype=FP16, window=(90, 0), sink=True, nan=True, swizzled=True),
    Case(700, 1300, (4, 2), 128, dtype=FP16, causal=True, nan=True, by_head=True),
    Case(700, 1300, (4, 2), 128, causal=True, normalize=False, swizzled=True),
    Case(300, 900, (4, 2), 256, dtype=FP16, causal=True, page=32, lengths=(900,), swizzled=True),
    Case(300, 900, (2, 2), 256, window=(64, 64), sink=True, nan=True),
    Case(
        1030, 1300, (4, 2), 128, batch=2, page=48, lengths=(1290, 7), causal=True, swizzled=True, by_head=True
    ),
    Case(2100, 1300, (2, 2), 64, dtype=FP16, window=(90, 5), nan=True, swizzled=True),
    Case(1100, 1300, (4, 2), 256, causal=True, normalize=False, scale="tensor"),
]


def drawn(seed: int) -> Case:
    """A case of a seed: few queries, or some, over requests of any length."""
    draw = random.Random(seed)
    kv_heads, group, dim = draw.choice((1, 2, 8)), draw.choice((1, 3, 4, 8, 12)), draw.choice((64, 128, 256))
    queries, batch = draw.choice((1, 1, 1, 2, 7, 90)), draw.randint(1, 6)
    keys = 4 * draw.randint(1, 1000)
    lengths = tuple(draw.randint(0, keys) for _ in range(batch))
    return Case(
        queries, keys, (group * kv_heads, kv_heads), dim, batch=batch, lengths=lengths,
        dtype=draw.choice((torch.bfloat16, FP16)), page=draw.choice((0, 16, 48, 64, 256)),
        causal=draw.random() < 0.5, sink=draw.random() < 0.3, swizzled=draw.random() < 0.5,
        scale=draw.choice(("tensor", "head", "request", None)), splits=draw.choice((None, None, 1, 3)),
        window=draw.choice((None, None, (draw.randint(0, 3000), 0))), by_head=draw.random() < 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_against_reference(case):
    check(replace(case, float8=NVFP4), on_gpu)


@pytest.mark.parametrize("seed", range(24))
def test_drawn(seed):
    check(replace(drawn(seed), float8=NVFP4), on_gpu)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_reads_what_insert_writes(dim, swizzled):
    """Pages in vLLM's layout, filled by insert's kernel; packed requests, some of one query."""
    torch.manual_seed(0)
    lengths, counts, size, heads = (700, 33, 1, 250), (1, 5, 1, 130), 16, 4
    slots = [-(-length // size) for length in lengths]
    pool = torch.full(
        (sum(slots) + 3, 2 * heads, size, 9 * dim // 16), 0x7F, device="cuda", dtype=torch.uint8
    )
    k, k_blocks, v, v_blocks = nvfp4_views(pool, dim)
    table = torch.zeros(4, max(slots), dtype=torch.int32, device="cuda")
    pages = iter((torch.randperm(sum(slots), device="cuda") + 2).tolist())
    for b, count in enumerate(slots):
        table[b, :count] = torch.tensor([next(pages) for _ in range(count)])
    blocks = {"k_block_scales": k_blocks, "v_block_scales": v_blocks, "swizzled": swizzled}
    scales = {f"{n}_scale": torch.tensor([0.01], device="cuda") for n in "kv"}
    for b, length in enumerate(lengths):
        rows = [torch.randn(length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        key = torch.arange(length, device="cuda")
        places = table[b].long()[key // size] * size + key % size
        insert(*rows, k, v, places, format="nvfp4", **blocks, **scales)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device="cuda")
    q = torch.randn(sum(counts), 2 * heads, dim, device="cuda", dtype=torch.bfloat16)
    rest = {
        "page_table": table,
        "kv_lengths": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        "max_seqlen_q": max(counts),
        "causal": True,
    }
    got = attention_varlen(q, k, v, starts, **rest, **blocks, **scales)
    wanted = attention_varlen(q, k, v, starts, **rest, **blocks, **scales, backend="reference")
    error = (got - wanted).float().norm(dim=(0, 2)) / wanted.float().norm(dim=(0, 2))
    assert error.max() < 4e-3


def test_packed_keys_dequantised_in_turn():
    """Many query rows over packed keys, some of nobody. Calls follow each other in the same memory of 16-bit keys."""
    calls = []
    for seed in range(4):
        case = Case(1, 1650, (16, 2), dtype=(torch.bfloat16, FP16)[seed % 2], float8=NVFP4).arguments(seed)
        kept = {name: case[name].cuda() for name in ("k_scale", "v_scale")}
        for name in ("k", "v", "k_block_scales", "v_block_scales"):
            kept[name] = case[name][0].cuda()
            kept[name][1600:] = 0x7F
        kept["q"] = torch.randn(703, 16, 128, device="cuda").to(case["q"].dtype)
        starts = {"cu_seqlens_q": (0, 300, 303, 703), "cu_seqlens_k": (0, 900, 900, 1600)}
        kept |= {name: torch.tensor(each, dtype=torch.int32, device="cuda") for name, each in starts.items()}
        calls.append(kept | {"max_seqlen_q": 400, "max_seqlen_k": 900, "causal": True})
    for call, got in zip(calls, [attention_varlen(**call) for call in calls], strict=True):
        wanted = attention_varlen(**call, backend="reference")
        assert got[300:303].eq(0).all()
        error = (got - wanted).float().norm(dim=(0, 2)) / wanted.float().norm(dim=(0, 2))
        assert error.max() < 4e-3


def nvfp4_views(pool: torch.Tensor, dim: int) -> tuple:
    """K's data and scales, V's data and scales, [pages, page_size, Hkv, row], in a pool of vLLM's: a page has these
    four one after another, each [Hkv, page_size, row]."""
    count, heads, size = pool.shape[0], pool.shape[1] // 2, pool.shape[2]
    flat, found, at = pool.view(count, -1), [], 0
    for row in 2 * (dim // 2, dim // 16):
        width = heads * size * row
        found.append(flat[:, at : at + width].unflatten(1, (heads, size, row)).transpose(1, 2))
        at += width
    return tuple(found)


def test_scales_of_absent_requests_and_pages():
    """NaN in the scales of requests without keys, and pages of numbers out of range, reach nobody."""
    arguments = Case(
        1, 300, (8, 1), batch=2, lengths=(300, 0), scale="request", page=64, float8=NVFP4
    ).arguments()
    wanted, _ = on_gpu(arguments)
    for name in ("k_scale", "v_scale"):
        arguments[name][1] = torch.nan
    arguments["page_table"][1] = torch.tensor([-5, 2**30, 7, 1000, 99], dtype=torch.int32)
    got, _ = on_gpu(arguments)
    assert torch.equal(got, wanted) and not bool(got[1].any())
    moved = {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    moved["page_table"][0, 1] = 2**30  # counts as a page of zeros
    assert attention(**moved).isfinite().all()
