"""Keys and values in NVFP4: the definition, what ``cache.insert`` writes read back, and bad arguments by name."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from helpers.float8_cases import NVFP4, Case

from warpspec.cache import insert
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import simulating
from warpspec.fmha import attention, attention_varlen
from warpspec.fmha.flash_attn import flash_attn_func

CASE = Case(3, 20, (4, 2), 64, batch=2, scale="request", float8=NVFP4)
CACHED = ("k", "v", "k_block_scales", "v_block_scales")
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1's codes 0 to 7


def dequantised(data: torch.Tensor, blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [B, Sk, Hkv, D], from the definition. scale: [B, Hkv]."""
    table = torch.tensor((*VALUES, *(-value for value in VALUES)))
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    factors = blocks.view(torch.float8_e4m3fn).float().repeat_interleave(16, dim=-1)
    return table[codes.long()] * factors * scale[:, None, :, None]


@pytest.mark.parametrize("swizzled", [False, True])
def test_reference_is_attention_of_dequantised_values(swizzled):
    linear, arguments = CASE.arguments(), replace(CASE, swizzled=swizzled).arguments()
    assert torch.equal(linear["v_block_scales"], arguments["v_block_scales"]) != swizzled
    k, v = (dequantised(linear[n], linear[f"{n}_block_scales"], linear[f"{n}_scale"]) for n in "kv")
    wanted = attention(arguments["q"].float().bfloat16(), k.bfloat16(), v.bfloat16(), backend="reference")
    o, lse = attention(**arguments, return_lse=True, backend="reference")
    logits = (
        torch.einsum("bqhd,bkhd->bhqk", arguments["q"].double(), k.double().repeat_interleave(2, 2)) / 8.0
    )
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    exact = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.double().repeat_interleave(2, 2))
    torch.testing.assert_close(o.double(), exact, rtol=2.0**-7, atol=1e-4)
    assert (o - wanted).float().norm() < 0.05 * wanted.float().norm()  # scales times 2 bits of k_scale


@pytest.mark.parametrize("swizzled", [False, True])
def test_reads_what_insert_writes(swizzled):
    """Pages that ``insert`` fills hold keys and values to within NVFP4's rounding."""
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(40, 2, 64, generator=generator).bfloat16() for _ in range(2))
    cache = {n: torch.zeros(4, 16, 2, 32, dtype=torch.uint8) for n in "kv"}
    blocks = {f"{n}_block_scales": torch.zeros(4, 16, 2, 4, dtype=torch.uint8) for n in "kv"}
    scales = {f"{n}_scale": torch.tensor(0.01) for n in "kv"}
    slots = torch.cat([torch.arange(16 * page, 16 * page + 16) for page in (2, 0, 3)])[:40]
    insert(
        k, v, cache["k"], cache["v"], slots, format="nvfp4", swizzled=swizzled, backend="reference",
        **blocks, **scales,
    )  # fmt: skip
    q = torch.randn(1, 2, 4, 64, generator=generator).bfloat16()
    pages = {
        "page_table": torch.tensor([[2, 0, 3]], dtype=torch.int32),
        "kv_lengths": torch.tensor([40], dtype=torch.int32),
    }
    got = attention(
        q, cache["k"], cache["v"], swizzled=swizzled, backend="reference", **blocks, **scales, **pages
    )
    wanted = attention(q, k[None], v[None], backend="reference")
    assert 0.01 < (got - wanted).float().norm() / wanted.float().norm() < 0.2
    packed = attention_varlen(
        q[0], cache["k"], cache["v"], cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32), max_seqlen_q=2,
        swizzled=swizzled, backend="reference", **blocks, **scales, **pages,
    )  # fmt: skip
    assert torch.equal(packed, got[0])


def test_flash_attn_names():
    arguments = CASE.arguments()
    wanted = attention(**arguments, backend="reference")
    arguments |= {f"{n}_descale": arguments.pop(f"{n}_scale") for n in "kv"} | {"window_size": (-1, -1)}
    del arguments["window"], arguments["normalize"], arguments["num_splits"]
    with mock.patch.dict(os.environ, WARPSPEC_BACKEND="reference"):
        assert torch.equal(flash_attn_func(**arguments), wanted)


def without(name):
    return lambda a: {name: None}


WRONG = [
    (ValueError, "k_block_scales", without("k_block_scales")),
    (ValueError, "v_block_scales", without("v_block_scales")),
    (ValueError, "v_block_scales", lambda a: {"v": None}),
    (ValueError, "k_block_scales", lambda a: {n: a[n].view(torch.float8_e5m2).repeat(1, 1, 1, 2) for n in "kv"}),
    (ValueError, "k_block_scales", lambda a: {"k_block_scales": a["k_block_scales"][:, :-1]}),
    (ValueError, "v_block_scales", lambda a: {"v_block_scales": a["v_block_scales"].to("meta")}),
    (TypeError, "k_block_scales", lambda a: {"k_block_scales": a["k_block_scales"].float()}),
    (TypeError, "v_block_scales", lambda a: {"v_block_scales": [1.0]}),
    (ValueError, "v_block_scales", lambda a: {"v_block_scales": a["v_block_scales"].repeat(1, 1, 1, 2)[..., ::2]}),
    (ValueError, "k_block_scales", lambda a: {"k_block_scales": odd_rows(a["k_block_scales"])}),
    (TypeError, "v", lambda a: {"v": a["v"].view(torch.float8_e4m3fn)}),
    (TypeError, "v", lambda a: {"v": a["q"][:, :, :2]}),
    (ValueError, "k", lambda a: {"k": a["k"].repeat(1, 1, 1, 2)}),
    (TypeError, "k_scale", lambda a: {"k_scale": 0.5}),
    (ValueError, "v_scale", lambda a: {"v_scale": a["v_scale"].to("meta")}),
    (TypeError, "swizzled", lambda a: {"swizzled": 1}),
    (ValueError, "swizzled", lambda a: {"swizzled": True, "v": None, "v_block_scales": None}),
    (ValueError, "swizzled", lambda a: {"swizzled": True} | {n: a[n][:, :18] for n in CACHED}),
]  # fmt: skip


def odd_rows(blocks: torch.Tensor) -> torch.Tensor:
    """The block scales in rows of a byte more."""
    return torch.zeros(*blocks.shape[:-1], blocks.shape[-1] + 1, dtype=torch.uint8)[..., :-1]


@pytest.mark.parametrize("error, name, changes", WRONG)
def test_names_the_argument(error, name, changes):
    arguments = CASE.arguments()
    with pytest.raises(error, match=rf"^{name}: "):
        attention(**arguments | changes(arguments), backend="reference")


def test_what_has_no_block_scales():
    arguments = Case(3, 20, (4, 2), 64, scale=None).arguments()
    blocks = torch.zeros(1, 20, 2, 4, dtype=torch.uint8)
    for name, value in (("k_block_scales", blocks), ("v_block_scales", blocks), ("swizzled", True)):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            attention(**arguments, **{name: value}, backend="reference")


def test_gradients_are_refused():
    arguments = CASE.arguments()
    arguments["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^k: .*NVFP4"):
        attention(**arguments, backend="reference")


def test_what_kernels_do_not_do():
    with simulating("sm_100a"), pytest.raises(UnsupportedProblem, match=r"sm100.*k and v in nvfp4.*got 512"):
        attention(**replace(CASE, dim=512).arguments(), backend="sim")
