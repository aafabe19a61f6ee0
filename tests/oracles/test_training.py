"""Two-layer models of transformers, trained with our attention and with transformers' own: the same loss curves."""

import pytest
import torch
from helpers.engine_models import VOCABULARY, make_model

import warpspec.engines.transformers as engine

STEPS, LENGTH = 50, 24
ROUNDING = 0.012  # of a loss; of llama's, SDPA and eager attention differ by 0.006, both of transformers


def losses(kind: str, implementation: str, device="cpu", checkpointing: bool = False) -> torch.Tensor:
    """[STEPS] of training on four sentences that repeat."""
    model = make_model(kind).to(device).train()
    model.set_attn_implementation(implementation)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(2, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(5)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_loss_curves(kind):
    """gpt_oss: with sinks, whose gradients count, and a window. Activation checkpointing changes no bit."""
    engine.register("warpspec_trained", backend="reference")
    eager, ours = losses(kind, "eager"), losses(kind, "warpspec_trained")
    assert eager[-1] < 0.6 * eager[0], "nothing is learned"
    assert ((ours - eager).abs() / eager).max() < ROUNDING
    assert torch.equal(losses(kind, "warpspec_trained", checkpointing=True), ours)
