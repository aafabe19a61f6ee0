"""FP8 keys and values: the definition, and bad arguments by name."""

import math
import os
from unittest import mock

import pytest
import torch
from helpers.float8_cases import Case

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import simulating
from warpspec.fmha import attention
from warpspec.fmha.flash_attn import flash_attn_func

CASE = Case(3, 20, (4, 2), 64, batch=2, scale="request")


def test_reference_is_attention_of_dequantised_values():
    arguments = CASE.arguments()
    k, v = (
        (arguments[name].float() * arguments[f"{name}_scale"][:, None, :, None]).repeat_interleave(2, dim=2)
        for name in ("k", "v")
    )
    logits = torch.einsum("bqhd,bkhd->bhqk", arguments["q"].double(), k.double()) / math.sqrt(64)
    wanted = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.double())
    o, lse = attention(**arguments, return_lse=True, backend="reference")
    torch.testing.assert_close(o.double(), wanted, rtol=2.0**-7, atol=1e-4)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


def one(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


WRONG = [
    (TypeError, "k", lambda a: {"k": a["k"].float()}),
    (TypeError, "v", lambda a: {"v": a["v"].to(torch.float8_e5m2)}),
    (TypeError, "v", lambda a: {"v": a["v"].bfloat16()}),
    (TypeError, "q", lambda a: {"q": a["q"].to(torch.float8_e4m3fn)}),
    (TypeError, "k_scale", lambda a: {"k_scale": 0.5}),
    (TypeError, "k_scale", lambda a: {"k_scale": one(2, dtype=torch.bfloat16)}),
    (TypeError, "v_scale", lambda a: {"v_scale": one(2).to_sparse()}),
    (ValueError, "v_scale", lambda a: {"v_scale": one(3)}),
    (ValueError, "v_scale", lambda a: {"v_scale": one(2).to("meta")}),
    (ValueError, "k_scale", lambda a: {"k": a["k"].bfloat16(), "v": a["v"].bfloat16()}),
    (ValueError, "k", lambda a: {"k": spaced(a["k"])}),
]


def spaced(t: torch.Tensor) -> torch.Tensor:
    """The tensor with rows 8 bytes apart from each other, which TMA does not read."""
    return torch.nn.functional.pad(t.view(torch.uint8), (0, 8)).view(t.dtype)[..., : t.shape[-1]]


@pytest.mark.parametrize("error, name, changes", WRONG)
def test_names_the_argument(error, name, changes):
    arguments = CASE.arguments()
    with pytest.raises(error, match=rf"^{name}: "):
        attention(**arguments | changes(arguments), backend="reference")


def test_gradients_are_refused():
    arguments = CASE.arguments()
    scale = arguments["k_scale"].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^k_scale: "):
        attention(**arguments | {"k_scale": scale}, backend="reference")
    arguments["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^k: "):
        attention(**arguments, backend="reference")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_kernels_do_not_do(arch):
    wide = Case(3, 20, (4, 2), 512, scale=None).arguments()
    kernel = arch.removesuffix("a").replace("_", "")
    with simulating(arch), pytest.raises(UnsupportedProblem, match=rf"{kernel}.*k and v in e4m3.*got 512"):
        attention(**wide, backend="sim")


def test_flash_attn_names_descales():
    """flash-attn 3's descales, one number expanded to [B, Hkv], are the scales."""
    arguments = CASE.arguments()
    scale = torch.tensor(0.25).expand(2, 2)
    wanted = attention(
        arguments["q"], arguments["k"], arguments["v"], k_scale=scale, v_scale=2 * scale, backend="reference"
    )
    with mock.patch.dict(os.environ, WARPSPEC_BACKEND="reference"):
        got = flash_attn_func(
            arguments["q"], arguments["k"], arguments["v"], k_descale=scale, v_descale=2 * scale
        )
    assert torch.equal(got, wanted)
