"""torch._scaled_mm for block-scaled operands: many tests use it as reference, and torch's CPU build lacks it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpspec.sim.pretend.tensors import mark

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALES = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}  # elements of a row that share a scale
TILE_ROWS, TILE_COLUMNS, QUARTER = 128, 4, 32  # cuBLAS's layout of scales ("Block scaling factors layout")


def scaled_mm(original: Callable) -> Callable:
    """Extend torch._scaled_mm to block-scaled operands."""

    def _scaled_mm(a, b, scale_a, scale_b, *args, bias=None, out_dtype=None, **kwargs):
        if scale_a.numel() < 2 or scale_a.dtype not in SCALES:
            return original(a, b, scale_a, scale_b, *args, bias=bias, out_dtype=out_dtype, **kwargs)
        left, right = values(a), values(b.transpose(0, 1))
        left *= scales(scale_a, *left.shape)
        right *= scales(scale_b, *right.shape)
        product = left @ right.T
        if bias is not None:
            product += bias
        return mark(product.to(out_dtype or torch.bfloat16))

    return _scaled_mm


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Decode a matrix of fp8, or of fp4 packed in pairs along a row, to fp32."""
    if tensor.dtype is not torch.float4_e2m1fn_x2:
        return tensor.float()
    data = tensor.contiguous().view(torch.uint8)
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    return table[codes]


def scales(packed: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Expand cuBLAS's layout of block scales to one scale for each element [rows, columns]."""
    width = SCALES[packed.dtype]
    blocks = -(-columns // width)
    tiles = (-(-rows // TILE_ROWS), -(-blocks // TILE_COLUMNS))
    flat = packed.contiguous().view(torch.uint8).flatten().view(packed.dtype).float()
    flat = flat[: tiles[0] * tiles[1] * TILE_ROWS * TILE_COLUMNS]
    tiled = flat.view(*tiles, QUARTER, TILE_ROWS // QUARTER, TILE_COLUMNS)  # row % 32, row // 32, column
    plain = tiled.permute(0, 3, 2, 1, 4).reshape(tiles[0] * TILE_ROWS, tiles[1] * TILE_COLUMNS)
    return plain[:rows, :blocks].repeat_interleave(width, 1)[:, :columns]
