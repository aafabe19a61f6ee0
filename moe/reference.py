"""The layer by its definition, in FP32 torch on the quantised operands: what every kernel is compared with.

Expert by expert; activations and intermediate results are quantised where the kernels quantise them, and nothing
else is rounded.
"""

from __future__ import annotations

import torch

from warpspec.moe.activations import activate
from warpspec.moe.operands import PreparedWeights, QuantizedRows, deinterleave
from warpspec.moe.permute import SortedTokens


def grouped_gemm(
    a: QuantizedRows,
    w: PreparedWeights,
    offsets: torch.Tensor,
    *,
    activation: str | None,
    limit: float | None,
) -> torch.Tensor:
    """fp32 [R, N], or [R, N/2] of an activation ("swiglu", "swiglu_oai"; None: none). Rows past offsets[-1] are 0."""
    rows = a.dequantize(offsets)
    out = torch.zeros(a.rows, w.width, device=rows.device)
    start = 0
    for e, end in enumerate(offsets.tolist()):
        if end > start:
            product = rows[start:end] @ one_expert(w, e).T
            if w.bias is not None:
                product = product + w.bias[e]
            if activation is not None:
                gate, up = (half[0] for half in deinterleave(product.T[None]))
                product = activate(gate, up, activation, limit).T
            out[start:end] = product
        start = end
    return out


def one_expert(w: PreparedWeights, e: int) -> torch.Tensor:
    """fp32 [N, K] of expert e. One at a time: a layer's weights in fp32 are many gigabytes."""
    one = PreparedWeights(w.data[e : e + 1], w.scales[e : e + 1], w.global_scale[e : e + 1], w.n, w.k)
    return one.dequantize()[0]


def unpermute(rows: torch.Tensor, tokens: SortedTokens, weights: torch.Tensor) -> torch.Tensor:
    """fp32 [T, H]: sum over a token's choices, in their order, of weight * rows[position]."""
    total = torch.zeros(weights.shape[0], rows.shape[1], device=rows.device)
    for j in range(tokens.choices):
        position = tokens.position[:, j].long()
        taken = (position >= 0).nonzero()[:, 0]
        total[taken] += weights[taken, j, None] * rows[position[taken]].float()
    return total


def layer(x, tokens: SortedTokens, weights, w13, w2, intermediate_scale, activation, limit) -> torch.Tensor:
    """fp32 [T, H] of the whole layer: x [T, H] and what comes between the GEMMs quantised, nothing else rounded."""
    a = QuantizedRows.from_rows(x[(tokens.source // tokens.choices).long()], tokens.offsets)
    h = grouped_gemm(a, w13, tokens.offsets, activation=activation, limit=limit)
    h = QuantizedRows.from_rows(h, tokens.offsets, out_scale=intermediate_scale)
    return unpermute(grouped_gemm(h, w2, tokens.offsets, activation=None, limit=None), tokens, weights)
