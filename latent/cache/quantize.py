"""Quantise rows and read them back, in FP32 torch. This is the definition; kernels give the same bits.

Let amax be a block's largest magnitude, or the format's min_amax if that is larger. The block's scale is 2**k with the
least integer k for which amax <= largest value * 2**k. Values are x * 2**-k, rounded to nearest, ties to even; signs
are kept, also those of zeros. A block that holds NaN or Inf gets the scale NaN (ue8m0 255), and all its values become
e4m3 NaN or e2m1 +6, so that it reads as NaN throughout.

Formats with fp32 scales hold any scales, which readers take as they are. With ``powers=False`` rows are stored as vLLM
stores them: the scale is amax / largest value, at least FLT_MIN, and values are x / scale. Powers of two lose no bit of
a key that is converted to bf16; other scales do.
"""

from __future__ import annotations

import torch

from warpspec.common import nvfp4
from warpspec.common.hardware import BF16_BYTES
from warpspec.latent.cache.formats import RowFormat

E4M3_NAN = nvfp4.E4M3_NAN
UE8M0_BIAS, UE8M0_NAN = nvfp4.UE8M0_BIAS, nvfp4.UE8M0_NAN
FP32_EXPONENT_BIT = 23
FP32_MANTISSA = (1 << FP32_EXPONENT_BIT) - 1
FP32_BIAS = 127
E2M1_NAN_CODE = 7  # e2m1 has no NaN: its largest value stands in, as in NVFP4
# The largest value of each type is 1.m * 2**e: (e, the bits of m in fp32).
LARGEST = {"e4m3": (8, 0x600000), "e2m1": (2, 0x400000)}
E4M3_LARGEST = 448.0


def scale_exponents(amax: torch.Tensor, value: str) -> torch.Tensor:
    """int32 k for fp32 amax: the least k with amax <= largest * 2**k; unspecified for NaN and Inf.

    value: "e4m3" or "e2m1". Computed from the bits: with amax = 1.m * 2**e, k is e minus the largest value's exponent,
    plus one if m exceeds the largest value's mantissa.
    """
    exponent, mantissa = LARGEST[value]
    bits = amax.float().view(torch.int32)
    rounded = (bits + (FP32_MANTISSA - mantissa)) >> FP32_EXPONENT_BIT
    return rounded - FP32_BIAS - exponent


def quantize_rows(
    rows: torch.Tensor, fmt: RowFormat, powers: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(data uint8 [..., data_bytes], scales uint8 [..., scale_bytes]) of rows [..., dim], bf16 or fp32.

    data: values, then the tail. fp32 rows are quantised without rounding to bf16 first; their tail is rounded to bf16.
    powers: scales are powers of two. Others need a format of e4m3 with fp32 scales: ValueError.
    """
    if not (powers or (fmt.value == "e4m3" and fmt.scale == "fp32")):
        raise ValueError(f"powers: scales of rows in {fmt.name!r} are powers of two, got {powers}")
    shape = rows.shape[:-1]
    tail = _bytes_of(rows[..., fmt.values :].bfloat16(), fmt.tail * BF16_BYTES)
    if fmt.value == "bf16":
        values = _bytes_of(rows[..., : fmt.values].bfloat16(), fmt.value_bytes)
        return torch.cat((values, tail), dim=-1), rows.new_empty((*shape, 0), dtype=torch.uint8)
    blocks = rows[..., : fmt.values].float().unflatten(-1, (fmt.blocks, fmt.block))
    amax = blocks.abs().amax(-1)  # NaN if any value is NaN
    finite = amax.isfinite()
    amax = torch.where(finite, amax, 1.0)
    k = scale_exponents(amax.clamp(min=fmt.min_amax), fmt.value)
    factors, scaled = torch.ldexp(torch.ones_like(amax), k), torch.ldexp(blocks, -k[..., None])
    if not powers:
        factors = (amax / E4M3_LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = blocks / factors[..., None]
    scaled = torch.where(finite[..., None], scaled, 0.0)
    if fmt.value == "e4m3":
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        codes = torch.where(finite[..., None], codes, E4M3_NAN).flatten(-2)
    else:
        codes = torch.where(finite[..., None], nvfp4.e2m1_codes(scaled), E2M1_NAN_CODE).flatten(-2)
        codes = nvfp4.pack(codes)
    if fmt.scale == "ue8m0":
        scales = torch.where(finite, k + UE8M0_BIAS, UE8M0_NAN).to(torch.uint8)
    else:
        scales = _bytes_of(torch.where(finite, factors, torch.nan), 4 * fmt.blocks)
    padding = scales.new_zeros((*shape, fmt.padding))
    return torch.cat((codes, tail), dim=-1), torch.cat((scales, padding), dim=-1)


def dequantize_rows(data: torch.Tensor, scales: torch.Tensor, fmt: RowFormat) -> torch.Tensor:
    """fp32 [..., dim] of what ``quantize_rows`` returns; exact where scales are powers of two."""
    tail = data[..., fmt.value_bytes :].contiguous().view(torch.bfloat16).float()
    stored = data[..., : fmt.value_bytes].contiguous()
    if fmt.value == "bf16":
        return torch.cat((stored.view(torch.bfloat16).float(), tail), dim=-1)
    if fmt.value == "e4m3":
        values = stored.view(torch.float8_e4m3fn).float()
    else:
        values = nvfp4.packed_values(stored)
    used = scales[..., : fmt.scale_bytes - fmt.padding].contiguous()
    if fmt.scale == "ue8m0":
        factors = torch.ldexp(torch.ones_like(used, dtype=torch.float32), used.int() - UE8M0_BIAS)
        factors = torch.where(used == UE8M0_NAN, torch.nan, factors)
    else:
        factors = used.view(torch.float32)
    values = values.unflatten(-1, (fmt.blocks, fmt.block)) * factors[..., None]
    return torch.cat((values.flatten(-2), tail), dim=-1)


def round_trip(rows: torch.Tensor, fmt: RowFormat) -> torch.Tensor:
    """fp32 [..., dim]: rows as they read after being stored."""
    return dequantize_rows(*quantize_rows(rows, fmt), fmt)


def _bytes_of(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """uint8 [..., count]: the bytes of a tensor's last dimension."""
    # A tensor without elements is contiguous whatever its strides, but a view as bytes asks for a stride of 1.
    plain = tensor.clone(memory_format=torch.contiguous_format)
    return plain.view(torch.uint8).reshape(*tensor.shape[:-1], count)
