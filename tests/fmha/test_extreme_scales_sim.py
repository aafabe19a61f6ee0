"""Scales, logits, scales of quantised keys and values, and codes at the ends of their ranges: kernels against FP32,
simulated."""

import math

import pytest
import torch
from helpers.float8_cases import NVFP4, check_extreme, extremes
from helpers.suites import long

from warpspec.common.launch import simulating
from warpspec.fmha import attention


def compare(arguments: dict, arch: str) -> None:
    """o and lse of a kernel against the reference's."""
    wanted, wanted_lse = attention(**arguments, return_lse=True, backend="reference")
    with simulating(arch):
        o, lse = attention(**arguments, return_lse=True, backend="sim")
    check_extreme(o, lse, wanted, wanted_lse)


@pytest.mark.long
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2, NVFP4])
def test_scales_and_codes(format, arch, queries):
    for arguments in extremes(format, queries):
        compare(arguments, arch)


def close_logits(largest: float, dtype: torch.dtype) -> dict:
    """q and k whose logits, with a scale of 1, are ``largest`` less a few spacings of fp32 numbers. They rise in the
    order in which a kernel visits its tiles, from the last key to the first, so that every tile moves the reference.
    All products are exact in fp32."""
    keys, dim, side = 300, 64, math.isqrt(round(largest))
    assert side * side == largest
    step = max(1.0, largest * 2.0**-23)  # spacing
    k, q = torch.zeros(1, keys, 1, dim), torch.zeros(1, 6, 1, dim)
    q[..., 0], k[..., 0] = side, side
    q[..., 1], k[..., 1] = step, -(torch.arange(keys) // 60)[:, None].float()
    v = torch.randn(1, keys, 1, dim, generator=torch.Generator().manual_seed(3))
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "scale": 1.0}


@pytest.mark.parametrize(
    ("arch", "dtype", "largest"),
    [
        ("sm_90a", torch.bfloat16, 2.0**24),
        ("sm_100a", torch.bfloat16, 2.0**28),
        *(
            long(arch, dtype, largest)
            for dtype, exponents in ((torch.bfloat16, (22, 26, 28)), (torch.float16, (20, 24, 26)))
            for arch in ("sm_90a", "sm_100a")
            for largest in (2.0**n for n in exponents)
        ),
    ],
)
def test_close_large_logits(arch, dtype, largest):
    """Weights of all tiles are relative to one number, however it is rounded."""
    compare(close_logits(largest, dtype) | {"causal": True}, arch)


@pytest.mark.parametrize("arch", ["sm_90a", long("sm_100a")])
@pytest.mark.parametrize("scale", [2.0**28, long(-(2.0**60))])
def test_large_scales(arch, scale):
    """Logits beyond what the exponential's multiply-add can take."""
    draw = torch.Generator().manual_seed(4)
    q, k = (torch.randint(-2, 3, (1, n, 1, 64), generator=draw).bfloat16() for n in (6, 100))
    v = torch.randn(1, 100, 1, 64, generator=draw).bfloat16()
    compare({"q": q, "k": k, "v": v, "scale": scale}, arch)


@pytest.mark.parametrize("arch", ["sm_90a", long("sm_100a")])
@pytest.mark.parametrize("exponent", [-124, long(96)])
def test_scales_that_make_up_for_keys(arch, exponent):
    """A scale at the end of its range beside keys at the other end of theirs; some keys are hidden."""
    draw = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, n, 1, 64, generator=draw) for n in (6, 100, 100))
    call = {"q": q.bfloat16(), "k": (k * 2.0 ** -(exponent + 4)).bfloat16(), "v": v.bfloat16()}
    compare(call | {"scale": 2.0**exponent, "causal": True}, arch)
