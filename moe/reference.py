"""The layer by its definition, in FP32 torch on the quantised operands: what every kernel is compared with.

It works expert by expert. Activations and intermediate results are rounded where the kernels of a precision round them,
to NVFP4 ("w4a4") or to bf16 ("w4a16"); nothing else is rounded.
"""

from __future__ import annotations

import torch

from warpspec.common.autocast import without_autocast
from warpspec.common.nvfp4 import NVFP4_BLOCK
from warpspec.moe.activations import activate
from warpspec.moe.operands import PreparedWeights, QuantizedRows, deinterleave, pad_columns
from warpspec.moe.permute import SortedTokens
from warpspec.moe.streamed import StreamedWeights


@without_autocast
def grouped_gemm(
    a: QuantizedRows | torch.Tensor,
    w: PreparedWeights | StreamedWeights,
    offsets: torch.Tensor,
    *,
    activation: str | None,
    limit: float | None,
) -> torch.Tensor:
    """fp32 [R, N], or [R, N/2] with an activation ("swiglu", "swiglu_oai"; None: none).

    a: rows, quantised or fp32 [R, K]. Rows past offsets[-1] are 0.
    """
    rows = a.dequantize(offsets) if isinstance(a, QuantizedRows) else a
    out = torch.zeros(
        a.rows if isinstance(a, QuantizedRows) else len(a), w.width, dtype=torch.float32, device=rows.device
    )
    start = 0
    for e, end in enumerate(offsets.tolist()):
        if end > start:
            product = rows[start:end] @ one_expert(w, e).T
            if w.bias is not None:
                product = product + w.row_bias(e)
            if activation is not None:
                gate, up = (half[0] for half in deinterleave(product.T[None]))
                product = activate(gate, up, activation, limit).T
            out[start:end] = product
        start = end
    return out


def one_expert(w: PreparedWeights | StreamedWeights, e: int) -> torch.Tensor:
    """fp32 [N, K] of expert e. One expert at a time, because a layer's weights in fp32 take many gigabytes."""
    return w.dequantize(slice(e, e + 1))[0]


def unpermute(rows: torch.Tensor, tokens: SortedTokens, weights: torch.Tensor) -> torch.Tensor:
    """fp32 [T, H]: sum over a token's choices, in their order, of weight * rows[position]."""
    total = torch.zeros(weights.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for j in range(tokens.choices):
        position = tokens.position[:, j].long()
        taken = (position >= 0).nonzero()[:, 0]
        total[taken] += weights[taken, j, None] * rows[position[taken]].float()
    return total


@without_autocast
def layer(
    x, tokens: SortedTokens, weights, w13, w2, intermediate_scale, activation, limit, precision="w4a4"
) -> torch.Tensor:
    """fp32 [T, H] of the whole layer. x [T, H] and the activations between the GEMMs are rounded as ``precision`` says;
    nothing else is."""
    rows, offsets = x[(tokens.source // tokens.choices).long()], tokens.offsets
    holds_scale = isinstance(w2, PreparedWeights)  # whether w2's global scale includes the intermediate scale
    if precision == "w4a4":
        a = QuantizedRows.from_rows(rows, offsets)
        h = grouped_gemm(a, w13, offsets, activation=activation, limit=limit)
        h = QuantizedRows.from_rows(h, offsets, out_scale=intermediate_scale)
        if not holds_scale:
            h = h.dequantize(offsets)
            h = h * of_rows(intermediate_scale, offsets, len(h))
    else:
        h = grouped_gemm(rows.float(), w13, offsets, activation=activation, limit=limit).bfloat16().float()
        h = pad_columns(h, NVFP4_BLOCK)
        if holds_scale:
            h = h / of_rows(intermediate_scale, offsets, len(h))
    rows = grouped_gemm(h, w2, offsets, activation=None, limit=None)
    return unpermute(rows, tokens, weights)


def of_rows(per_expert: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Expand [E] to [R, 1]: the value of each row's expert. Rows past offsets[-1] get some expert's."""
    numbers = torch.arange(rows, device=offsets.device)
    expert = torch.searchsorted(offsets, numbers, right=True).clamp(max=len(offsets) - 1)
    return per_expert[expert][:, None]
