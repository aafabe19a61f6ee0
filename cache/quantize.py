"""Quantise rows of keys and values and read them back, in FP32 torch. This is the definition; kernels give these bits.

8 bits: code = round(fl(x / scale)), an IEEE-754 division in fp32, then to nearest, ties to even. Magnitudes beyond the
largest finite code become that code, also Inf; NaN becomes 0x7F. A scale of 0 makes largest codes of all numbers but 0,
which becomes NaN. NVFP4: ``warpspec.common.nvfp4`` with the scale as global scale.
"""

from __future__ import annotations

import torch

from warpspec.common import nvfp4
from warpspec.common.kv_formats import FORMATS

CODE_NAN = 0x7F


def quantize_float8(x: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    """uint8 codes of x, floating. scale: fp32, broadcast against x. name: "e4m3" or "e5m2"."""
    quotient = x.float() / scale
    largest = FORMATS[name].largest
    codes = quotient.clamp(-largest, largest).to(FORMATS[name].dtype).view(torch.uint8)
    return torch.where(quotient.isnan(), CODE_NAN, codes)


def dequantize_float8(codes: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    """fp32: uint8 codes times scale."""
    return codes.view(FORMATS[name].dtype).float() * scale


def quantize_nvfp4(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(data [..., D/2], block scales [..., D/16], both uint8) of x [..., D], floating. scale: fp32, broadcast against
    x's leading dimensions."""
    *lead, dim = x.shape
    scales = scale.expand(lead).reshape(-1)
    data, blocks = nvfp4.quantize_rows(x.reshape(-1, dim), scales)
    return data.view(*lead, dim // 2), blocks.view(*lead, dim // nvfp4.NVFP4_BLOCK)


def dequantize_nvfp4(data: torch.Tensor, blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [..., D]: codes times block scales times scale. Arguments as ``quantize_nvfp4`` returns and takes them."""
    values = nvfp4.packed_values(data).unflatten(-1, (-1, nvfp4.NVFP4_BLOCK))
    factors = blocks.view(torch.float8_e4m3fn).float()[..., None]
    return (values * factors).flatten(-2) * scale[..., None]
