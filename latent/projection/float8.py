"""e4m3 numbers with an fp32 scale a block: activations by 1 x 128, weights by 128 x 128."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.common.checks import check_floating, check_int, check_operand, check_tensor
from warpspec.latent.cache.quantize import E4M3_NAN, scale_exponents

FP8_BLOCK = 128  # numbers of a row that share a scale
MIN_AMAX = 1e-4  # lower bound of a block's amax when its scale is chosen


@dataclass(frozen=True, eq=False)
class Float8Tensor:
    """data * scales, with a scale for every ``rows`` x 128 numbers of the last two dimensions.

    data: float8_e4m3fn [..., R, C], C a multiple of 128. scales: fp32 [..., ceil(R / rows), C / 128], where rows is 1
    or 128. Raises TypeError or ValueError naming the field.
    """

    data: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self):
        data, scales = self.data, self.scales
        check_tensor("data", data, (torch.float8_e4m3fn,))
        if data.dim() < 2 or data.shape[-1] % FP8_BLOCK:
            raise ValueError(
                f"data: must be [..., R, C], C a multiple of {FP8_BLOCK}, got shape {list(data.shape)}"
            )
        *lead, rows, columns = data.shape
        shapes = {
            (*lead, -(-rows // of), columns // FP8_BLOCK): of for of in (FP8_BLOCK, 1)
        }  # one row: rows of 1
        if isinstance(scales, torch.Tensor) and tuple(scales.shape) not in shapes:
            allowed = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"scales: shape must be {allowed}, got {list(scales.shape)}")
        check_operand("scales", scales, (torch.float32,), (-1,) * data.dim(), data.device)

    @property
    def rows(self) -> int:
        """Rows that share a scale: 1 or 128."""
        return 1 if self.scales.shape[-2] == self.data.shape[-2] else FP8_BLOCK

    @classmethod
    def quantize(cls, x: torch.Tensor, rows: int = 1) -> Float8Tensor:
        """Quantise x [..., R, C] by definition, in torch. rows: rows that share a scale, 1 or 128.

        The scale is the least power of two under which the block's amax (at least 1e-4) is at most 448. Numbers are
        rounded to nearest, ties to even. A block with NaN or Inf gets the scale NaN and all its numbers become NaN.
        Raises TypeError or ValueError naming the argument.
        """
        check_int("rows", rows)
        if rows not in (1, FP8_BLOCK):
            raise ValueError(f"rows: must be 1 or {FP8_BLOCK}, got {rows}")
        check_floating("x", x)
        if x.dim() < 2 or x.shape[-1] % FP8_BLOCK:
            raise ValueError(
                f"x: must be [..., R, C], C a multiple of {FP8_BLOCK}, got shape {list(x.shape)}"
            )
        amax = x.float().abs().unflatten(-1, (-1, FP8_BLOCK)).amax(-1)
        if rows > 1:
            padding = -x.shape[-2] % rows
            amax = torch.nn.functional.pad(amax, (0, 0, 0, padding)).unflatten(-2, (-1, rows)).amax(-2)
        finite = amax.isfinite()
        k = scale_exponents(torch.where(finite, amax, 1.0).clamp(min=MIN_AMAX), "e4m3")
        scales = torch.where(finite, torch.ldexp(torch.ones_like(amax), k), torch.nan)
        scaled = torch.where(expand(finite, x.shape), x.float() / expand(scales, x.shape), 0.0)
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        codes = torch.where(expand(finite, x.shape), codes, E4M3_NAN)
        return cls(codes.view(torch.float8_e4m3fn), scales)

    @property
    def values(self) -> torch.Tensor:
        """fp32: data * scales."""
        return self.data.float() * expand(self.scales, self.data.shape)


def expand(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Expand scales to one for each number of [..., R, C]."""
    if scales.shape[-2] != shape[-2]:
        scales = scales.repeat_interleave(FP8_BLOCK, -2)[..., : shape[-2], :]
    return scales.repeat_interleave(FP8_BLOCK, -1)
