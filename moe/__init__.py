"""Mixture of experts: NVFP4 SwiGLU grouped GEMM, routing, activation quantisation."""

from __future__ import annotations

from warpspec.common.errors import UnsupportedProblem
from warpspec.moe.operands import PreparedWeights, QuantizedRows, prepare_w2, prepare_w13
from warpspec.moe.permute import SortedTokens, sort_tokens
from warpspec.moe.routing import route

__all__ = [
    "PreparedWeights",
    "QuantizedRows",
    "SortedTokens",
    "UnsupportedProblem",
    "prepare_w2",
    "prepare_w13",
    "route",
    "sort_tokens",
]
