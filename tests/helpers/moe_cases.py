"""Random layers of experts and what they compute by definition, a token and a choice at a time."""

import torch

from warpspec.common import nvfp4
from warpspec.moe import NVFP4Experts, reference, route
from warpspec.moe.permute import sort_tokens

GEMM_TOLERANCE = 3e-3  # relative, per expert, bf16 results


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_experts(experts, hidden, width, *, biases=False, seed=0, **options) -> tuple[NVFP4Experts, tuple]:
    """(experts, their weights as given: gate, up [E, I, H], down [E, H, I], biases or None three times)."""
    gate, up = (randn(experts, width, hidden, seed=seed + i) * hidden**-0.5 for i in (1, 2))
    down = randn(experts, hidden, width, seed=seed + 3) * width**-0.5
    b = [None] * 3
    if biases:
        b = [randn(experts, size, seed=seed + 4 + i) / 2 for i, size in enumerate((width, width, hidden))]
    layer = NVFP4Experts.quantize(gate, up, down, gate_bias=b[0], up_bias=b[1], down_bias=b[2], **options)
    return layer, (gate, up, down, *b)


def exact_case() -> tuple[NVFP4Experts, tuple]:
    """(experts, (x, ids, weights)) of which "w4a4" is exact but for the activation, whatever the order of sums: weights
    of one power of two, in blocks of 32, and few of them; tails of 16 and of K."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows, k):
        codes = torch.randint(0, 256, (3, rows, k // 2), dtype=torch.uint8, generator=generator)
        return nvfp4.from_mxfp4(codes, torch.full((3, rows, k // 32), 122, dtype=torch.uint8))

    layer = NVFP4Experts.quantize(matrix(56, 96), matrix(56, 96), matrix(96, 64))
    x = randn(6, 96, seed=3).bfloat16()
    x[3] *= 100
    x[4, 7] = torch.nan
    ids, weights = route(randn(6, 3), 2)
    ids[1, 0], ids[5] = -1, ids[5, 0]
    return layer, (x, ids, weights)


def quantized(x: torch.Tensor, dims: int) -> torch.Tensor:
    """What is left of x [..., K] once it is NVFP4, K padded to whole blocks on the way."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 16))
    return nvfp4.dequantize(nvfp4.quantize(padded, global_dims=dims))[..., : x.shape[-1]]


def act(gate, up, activation, limit):
    if limit is not None:
        gate, up = torch.minimum(gate, torch.tensor(limit)), up.clamp(-limit, limit)
    if activation == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


def by_definition(x, weights, ids, topk_weights, *, activation, limit, scale, shared=0) -> torch.Tensor:
    """fp32 [T, H]. weights: as `make_experts` returns them. scale: float, of the activations between the GEMMs."""
    gate, up, down = (quantized(w, 1) for w in weights[:3])
    gate_bias, up_bias, down_bias = weights[3:]
    experts, result = gate.shape[0], torch.zeros(x.shape)
    rows = quantized(x, 1)
    for t in range(x.shape[0]):
        choices = [(e, w) for e, w in zip(ids[t].tolist(), topk_weights[t].tolist(), strict=True)]
        choices = [(e, w) for e, w in choices if 0 <= e < experts - shared]
        choices += [(experts - shared + s, 1.0) for s in range(shared)]
        for e, weight in choices:
            g, u = gate[e] @ rows[t], up[e] @ rows[t]
            if gate_bias is not None:
                g, u = g + gate_bias[e], u + up_bias[e]
            h = torch.nn.functional.pad(act(g, u, activation, limit), (0, -g.shape[0] % 16))
            h = nvfp4.dequantize(nvfp4.quantize(h[None], torch.tensor(scale)))[0, : g.shape[0]]
            y = down[e] @ h
            result[t] += weight * (y if down_bias is None else y + down_bias[e])
    return result


def relative_error(got, expected) -> float:
    return ((got.float() - expected).norm() / expected.norm()).item()


def fp32_layer(
    x, experts: NVFP4Experts, ids, topk_weights, *, activation="swiglu", limit=None
) -> torch.Tensor:
    """The reference before its rounding to bf16, [T, H]."""
    every = torch.arange(experts.experts, experts.w13.experts, dtype=torch.int32).expand(len(ids), -1)
    ids = torch.cat([torch.where(ids < experts.experts, ids, -1), every], dim=1)
    topk_weights = torch.cat([topk_weights, torch.ones(every.shape)], dim=1)
    tokens = sort_tokens(ids, experts.w13.experts)
    weights = experts.w13, experts.w2, experts.intermediate_scale
    return reference.layer(x, tokens, topk_weights, *weights, activation, limit)
