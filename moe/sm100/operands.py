"""The arguments of a grouped GEMM on sm_100a."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.common.nvfp4 import ATOM_BYTES
from warpspec.common.operands import BFLOAT16, FLOAT32, INT32, OUTPUT, UINT8, Number, Operand


class GemmOperands(NamedTuple):
    """Tensors of a launch.

    tokens: uint8 [R, pitch]; token_scales: uint8 [atoms, K atoms, 512]; row_scale: fp32 [R]. weights: uint8
    [E, N, pitch]; weight_scales: uint8 [E, N atoms, K atoms, 512]; global_scale: fp32 [E, 1 or 2]; bias: fp32
    [E, N]. offsets: int32 [E]. out: bf16 [R, columns], or uint8 [R, pitch] together with out_scales, shaped like
    token_scales, and out_scale fp32 [E].
    """

    tokens: Annotated[Any, Operand(UINT8, 2, None, TMA_ALIGNMENT)]
    token_scales: Annotated[Any, Operand(UINT8, 3, ATOM_BYTES, TMA_ALIGNMENT)]
    row_scale: Annotated[Any, Operand(FLOAT32, 1, when="has_row_scale")]
    weights: Annotated[Any, Operand(UINT8, 3, None, TMA_ALIGNMENT)]
    weight_scales: Annotated[Any, Operand(UINT8, 4, ATOM_BYTES, TMA_ALIGNMENT)]
    global_scale: Annotated[Any, Operand(FLOAT32, 2, lambda c: 2 if c.gated else 1)]
    bias: Annotated[Any, Operand(FLOAT32, 2, None, TMA_ALIGNMENT, "has_bias")]
    offsets: Annotated[Any, Operand(INT32, 1)]
    out: Annotated[Any, Operand(lambda c: UINT8 if c.quantizes else BFLOAT16, 2, None, TMA_ALIGNMENT), OUTPUT]
    out_scales: Annotated[Any, Operand(UINT8, 3, ATOM_BYTES, TMA_ALIGNMENT, "quantizes"), OUTPUT]
    out_scale: Annotated[Any, Operand(FLOAT32, 1, when="quantizes")]


class GemmNumbers(NamedTuple):
    """The numbers among the arguments.

    k: values along K. columns: outputs of a row. limit: the clamp of gate and up. groups: number of CTAs, or of pairs.
    """

    k: Annotated[Any, Number(INT32)]
    columns: Annotated[Any, Number(INT32)]
    limit: Annotated[Any, Number(FLOAT32)]
    groups: Annotated[Any, Number(INT32)]
