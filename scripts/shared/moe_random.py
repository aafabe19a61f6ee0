"""Layers of experts of random codes, at the sizes of published models, and tokens routed at random."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from warpspec.common.hardware import WARPGROUP_ROWS
from warpspec.moe import NVFP4Experts
from warpspec.moe.streamed import (
    CHUNK_BYTES,
    SCALE_BIAS,
    SCALE_MANTISSA_BITS,
    STEP_CHUNKS,
    StreamedWeights,
    row_order,
    scale_bytes,
    steps_of,
    tile_bytes,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ZIPF = 1.1


@dataclass(frozen=True)
class Model:
    """Sizes of a layer. block: values to a scale."""

    experts: int
    hidden: int
    width: int
    choices: int
    block: int
    activation: str
    limit: float
    biases: bool


MODELS = {
    "gpt-oss-20b": Model(32, 2880, 2880, 4, 32, "swiglu_oai", 7.0, True),
    "gpt-oss-120b": Model(128, 2880, 2880, 4, 32, "swiglu_oai", 7.0, True),
    "flash": Model(256, 4096, 2048, 6, 16, "swiglu", 10.0, False),
    "pro-48": Model(48, 7168, 3072, 6, 16, "swiglu", 10.0, False),
}
SMALL_MODELS = {  # of the same kinds, for a CPU
    "small-mx": Model(8, 192, 64, 4, 32, "swiglu_oai", 7.0, True),
    "small-nv": Model(12, 128, 64, 6, 16, "swiglu", 10.0, False),
}


def random_weights(model: Model, n: int, k: int, parts: int, generator) -> StreamedWeights:
    """Random codes, scales of 1 to 2, a global scale that keeps the results' size that of the tokens."""
    rows = len(row_order(n, parts == 2))
    tiles = rows // WARPGROUP_ROWS
    data = torch.empty(model.experts, tiles, tile_bytes(k, model.block), dtype=torch.uint8, device=DEVICE)
    data.view(torch.int64).random_(generator=generator)
    size = scale_bytes(model.block)
    low = (1 << SCALE_MANTISSA_BITS) - 1 if model.block == 16 else 0
    for step in range(steps_of(k)):
        at = step * (size + STEP_CHUNKS * CHUNK_BYTES)
        scales = data[:, :, at : at + size]
        scales.bitwise_and_(low).add_(SCALE_BIAS << SCALE_MANTISSA_BITS)
    scale = torch.full((model.experts, parts), 0.4 / k**0.5, device=DEVICE)
    bias = torch.randn(model.experts, rows, device=DEVICE, generator=generator) / 4 if model.biases else None
    return StreamedWeights(data, scale, n, k, model.block, bias)


def random_experts(model: Model) -> NVFP4Experts:
    generator = torch.Generator(DEVICE).manual_seed(0)
    w13 = random_weights(model, 2 * model.width, model.hidden, 2, generator)
    w2 = random_weights(model, model.hidden, model.width, 1, generator)
    return NVFP4Experts(w13, w2, torch.ones(model.experts, device=DEVICE))


def random_tokens(model: Model, tokens: int, routing: str, seed: int) -> tuple:
    """(x, ids, weights)."""
    generator = torch.Generator().manual_seed(seed)
    likely = torch.arange(1, model.experts + 1) ** (-ZIPF if routing == "zipf" else 0.0)
    ids = torch.multinomial(likely.expand(tokens, -1), model.choices, generator=generator).int()
    weights = torch.rand(tokens, model.choices, generator=generator)
    own = torch.Generator(DEVICE).manual_seed(seed)  # of the many numbers
    x = torch.randn(tokens, model.hidden, generator=own, device=DEVICE).bfloat16()
    return x, ids.to(DEVICE), (weights / weights.sum(1, keepdim=True)).to(DEVICE)


def bytes_read(experts: NVFP4Experts, ids: torch.Tensor) -> int:
    """Weights of the experts that have tokens."""
    each = sum(w.data[0].numel() for w in (experts.w13, experts.w2))
    return each * len(torch.unique(ids))


def flops(model: Model, tokens: int) -> float:
    return 6.0 * tokens * model.choices * model.hidden * model.width


def pick(w: StreamedWeights, experts: list[int]) -> StreamedWeights:
    bias = None if w.bias is None else w.bias[experts]
    return replace(w, data=w.data[experts], global_scale=w.global_scale[experts], bias=bias)
