"""Seeded weights, state and tokens of a Swap-FFN block, for tests and benchmarks."""

from __future__ import annotations

import torch

from warpspec.swap.weights import BANKS, SwapFFNWeights, SwapState

EMBED = 32  # width of a core's embedding


def random_weights(
    *, cores=512, d_model=1024, d_ff=4096, collapse_r=224, seed=0, device="cpu", d_router=64, collapse_k=8
) -> SwapFFNWeights:
    """Weights under which vectors keep about their size from step to step, and about half of the gates are open."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape, scale=1.0, mean=0.0):
        return torch.randn(*shape, generator=generator, device=device) * scale + mean

    return SwapFFNWeights.from_tensors(
        {
            "core_embed": normal(cores, EMBED),
            "core_scale.weight": normal(d_model, EMBED, scale=0.1),
            "core_scale.bias": normal(d_model, scale=0.1),
            "core_shift.weight": normal(d_model, EMBED, scale=0.1),
            "core_shift.bias": normal(d_model, scale=0.1),
            "core_alpha.weight": normal(collapse_k, EMBED, scale=0.2),
            "core_alpha.bias": normal(collapse_k),
            "router_norm": normal(d_model, scale=0.1, mean=1.0),
            "router_w": normal(d_router, d_model, scale=d_model**-0.5),
            "swap_w": normal(d_router, scale=0.3),
            "swap_b": normal(1, scale=0.1),
            "bank_w": normal(d_router, BANKS, scale=0.3),
            "bank_b": normal(BANKS, scale=0.1),
            "ffn_norm": normal(d_model, scale=0.1, mean=1.0),
            "w1": normal(d_ff, d_model, scale=d_model**-0.5),
            "w3": normal(d_ff, d_model, scale=d_model**-0.5),
            "w2": normal(d_model, d_ff, scale=2 * d_ff**-0.5),
            "basis": normal(collapse_k, collapse_r, d_model, scale=(collapse_k * d_model * cores) ** -0.5),
            "decoder": normal(d_model, collapse_r, scale=collapse_r**-0.5),
        }
    )


def random_call(weights: SwapFFNWeights, batch: int, *, seed=1) -> tuple[torch.Tensor, SwapState]:
    """(x, state): tokens, banks of random vectors, maps of random permutations."""
    device = weights.device
    generator = torch.Generator(device).manual_seed(seed)
    shape = (batch, weights.cores)
    x = torch.randn(batch, weights.d_model, generator=generator, device=device).bfloat16()
    ram = torch.randn(*shape, BANKS, weights.d_model, generator=generator, device=device).bfloat16()
    order = torch.rand(*shape, BANKS, generator=generator, device=device).argsort(-1)
    shifts = 2 * torch.arange(BANKS, device=device)
    return x, SwapState(ram, (order << shifts).sum(-1).to(torch.uint8))
