"""Insert by its definition, in FP32 torch: what the kernel is compared with."""

from __future__ import annotations

import torch

from warpspec.cache.quantize import quantize_float8, quantize_nvfp4
from warpspec.common.kv_formats import FORMATS, swizzled_place


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean square + eps) * weight along the last dimension, in fp32, rounded once to x's dtype."""
    rows = x.float()
    factor = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * factor * weight.float()).to(x.dtype)


def angles_at(cos_sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, fp32 [T, R/2] each, of each position; NaN for a position that the table lacks."""
    inside = (positions >= 0) & (positions < len(cos_sin))
    if len(cos_sin) == 0:
        rows = cos_sin.new_full((len(positions), cos_sin.shape[1]), torch.nan, dtype=torch.float32)
    else:
        rows = cos_sin[torch.where(inside, positions, 0).long()].float()
    return torch.where(inside[:, None], rows, torch.nan).chunk(2, dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, H, D] with its first R numbers rotated in fp32 and rounded to x's dtype.

    cos, sin: fp32 [T, R/2]. Number i is paired with number i + R/2, or, interleaved, 2 i with 2 i + 1. Each product is
    rounded before the two are added.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    first, second = (
        (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    )
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def project(x, weight, eps, cos_sin, positions, interleaved) -> torch.Tensor:
    """Normalise rows if there is a weight, rotate them if there are positions."""
    if weight is not None:
        x = rms_norm(x, weight, eps)
    if positions is not None:
        x = rotate(x, *angles_at(cos_sin, positions), interleaved)
    return x


def store(x, cache, slots, name: str, scale, blocks, swizzled: bool) -> None:
    """Quantise the tokens x [T, H, D] that have slots and store them.

    cache: [pages, page_size, H, row], of bytes unless the format has 16 bits. blocks: block scales, uint8 [pages,
    page_size, H, D/16], or None. scale: fp32 [1] or [H], or None.
    """
    pages, size = cache.shape[:2]
    slots = slots.long()
    kept = ((slots >= 0) & (slots < pages * size)).nonzero()[:, 0]
    rows, slots = x[kept], slots[kept]
    page, row = slots // size, slots % size
    if not FORMATS[name].scaled:
        cache[page, row] = rows
        return
    scale = torch.ones(1, dtype=torch.float32, device=x.device) if scale is None else scale
    if name != "nvfp4":
        cache[page, row] = quantize_float8(rows, scale[:, None], name)
        return
    cache[page, row], codes = quantize_nvfp4(rows, scale)
    if swizzled:
        block = torch.arange(codes.shape[-1], device=x.device)
        row, column = swizzled_place(row[:, None], block, codes.shape[-1])
        blocks.transpose(1, 2)[page[:, None, None], torch.arange(x.shape[1], device=x.device)[:, None],
                               row[:, None], column[:, None]] = codes  # fmt: skip
    else:
        blocks[page, row] = codes
