"""Checks the arguments of ``output_projection`` once and derives their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from warpspec.common.checks import check_operand, kind_of
from warpspec.common.outputs import check_output
from warpspec.latent.projection.float8 import FP8_BLOCK, Float8Tensor


@dataclass(frozen=True)
class ProjectionProblem:
    """Sizes of a call.

    tokens, groups: T and G. columns, depth: N and K of a group's product. float8: FP8, else bf16.
    """

    tokens: int
    groups: int
    columns: int
    depth: int
    float8: bool

    @classmethod
    def of(cls, o, weight, out) -> ProjectionProblem:
        float8 = isinstance(o, Float8Tensor)
        if float8 != isinstance(weight, Float8Tensor):
            raise TypeError(
                f"weight: must be {'a Float8Tensor' if float8 else 'a bf16 tensor'}, as o is, got "
                f"{type(weight).__name__}"
            )
        numbers, weights = (o.data, weight.data) if float8 else (o, weight)
        if not isinstance(numbers, torch.Tensor):
            raise TypeError(f"o: must be a bf16 tensor or a Float8Tensor, got {kind_of(numbers)}")
        if numbers.dim() not in (2, 3):
            raise ValueError(f"o: must be [T, H, D] or [T, H D], got shape {list(numbers.shape)}")
        dtype, device = torch.float8_e4m3fn if float8 else torch.bfloat16, numbers.device
        check_operand("o", numbers, (dtype,), (-1,) * numbers.dim(), device, aligned=True)
        check_operand("weight", weights, (dtype,), (-1, -1, -1), device, aligned=True)
        tokens, (groups, columns, depth) = len(numbers), weights.shape
        width = math.prod(numbers.shape[1:])
        if min(groups, columns, depth) == 0 or groups * depth != width:
            raise ValueError(
                f"weight: must be [G, N, K] with G K = {width}, the numbers of a row of o, got {list(weights.shape)}"
            )
        if numbers.dim() == 3 and tokens and numbers.shape[1] > 1 and numbers.stride(1) != numbers.shape[2]:
            raise ValueError(f"o: heads must be contiguous, got strides {list(numbers.stride())}")
        if float8:
            if o.rows != 1:
                raise ValueError(
                    f"o: must have a scale for {FP8_BLOCK} numbers of a row, got one for {o.rows} rows"
                )
            if weight.rows != FP8_BLOCK:
                raise ValueError(
                    f"weight: must have a scale for {FP8_BLOCK} x {FP8_BLOCK} numbers, got one for a row"
                )
            if depth % FP8_BLOCK:
                raise ValueError(f"weight: K must be a multiple of {FP8_BLOCK} in FP8, got {depth}")
        if out is not None:
            check_operand("out", out, (torch.bfloat16,), (tokens, groups, columns), device, aligned=True)
            check_apart_out(out, *parts_of(o), *parts_of(weight))
        return cls(tokens, groups, columns, depth, float8)


def parts_of(value: torch.Tensor | Float8Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(numbers, scales) of an operand; scales are None in bf16."""
    return (value.data, value.scales) if isinstance(value, Float8Tensor) else (value, None)


def check_apart_out(out, o, o_scales, weight, weight_scales) -> None:
    """Check that ``out`` has no address twice and overlaps no argument."""
    others = {"o": o, "o's scales": o_scales, "weight": weight, "weight's scales": weight_scales}
    check_output("out", out, others)
